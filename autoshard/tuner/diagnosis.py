"""Why no plan can be returned, and what would help, in words."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.lowering.problem import KnobValue, ModelFn, SearchProblem
from autoshard.program.program import Program
from autoshard.records.layout import MeshShape
from autoshard.records.trial import Collective, Estimate, Failure, Kind, Stage, Trial
from autoshard.records.words import mebibytes, mesh_in_words, rules_in_words
from autoshard.rungs.propagate import Propagator
from autoshard.target.cost import CostModel
from autoshard.target.target import Target
from autoshard.target.topology import at_least
from autoshard.tuner import Found
from autoshard.tuner.knob_advice import Nearest, knob_advice


def why_no_plan(
    found: Found,
    problems: Sequence[SearchProblem],
    target: Target,
    cost: CostModel,
    limit_bytes: int,
    model_fn: ModelFn,
    make_problem: Callable[[Program], SearchProblem],
) -> str:
    """The message of the error: how far the closest candidate is, what would make it fit.

    Args:
      limit_bytes: what a device may use, headroom taken off.
      make_problem: how the search made its problems, for programs of other knob values.
    """
    if not found.trials and found.ended == "interrupted":
        return "interrupted before a layout was judged"
    if not found.trials:
        return "there is no layout to judge: fix, mesh_shape and divisibility leave none"
    failures = [t.profiled for t in found.trials if isinstance(t.profiled, Failure)]
    if failures and all(f.kind is Kind.NUMERICS for f in failures):
        drawn = any(s.analysis.program.workload.sample is None for s in problems)
        return (
            "no candidate computes what the unsharded step computes:"
            + _each_once(failures, 4)
            + "\nCheck the step on one device first: non-finite values there stay non-finite."
            + (_SYNTHETIC if drawn else "")
        )
    judged = [(t, n) for t in found.trials if (n := _peak(t, target))]
    too_large = [x for x in judged if x[1] > limit_bytes]
    # A failure that is no OOM says nothing of memory: more of it would not help.
    stopped = [
        t.failure
        for t, peak in judged
        if peak <= limit_bytes and t.failure is not None and t.failure.kind is not Kind.OOM
    ]
    if not too_large and not stopped:
        every = [t.failure for t in found.trials if t.failure is not None]
        example = every[0].message if every else ""
        told = _kinds(every) or "none was judged"
        return f"every candidate failed ({told}); the first: {example[:500]}"
    lines: list[str] = []
    if stopped:
        lines += _why_stopped(stopped)
        if not any(_compiler_says(t) for t, _ in too_large):
            if too_large:
                lines.append(f"{len(too_large)} more are too large by rung 1 alone.")
            return "\n".join(lines)
        lines.append("Of those that the compiler judged:")
    trial, peak = min(too_large, key=lambda x: (not _compiler_says(x[0]), x[1]))
    state = trial.estimate.state_bytes if trial.estimate else 0
    layout = trial.candidate.layout
    lines += [
        f"no layout fits {mebibytes(limit_bytes)} a device on {target.describe()}"
        f" ({target.memory_source}, headroom taken off).",
        f"The closest needs {mebibytes(peak)}, {mebibytes(peak - limit_bytes)} too much"
        f" (state {mebibytes(state)}): mesh {mesh_in_words(layout)},"
        f" {rules_in_words(layout)}, knobs {dict(trial.candidate.knobs)}.",
        "It would fit with:",
    ]
    problem = problems[trial.problem]
    if limit_bytes > state:
        lines.append(
            f"  - a batch of about {(limit_bytes - state) / (peak - state):.2f} of this one"
            " (if what is not state grows with it),"
        )
    lines.append(f"  - {_more_devices(problem, trial, peak, limit_bytes, target, cost)},")
    lines += [f"  - {line}," for line in _more_memory(peak, limit_bytes, target)]
    here = trial.propagated
    nearest = Nearest(
        program=problem.analysis.program,
        layout=layout,
        scale=peak / here.peak_memory_bytes if isinstance(here, Estimate) else 1.0,
        excess=(peak - state) / (limit_bytes - state) if limit_bytes > state else math.inf,
    )
    peaks: dict[tuple[tuple[str, KnobValue], ...], int] = {}
    for other, needed in judged:
        values = other.candidate.knobs
        peaks[values] = min(needed, peaks.get(values, needed))
    advice, remarks = knob_advice(model_fn, nearest, peaks, make_problem, cost, limit_bytes)
    lines += [f"  - {line}," for line in advice[:-1]]
    lines.append(f"  - or {advice[-1]}.")
    lines += [f"{line}." for line in remarks]
    return "\n".join(lines)


def _each_once(failures: Sequence[Failure], most: int) -> str:
    """A line for each kind of message, with the worst leaf where leaves are named."""
    counts = collections.Counter(
        " ".join(line.strip() for line in f.message.splitlines()[:2]) for f in failures
    )
    lines = [f"\n  {n} of {len(failures)}: {text}" for text, n in counts.most_common(most)]
    rest = len(counts) - len(lines)
    return "".join(lines) + (f"\n  and {rest} other messages" if rest else "")


_SYNTHETIC = " The batches were synthetic (normal floats, integers 0 or 1): give Workload.sample."

_LONGER_RUNS = "give each run on the devices longer: Budget(measure_seconds=...)"
_REMEDIES = {
    Kind.TIMEOUT: "give each compilation longer: Budget(compile_seconds=...); where an executor was"
    " given, see whether its workers still run",
    Kind.CRASH: "see the message; with a journal, the workers' output is in the folder workers/"
    " beside it; where an executor was given, see whether it still runs",
    Kind.UNSUPPORTED: "change in the step what the message names, or take another jax",
    Kind.NUMERICS: "check the step on one device first: non-finite values there stay non-finite",
}
"""What to do about failures that have nothing to do with memory."""


def _why_stopped(failures: Sequence[Failure]) -> list[str]:
    """Of layouts that fit as far as is known, and failed all the same: how, and what to do."""
    first = failures[0]
    lines = [
        "layouts that fit, as far as is known, failed otherwise"
        f" ({_kinds(failures)}); the first, in {first.stage}: {first.kind}: {first.message[:500]}",
        "What to do:",
    ]
    told = (f"  - {f.kind}: {text}." for f in failures if (text := _remedy(f)))
    return [*lines, *dict.fromkeys(told)]


def _remedy(failure: Failure) -> str | None:
    if failure.kind is Kind.TIMEOUT and failure.stage is Stage.PROFILE:
        return _LONGER_RUNS
    return _REMEDIES.get(failure.kind)


def _kinds(failures: Sequence[Failure]) -> str:
    """`3 crash, 1 timeout`."""
    counts = collections.Counter(str(f.kind) for f in failures)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))


def _compiler_says(trial: Trial) -> bool:
    """Whether its peak is the compiler's own figure."""
    judged = trial.compiled
    return isinstance(judged, Estimate) or (
        isinstance(judged, Failure)
        and judged.stage is Stage.COMPILE
        and judged.missing_bytes is not None
    )


def _peak(trial: Trial, target: Target) -> int | None:
    """Peak memory of a device, as the best judge says it."""
    if isinstance(trial.compiled, Estimate):
        return trial.compiled.peak_memory_bytes
    if isinstance(trial.compiled, Failure) and _compiler_says(trial):
        room = target.topology.chip.usable_bytes.value if target.topology else target.memory_bytes
        return int(room) + (trial.compiled.missing_bytes or 0)
    return trial.propagated.peak_memory_bytes if isinstance(trial.propagated, Estimate) else None


class _WithoutLinks(CostModel):
    """Prices no communication: only memory is asked for, on devices whose links nobody knows."""

    def collective_s(self, one: Collective, mesh: MeshShape) -> float:
        return 0.0


def _more_devices(
    problem: SearchProblem,
    trial: Trial,
    peak: int,
    limit_bytes: int,
    target: Target,
    cost: CostModel,
) -> str:
    """How many devices would do: the same rules on more of them, as rung 1 judges them."""
    layout, here = trial.candidate.layout, trial.propagated
    if isinstance(here, Estimate) and not layout.as_annotated and here.peak_memory_bytes:
        propagator = Propagator(problem.analysis)
        memory_alone = _WithoutLinks(cost.constants)
        scale = peak / here.peak_memory_bytes  # how far rung 1 is off
        for factor in (2, 4, 8, 16, 32):
            devices = _so_many(target, target.device_count * factor, exactly=True)
            if devices is None:
                continue
            for i, (name, size) in enumerate(layout.mesh):
                mesh = (*layout.mesh[:i], (name, size * factor), *layout.mesh[i + 1 :])
                space = dataclasses.replace(problem.space, meshes=(mesh,))
                wider = dataclasses.replace(layout, mesh=mesh)
                if space.contains(space.candidate(wider)) is not None:
                    continue
                judged = propagator.judge(space, wider, memory_alone)
                if not isinstance(judged, Estimate):
                    continue
                needed = judged.peak_memory_bytes * scale
                if needed <= limit_bytes:
                    return (
                        f"{devices}: by the same rules on {mesh_in_words(wider)} about"
                        f" {mebibytes(needed)} each"
                    )
    count = int(target.device_count * peak / limit_bytes) + 1
    devices = _so_many(target, count)
    if devices is None:
        return f"another chip: no target of {target.describe()} has the {count} devices it takes"
    return f"about {devices} (if everything divides)"


def _so_many(target: Target, count: int, exactly: bool = False) -> str | None:
    """So many devices in words; of hardware with a name the smallest target that has them.

    None where there is no such target, or none with exactly so many.
    """
    name = ""
    if target.topology is not None:
        larger = at_least(target.topology, count)
        if larger is None or (exactly and larger.device_count != count):
            return None
        name, count = f"{larger.name}, ", larger.device_count
    return f"{name}{count} devices instead of {target.device_count}"


def _more_memory(peak: int, limit_bytes: int, target: Target) -> list[str]:
    """What else to say of the memory of a device: nothing beyond what named hardware has."""
    # The device memory whose limit, headroom taken off as here, is the candidate's peak.
    needed = 1 - (-peak * target.memory_bytes // max(limit_bytes, 1))
    found = []
    if target.topology is None or needed <= target.topology.chip.memory_bytes.value:
        found.append(f"memory_bytes of at least {needed}")
    if limit_bytes < peak <= target.memory_bytes:
        headroom = math.floor((1 - peak / target.memory_bytes) * 1000) / 1000
        found.append(f"memory_headroom of at most {headroom}")
    return found
