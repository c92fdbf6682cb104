"""The Shardy partitioner in process: one layout put into a module, and what came of it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set

from jaxlib.mlir import ir

from autoshard.compat.shardy.factor_rules import bind_rules, is_given
from autoshard.compat.shardy.lookups import LOOKUPS, keep_tables
from autoshard.compat.shardy.partitioned_program import PartitionedProgram, read
from autoshard.compat.shardy.products import divide_as_xla
from autoshard.compat.shardy.shardings import Attributes, Dims, mesh_text, sharding_text
from autoshard.compat.shardy.stablehlo import (
    TAG,
    Operation,
    main_function,
    mesh_operation,
    run_passes,
    walk,
)
from autoshard.errors import PartitionerRefused

_PROPAGATE = "builtin.module(sdy-propagation-pipeline,sdy-close-shardings)"
_RESHARD = (
    "builtin.module("
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Inside, MLIR reads a layout's text or runs the partitioner's passes, and nothing else.

    Some failed checks of the passes end the process instead.
    """
    try:
        yield
    except ir.MLIRError as error:
        raise PartitionerRefused(str(error)) from error


def propagate(
    module: Operation, sizes: dict[str, int], attributes: Attributes, names: Set[str]
) -> None:
    """Runs the partitioner in place, up to explicit collectives.

    Args:
      names: of the operations that the module has.

    Raises:
      PartitionerRefused: a pass fails.
    """
    with _refusals():
        run_passes(module, _PROPAGATE)
    operations = walk(main_function(module).regions[0].blocks[0])
    if names & LOOKUPS:
        keep_tables(operations, sizes, attributes)
    divide_as_xla(operations, sizes, attributes)
    if any(is_given(name) for name in names):
        bind_rules(operations, attributes)
    with _refusals():
        run_passes(module, _RESHARD)


def judge(
    module: Operation,
    mesh: Sequence[tuple[str, int]],
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    sites: Mapping[int, Dims],
    site_of_tag: Mapping[int, int],
    attributes: Attributes,
) -> PartitionedProgram:
    """Puts one layout into a copy of a tagged module, runs the partitioner, reads the result.

    Raises:
      PartitionerRefused: the partitioner does not take it.
    """
    sizes = dict(mesh)
    with module.context:
        copy = module.clone()
        main = main_function(copy)
        names: set[str] = set()
        with _refusals():
            mesh_operation(copy).attributes["mesh"] = attributes(mesh_text(mesh))
            main.attributes["arg_attrs"] = attributes(_attribute_list(inputs))
            main.attributes["res_attrs"] = attributes(_attribute_list(outputs))
        for op in walk(main.regions[0].blocks[0]):
            names.add(op.name)
            if op.name == "sdy.sharding_constraint":
                dims = sites.get(site_of_tag.get(op.attributes[TAG].value, -1))
                if dims is not None:
                    with _refusals():
                        sharding = attributes(sharding_text(dims))
                    op.attributes["sharding"] = sharding
        propagate(copy, sizes, attributes, names)
        return read(main_function(copy), sizes)


def _attribute_list(tensors: Sequence[Dims]) -> str:
    return "[" + ", ".join("{sdy.sharding = " + sharding_text(d) + "}" for d in tensors) + "]"
