"""Which knob values would make a model fit, where none of those tried does."""

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from autoshard.lowering.problem import KnobValue, ModelFn, SearchProblem
from autoshard.program.program import Program, trace
from autoshard.records.layout import Layout
from autoshard.records.trial import Estimate
from autoshard.records.words import mebibytes, mesh_in_words
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.target.cost import CostModel

_log = logging.getLogger("autoshard")

_MOST = 8
"""The most times larger than the values tried that a suggested value is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The candidate that comes closest to fitting.

    Attributes:
      program: the step it belongs to, traced with its knob values.
      layout: its layout.
      scale: its peak as the best judge says it, over rung 1's.
      excess: how many times too large its memory is, apart from the state; infinite where the state
        alone does not fit.
    """

    program: Program
    layout: Layout
    scale: float
    excess: float


def knob_advice(
    model_fn: ModelFn,
    nearest: Nearest,
    peaks: Mapping[tuple[tuple[str, KnobValue], ...], int],
    make_problem: Callable[[Program], SearchProblem],
    cost: CostModel,
    limit_bytes: int,
) -> tuple[list[str], list[str]]:
    """What to try, at least one line; and remarks on what would not help.

    A knob whose values are whole numbers (parts of a batch, say) is tried once, at a larger value,
    as rung 1 judges the nearest layout and the baselines: the model is traced again for it.

    Args:
      peaks: smallest peak of a device for each combination of knob values tried, bytes.
    """
    tried = {name for values in peaks for name, _ in values}
    lines: list[str] = []
    remarks: list[str] = []
    if len(peaks) > 1:
        least = sorted(peaks.items(), key=lambda item: item[1])
        told = ", ".join(f"{_named(values)} {mebibytes(peak)}" for values, peak in least[:6])
        lines.append(f"other knob values than those tried, whose smallest peaks are: {told}")
    for changed in _more_of(nearest, peaks):
        name, value = changed
        try:
            found = _smallest(model_fn, changed, nearest, make_problem, cost)
        except Exception as error:  # the user's code may raise anything for such a value
            _log.debug("%s=%r cannot be judged", name, value, exc_info=True)
            text = (str(error).splitlines() or [""])[0][:300]
            remarks.append(f"{name}={value!r} cannot be judged: {type(error).__name__}: {text}")
            continue
        if found is None:
            continue
        said = f"{name}={value}: by rung 1 about {mebibytes(found[0])} on {mesh_in_words(found[1])}"
        if found[0] <= limit_bytes:
            lines.append(said)
            break
        remarks.append(f"{said}, which is still too much")
    spare = [
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in inspect.signature(model_fn).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in tried
    ]
    if spare:
        lines.append(f"knobs of model_fn that were not searched, if they save memory: {spare}")
    if not lines:
        lines.append("a knob that saves memory (remat, gradient accumulation): none was given")
    return lines, remarks


def _named(values: Sequence[tuple[str, KnobValue]]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in values) or "no knobs"


def _more_of(
    nearest: Nearest, peaks: Mapping[tuple[tuple[str, KnobValue], ...], int]
) -> Iterator[tuple[str, int]]:
    """A larger value of each knob whose values are whole numbers.

    It divides what is not state by a power of two, as if that were inverse to the value.
    """
    needed = min(float(_MOST), max(1.0, nearest.excess))
    factor = 2 ** math.ceil(math.log2(needed))
    for name, own in nearest.program.knobs:
        values = [value for combined in peaks for n, value in combined if n == name]
        whole = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
        if whole and len(whole) == len(values) and isinstance(own, int):
            yield name, min(_MOST * max(whole), max(2 * max(whole), factor * own))


def _smallest(
    model_fn: ModelFn,
    changed: tuple[str, KnobValue],
    nearest: Nearest,
    make_problem: Callable[[Program], SearchProblem],
    cost: CostModel,
) -> tuple[int, Layout] | None:
    """The smallest peak under another knob value, by rung 1; None if the batch is another.

    Raises:
      Exception: the model cannot be traced or analysed with that value.
    """
    knobs = tuple(sorted({**dict(nearest.program.knobs), changed[0]: changed[1]}.items()))
    program = trace(model_fn(**dict(knobs)), knobs, nearest.program.keeps_constraints)
    if program.batch != nearest.program.batch:
        return None
    problem = make_problem(program)
    propagator = Propagator(problem.analysis)
    layouts = [nearest.layout, *(b.candidate.layout for b in baselines(problem.space))]
    found = []
    for layout in layouts:
        if (
            layout.as_annotated
            or problem.space.contains(problem.space.candidate(layout)) is not None
        ):
            continue
        judged = propagator.judge(problem.space, layout, cost)
        if isinstance(judged, Estimate):
            found.append((int(judged.peak_memory_bytes * nearest.scale), layout))
    return min(found, key=lambda x: x[0]) if found else None
