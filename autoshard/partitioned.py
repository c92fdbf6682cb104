"""One layout in a program's base module, partitioned in process: what Shardy makes of it."""

from autoshard.analysis import Analysis
from autoshard.compat import partitioner, shardings
from autoshard.compat.judged import Judged
from autoshard.layout import Spec
from autoshard.program import Leaf
from autoshard.specs import Specs


def partitioned(
    analysis: Analysis,
    specs: Specs,
    attributes: shardings.Attributes | None = None,
) -> Judged:
    """Asks the partitioner. Not thread-safe: modules share a context.

    Args:
      specs: on a mesh of at least one axis.
      attributes: of earlier calls for the same analysis, to save time.
    """
    program = analysis.program
    return partitioner.judge(
        analysis.module,
        specs.mesh,
        [_closed(s, x) for s, x in zip(specs.inputs, program.inputs, strict=True)],
        [_closed(s, x) for s, x in zip(specs.outputs, program.outputs, strict=True)],
        {i: tuple(zip(s.spec, s.open, strict=True)) for i, s in specs.sites.items()},
        analysis.site_of_tag,
        attributes or shardings.Attributes(analysis.module.context),
    )


def _closed(spec: Spec, leaf: Leaf) -> shardings.Dims:
    """Every dimension closed; the words of a PRNG key are a dimension that stays whole."""
    return tuple((axes, False) for axes in (*spec, *((),) * leaf.is_key))
