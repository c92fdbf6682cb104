"""One layout in a program's base module, partitioned in process: what Shardy makes of it."""

from collections.abc import Mapping
from typing import NamedTuple

from autoshard.compat.shardy import partitioner, shardings, stablehlo
from autoshard.compat.shardy.partitioned_program import PartitionedProgram
from autoshard.program.analysis import Analysis
from autoshard.program.program import Leaf
from autoshard.records.layout import Spec
from autoshard.space.specs import Specs


class Annotations(NamedTuple):
    """The shardings that a layout puts into a base module, as plain data.

    Attributes:
      mesh: names and sizes of its axes, in order; at least one.
      inputs, outputs: for each argument and result of main.
      sites: by the number of the site.
    """

    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[shardings.Dims, ...]
    outputs: tuple[shardings.Dims, ...]
    sites: dict[int, shardings.Dims]


class Partition(NamedTuple):
    """What the partitioner made of a layout, and the seconds that it took."""

    judged: PartitionedProgram
    elapsed_s: float


def annotations(analysis: Analysis, specs: Specs) -> Annotations:
    """What the partitioner is asked about.

    Args:
      specs: on a mesh of at least one axis.
    """
    program = analysis.program
    return Annotations(
        tuple(specs.mesh),
        tuple(_closed(s, x) for s, x in zip(specs.inputs, program.inputs, strict=True)),
        tuple(_closed(s, x) for s, x in zip(specs.outputs, program.outputs, strict=True)),
        {i: tuple(zip(s.spec, s.open, strict=True)) for i, s in specs.sites.items()},
    )


def partitioned(
    analysis: Analysis,
    specs: Specs,
    attributes: shardings.Attributes | None = None,
) -> PartitionedProgram:
    """Asks the partitioner. Not thread-safe: modules share a context.

    Args:
      specs: on a mesh of at least one axis.
      attributes: of earlier calls for the same analysis, to save time.
    """
    return judged(
        analysis.module,
        analysis.site_of_tag,
        annotations(analysis, specs),
        attributes or shardings.Attributes(analysis.module.context),
    )


def judged(
    module: stablehlo.Module,
    site_of_tag: Mapping[int, int],
    asked: Annotations,
    attributes: shardings.Attributes,
) -> PartitionedProgram:
    """Asks the partitioner about a base module, which need not be that of an analysis here."""
    return partitioner.judge(
        module, asked.mesh, asked.inputs, asked.outputs, asked.sites, site_of_tag, attributes
    )


def _closed(spec: Spec, leaf: Leaf) -> shardings.Dims:
    """Every dimension closed; the words of a PRNG key are a dimension that stays whole."""
    return tuple((axes, False) for axes in (*spec, *((),) * leaf.is_key))
