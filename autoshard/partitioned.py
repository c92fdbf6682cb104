"""One layout in a program's base module, partitioned in process: what Shardy makes of it."""

from autoshard.analysis import Analysis
from autoshard.compat import shardy
from autoshard.layout import Spec
from autoshard.program import Leaf
from autoshard.specs import Specs


def partitioned(
    analysis: Analysis, specs: Specs, attributes: shardy.Attributes | None = None
) -> shardy.Judged:
    """Asks the partitioner. Not thread-safe: modules share a context.

    Args:
      specs: on a mesh of at least one axis.
      attributes: of earlier calls for the same analysis, to save time.
    """
    program = analysis.program
    return shardy.judge(
        analysis.module,
        specs.mesh,
        [_closed(s, x) for s, x in zip(specs.inputs, program.inputs, strict=True)],
        [_closed(s, x) for s, x in zip(specs.outputs, program.outputs, strict=True)],
        {i: tuple(zip(s.spec, s.open, strict=True)) for i, s in specs.sites.items()},
        analysis.site_of_tag,
        attributes or shardy.Attributes(analysis.module.context),
    )


def _closed(spec: Spec, leaf: Leaf) -> shardy.Dims:
    """Every dimension closed; the words of a PRNG key are a dimension that stays whole."""
    return tuple((axes, False) for axes in (*spec, *((),) * leaf.is_key))
