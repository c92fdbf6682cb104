"""Which knob values would make a model fit, where none of those tried does."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

from autoshard.cost import CostModel
from autoshard.driver import Subject
from autoshard.layout import Layout
from autoshard.program import Program, trace
from autoshard.report.words import mebibytes, mesh_in_words
from autoshard.rungs.propagate import Propagator
from autoshard.strategy import baselines
from autoshard.subjects import KnobValue, ModelFn
from autoshard.trial import Estimate

_FACTORS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The candidate that comes closest to fitting.

    Attributes:
      program: the step it belongs to, traced with its knob values.
      layout: its layout.
      scale: its peak as the best judge says it, over rung 1's.
    """

    program: Program
    layout: Layout
    scale: float


def knob_advice(
    model_fn: ModelFn,
    nearest: Nearest,
    peaks: Mapping[tuple[tuple[str, KnobValue], ...], int],
    make_subject: Callable[[Program], Subject],
    cost: CostModel,
    limit_bytes: int,
) -> list[str]:
    """Lines of advice, at least one.

    A knob whose values are whole numbers (parts of a batch, say) is tried on at twice, four and
    eight times its largest value, as rung 1 judges the nearest layout and the baselines.

    Args:
      peaks: smallest peak of a device for each combination of knob values tried, bytes.
    """
    tried = {name for values in peaks for name, _ in values}
    lines = []
    if len(peaks) > 1:
        least = sorted(peaks.items(), key=lambda item: item[1])
        told = ", ".join(f"{_named(values)} {mebibytes(peak)}" for values, peak in least[:6])
        lines.append(f"other knob values than those tried, whose smallest peaks are: {told}")
    for changed in _more_of(nearest.program, peaks):
        name, value = changed
        found = _smallest(model_fn, changed, nearest, make_subject, cost)
        if found is not None and found[0] <= limit_bytes:
            lines.append(
                f"{name}={value}: by rung 1 about {mebibytes(found[0])}"
                f" on {mesh_in_words(found[1])}"
            )
            break
    spare = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in inspect.signature(model_fn).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in tried
    ]
    if spare:
        lines.append(f"knobs of model_fn that were not searched, if they save memory: {spare}")
    if not lines:
        lines.append("a knob that saves memory (remat, gradient accumulation): none was given")
    return lines


def _named(values: Sequence[tuple[str, KnobValue]]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in values) or "no knobs"


def _more_of(
    program: Program, peaks: Mapping[tuple[tuple[str, KnobValue], ...], int]
) -> Iterator[tuple[str, int]]:
    """Larger values of the knobs whose values are whole numbers, each knob in turn."""
    for name, _ in program.knobs:
        values = [value for combined in peaks for n, value in combined if n == name]
        whole = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
        if whole and len(whole) == len(values):
            yield from ((name, max(whole) * factor) for factor in _FACTORS)


def _smallest(
    model_fn: ModelFn,
    changed: tuple[str, KnobValue],
    nearest: Nearest,
    make_subject: Callable[[Program], Subject],
    cost: CostModel,
) -> tuple[int, Layout] | None:
    """The smallest peak under another knob value, by rung 1; None if it cannot be traced."""
    knobs = tuple(sorted({**dict(nearest.program.knobs), changed[0]: changed[1]}.items()))
    try:
        program = trace(model_fn(**dict(knobs)), knobs, nearest.program.keeps_constraints)
        if program.batch != nearest.program.batch:
            return None
        subject = make_subject(program)
    except Exception:  # the user's own code may raise anything, of a value it was not made for
        return None
    propagator = Propagator(subject.analysis)
    layouts = [nearest.layout, *(b.candidate.layout for b in baselines(subject.space))]
    found = []
    for layout in layouts:
        if layout.as_written or subject.space.contains(subject.space.candidate(layout)) is not None:
            continue
        judged = propagator.judge(subject.space, layout, cost)
        if isinstance(judged, Estimate):
            found.append((int(judged.peak_memory_bytes * nearest.scale), layout))
    return min(found, key=lambda x: x[0]) if found else None
