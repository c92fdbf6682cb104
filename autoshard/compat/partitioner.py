"""The Shardy partitioner in process: one layout put into a module, and what came of it."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from autoshard.compat.lookups import LOOKUPS, keep_tables
from autoshard.compat.reshards import Division, division
from autoshard.compat.shardings import (
    Attributes,
    Dims,
    mesh_text,
    parse_sharding,
    sharding_text,
)
from autoshard.compat.stablehlo import (
    TAG,
    Attribute,
    Block,
    Operation,
    Value,
    bytes_of,
    main_function,
    mesh_operation,
    run_passes,
    shape_and_bits,
    walk,
)
from autoshard.subaxes import distinct, ways

_PROPAGATE = "builtin.module(sdy-propagation-pipeline,sdy-close-shardings)"
_RESHARD = (
    "builtin.module("
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)


def propagate(
    module: Operation, sizes: dict[str, int], attributes: Attributes, looks_up: bool
) -> None:
    """Runs the partitioner in place, up to explicit collectives.

    Args:
      looks_up: whether the module has any of `LOOKUPS`.
    """
    run_passes(module, _PROPAGATE)
    if looks_up:
        keep_tables(main_function(module), sizes, attributes)
    run_passes(module, _RESHARD)


class Sum(NamedTuple):
    """What an all-reduce adds up, and what becomes of it.

    Attributes:
      product: it is of a matrix product.
      summed: its mesh axes for each dimension that is summed; all at once where the operand does
        not tell them apart.
      cut: mesh axes that the result is divided by right after, for each dimension that has some.
      fresh: no dimension that is cut was divided before.
      added: its result is only added to that of another sum, alike and earlier.
    """

    product: bool
    summed: tuple[tuple[str, ...], ...]
    cut: tuple[tuple[str, ...], ...]
    fresh: bool
    added: bool = False


class Communication(NamedTuple):
    """One collective as the partitioner puts it.

    Attributes:
      kind: the operation's name without its dialect, such as "all_gather".
      axes: mesh axes that it runs over.
      before, after: local bytes that go in and come out.
      block: a tag of the block it stands in.
      tag: of the operation before it.
      sum: of an all-reduce; None of others.
      gathered: the mesh axes gathered along each dimension that has some, in order of dimensions.
      location: of the operation.
    """

    kind: str
    axes: tuple[str, ...]
    before: float
    after: float
    block: int
    tag: int
    sum: Sum | None
    gathered: tuple[tuple[str, ...], ...]
    location: str


class Judged:
    """What the partitioner made of one layout, as plain data.

    Attributes:
      shards: tag -> for each result the set of mesh axes (or parts) that divide it.
      contracted: tag of a product or reduction -> mesh axes that divide its work.
      operands: tag of the same -> for each operand the mesh axes that divide what is read, which is
        less than what was made where the partitioner gathers in between.
      communication: every collective, in the order of the program.
      argument_axes: mesh axes of each argument of main.
      argument_dims, result_dims: mesh axes of each dimension of the arguments and results of main.
    """

    __slots__ = (
        "argument_axes",
        "argument_dims",
        "communication",
        "contracted",
        "operands",
        "result_dims",
        "shards",
    )

    def __init__(self) -> None:
        self.shards: dict[int, tuple[frozenset[str], ...]] = {}
        self.contracted: dict[int, frozenset[str]] = {}
        self.operands: dict[int, tuple[frozenset[str], ...]] = {}
        self.communication: list[Communication] = []
        self.argument_axes: list[frozenset[str]] = []
        self.argument_dims: list[tuple[tuple[str, ...], ...]] = []
        self.result_dims: list[tuple[tuple[str, ...], ...]] = []


def _before_cast(value: Value) -> Value:
    """What is sent of a value: where a cast has just widened it, the narrow one.

    Shardy reshards the result of a cast; XLA's partitioner gives every elementwise operation its
    operands as the result is sharded, so that the cast comes after (seen with bf16 scores that are
    cast to f32, jaxlib 0.10.2 for H100).
    """
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.convert":
        return value
    narrow = owner.operands[0]
    bits = [shape_and_bits(str(v.type))[1] for v in (narrow, value)]
    return narrow if bits[0] < bits[1] else value


_CONSTANTS = frozenset({"sdy.constant", "stablehlo.constant"})


def _filled(value: Value) -> bool:
    """Whether it is one constant number throughout."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    if owner.name == "stablehlo.broadcast_in_dim":
        return _filled(owner.operands[0])
    if owner.name not in _CONSTANTS:
        return False
    held = owner.attributes["value"]
    return isinstance(held, ir.DenseElementsAttr) and held.is_splat


_AXIS = re.compile(r'"[^"]+"(?::\(\d+\)\d+)?')
_DIMENSION = re.compile(r"\{([^{}]*)\}")
_CONTRACTING = frozenset({"stablehlo.dot_general", "stablehlo.convolution", "stablehlo.reduce"})


def judge(
    module: Operation,
    mesh: Sequence[tuple[str, int]],
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    sites: dict[int, Dims],
    site_of_tag: dict[int, int],
    attributes: Attributes,
) -> Judged:
    """Puts one layout into a copy of a tagged module, runs the partitioner, reads the result."""
    sizes = dict(mesh)
    with module.context:
        copy = module.clone()
        mesh_operation(copy).attributes["mesh"] = attributes(mesh_text(mesh))
        main = main_function(copy)
        main.attributes["arg_attrs"] = attributes(_attribute_list(inputs))
        main.attributes["res_attrs"] = attributes(_attribute_list(outputs))
        looks_up = False
        for op in walk(main.regions[0].blocks[0]):
            looks_up = looks_up or op.name in LOOKUPS
            if op.name == "sdy.sharding_constraint":
                dims = sites.get(site_of_tag.get(op.attributes[TAG].value, -1))
                if dims is not None:
                    op.attributes["sharding"] = attributes(sharding_text(dims))
        propagate(copy, sizes, attributes, looks_up)
        return _read(main_function(copy), sizes)


def _attribute_list(tensors: Sequence[Dims]) -> str:
    return "[" + ", ".join("{sdy.sharding = " + sharding_text(d) + "}" for d in tensors) + "]"


def _dims_of(named: Any) -> tuple[tuple[str, ...], ...]:
    return parse_sharding(str(named["sdy.sharding"])) if "sdy.sharding" in named else ()


def _read(main: Operation, sizes: dict[str, int]) -> Judged:
    judged = Judged()
    memo: dict[Attribute, tuple[frozenset[str], ...]] = {}

    def axes_of(attribute: Attribute) -> tuple[frozenset[str], ...]:
        found = memo.get(attribute)
        if found is None:
            parts = str(attribute).split("<@")[1:]
            found = tuple(
                frozenset(a for dim in parse_sharding("<@" + part) for a in dim) for part in parts
            )
            memo[attribute] = found
        return found

    of_value: dict[Value, frozenset[str]] = {}
    # Sums over devices that nothing has used yet, by value: where they stand in `communication`.
    sums: dict[Value, int] = {}
    resharded: set[tuple[str, Value, Attribute]] = set()
    empty: frozenset[str] = frozenset()
    block = main.regions[0].blocks[0]
    for argument, attribute in zip(block.arguments, main.attributes["arg_attrs"], strict=True):
        named = ir.DictAttr(attribute)
        axes = axes_of(named["sdy.sharding"])[0] if "sdy.sharding" in named else empty
        of_value[argument] = axes
        judged.argument_dims.append(_dims_of(named))
        judged.argument_axes.append(axes)
    judged.result_dims = [_dims_of(ir.DictAttr(a)) for a in main.attributes["res_attrs"]]

    def visit(block: Block) -> None:
        # Collectives take the trip count of the block they stand in: that of its first operation.
        own_tag = next(
            (o.attributes[TAG].value for o in block.operations if TAG in o.attributes), -1
        )
        last_tag = own_tag
        for o in block.operations:
            op = o.operation
            held = op.attributes
            name = op.name
            if TAG in held:
                last_tag = held[TAG].value
                shards: tuple[frozenset[str], ...] = ()
                if "sdy.sharding" in held:
                    shards = axes_of(held["sdy.sharding"])
                results = op.results
                shards += (empty,) * (len(results) - len(shards))
                judged.shards[last_tag] = shards
                for result, axes in zip(results, shards, strict=False):
                    of_value[result] = axes
                if name == "stablehlo.add" and all(v in sums for v in op.operands):
                    first, second = (sums.pop(v) for v in op.operands)
                    if _alike(judged.communication[first], judged.communication[second]):
                        judged.communication[second] = _added(judged.communication[second])
                        if _used_once(op.results[0]):
                            sums[op.results[0]] = first
                if name in _CONTRACTING:
                    every = set(shards[0])
                    given = tuple(of_value.get(operand, empty) for operand in op.operands)
                    every.update(*given)
                    judged.operands[last_tag] = given
                    judged.contracted[last_tag] = frozenset(distinct(every))
                if name == "stablehlo.while":
                    for region in op.regions:
                        inner = region.blocks[0]
                        for argument, axes in zip(inner.arguments, shards, strict=True):
                            of_value[argument] = axes
                        visit(inner)
                elif name in ("stablehlo.case", "stablehlo.if"):
                    for region in op.regions:
                        for inner in region.blocks:
                            visit(inner)
            elif name.startswith("sdy.") and "out_sharding" in held:
                out = axes_of(held["out_sharding"])[0]
                result = op.results[0]
                of_value[result] = out
                if name == "sdy.all_slice":
                    if op.operands[0] in sums and _used_once(result):
                        sums[result] = sums.pop(op.operands[0])
                    continue
                before = of_value.get(op.operands[0], empty)
                along: tuple[tuple[str, ...], ...] = ()
                summed = None
                if name == "sdy.all_reduce":
                    involved = tuple(dict.fromkeys(_AXIS.findall(str(held["reduction_axes"]))))
                    summed = _sum(op.operation, _bare(involved))
                elif name == "sdy.all_gather":
                    along = _along(held["gathering_axes"])
                    involved = tuple(dict.fromkeys(a for axes in along for a in axes))
                elif name == "sdy.all_to_all":
                    involved = tuple(dict.fromkeys(_AXIS.findall(str(held["params"]))))
                else:
                    involved = distinct(out | before)
                if name != "sdy.all_reduce":
                    if _filled(op.operands[0]):
                        continue  # every device fills its own
                    # XLA's common-subexpression elimination: the same value is sent once.
                    if (same := (name, op.operands[0], held["out_sharding"])) in resharded:
                        continue
                    resharded.add(same)
                sent = op.operands[0] if name == "sdy.all_reduce" else _before_cast(op.operands[0])
                judged.communication.append(
                    Communication(
                        kind=name.removeprefix("sdy."),
                        axes=_bare(involved),
                        before=bytes_of(sent) / ways(before, sizes),
                        after=bytes_of(sent) / ways(out, sizes),
                        block=own_tag,
                        tag=last_tag,
                        sum=summed,
                        gathered=tuple(map(_bare, along)),
                        location=str(op.location)[:200],
                    )
                )
                if name == "sdy.all_reduce" and _used_once(result):
                    sums[result] = len(judged.communication) - 1

    visit(block)
    return judged


def _sum(op: Operation, axes: tuple[str, ...]) -> Sum:
    """Of an all-reduce over some mesh axes."""
    maker = op.operands[0].owner
    summed: tuple[tuple[str, ...], ...] = (axes,)
    product = False
    if not isinstance(maker, ir.Block):
        product = maker.name == "stablehlo.dot_general"
        if len(axes) > 1:
            over = (_within(division(operand), axes) for operand in maker.operands)
            summed = next((o for o in over if sum(map(len, o)) == len(axes)), summed)
    cut: tuple[tuple[str, ...], ...] = ()
    fresh = True
    users = list(itertools.islice(op.results[0].uses, 2))
    if len(users) == 1 and users[0].owner.name == "sdy.all_slice":
        slicing = _DIMENSION.findall(str(users[0].owner.attributes["slicing_axes"]))
        dims = [_bare(_AXIS.findall(dim)) for dim in slicing]
        cut = tuple(dim for dim in dims if dim)
        before = division(op.results[0])
        fresh = not any(now and then for now, then in zip(dims, before, strict=True))
    return Sum(product, summed, cut, fresh)


def _within(divided: Division, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Those of the mesh axes that divide each dimension, where there are any."""
    found = (tuple(axis for axis in dim if axis in axes) for dim in divided)
    return tuple(dim for dim in found if dim)


def _along(attribute: Attribute) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension that has some, of `gathering_axes` or `slicing_axes`."""
    found = (tuple(_AXIS.findall(dim)) for dim in _DIMENSION.findall(str(attribute)))
    return tuple(axes for axes in found if axes)


def _bare(axes: Sequence[str]) -> tuple[str, ...]:
    """Mesh axes without quotes; parts of them as they are."""
    return tuple(a.strip('"') if ":" not in a else a for a in axes)


def _used_once(value: Value) -> bool:
    return len(list(itertools.islice(value.uses, 2))) == 1


def _alike(one: Communication, other: Communication) -> bool:
    """Whether two sums over devices run over the same ones and are cut alike afterwards: a compiler
    may add first, and send once (XLA's all-reduce-reassociate and reduce-scatter-reassociate)."""
    return (one.axes, one.block, one.sum) == (other.axes, other.block, other.sum)


def _added(one: Communication) -> Communication:
    return one if one.sum is None else one._replace(sum=one.sum._replace(added=True))
