"""Promotion: which candidates of one rung go on to the next. Pure functions of what is known."""

import dataclasses

from autoshard.records.trial import Estimate
from autoshard.target.cost import Correction, fit_correction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A candidate as promotion sees it.

    Attributes:
      index: whose it is; returned to the caller.
      estimate: rung 1's.
      family: candidates of one family differ in details only.
      program: equal for candidates that put the same shardings everywhere, in the same words.
    """

    index: int
    estimate: Estimate
    family: object
    program: object


DEFAULT_LOWER_BOUND = 0.5
"""Until rung 2 has spoken, the true peak is taken to be at least this part of rung 1's."""

_PRUNE_RATIO = 1.5
"""A rung drops candidates that it predicts to be this many times slower than the fastest.

Of 1,253 programs on CPU devices (results/fidelity.jsonl.xz) rung 2 would drop those that took at
least 1.12 times the fastest's measured time. Of 103 layouts for H100
(results/rung_agreement.jsonl.xz) rung 1 would drop those that took at least 1.38 times the
fastest's time by rung 2.
"""


def corrected_s(estimate: Estimate, correction: Correction) -> float:
    return (
        estimate.compute_s * correction.compute
        + estimate.communication_s * correction.communication
    )


def lower_bound_factor(pairs: list[tuple[Estimate, Estimate]]) -> float:
    """The part of rung 1's peak that the true one exceeds in 95 % of cases, from (rung 1, rung 2).

    With fewer than 8 pairs the smallest ratio seen is taken, and never more than the default.
    """
    ratios = sorted(
        b.peak_memory_bytes / a.peak_memory_bytes for a, b in pairs if a.peak_memory_bytes > 0
    )
    if not ratios:
        return DEFAULT_LOWER_BOUND
    if len(ratios) < 8:
        return min(DEFAULT_LOWER_BOUND, ratios[0])
    return min(ratios[int(0.05 * len(ratios))], 1.0)


def surely_too_large(estimate: Estimate, limit_bytes: int, factor: float) -> bool:
    """Whether rung 1 alone may reject: the state, or the peak's lower bound, exceeds the limit."""
    return estimate.state_bytes > limit_bytes or estimate.peak_memory_bytes * factor > limit_bytes


def promote(
    entries: list[Entry],
    count: int,
    correction: Correction,
    limit_bytes: int,
    factor: float,
    taken: list[Entry],
) -> list[Entry]:
    """The `count` most promising by corrected time, each program once.

    One half is spread over families, no family more than its share, and leaves out those that the
    model cannot tell from a chosen one: it may be wrong about a whole family. The other half is
    the best of what is left, whatever its family: the model does not see everything in which
    members of one family differ.

    Args:
      taken: those that have gone on already: none of them again, nor one that the model cannot tell
        from one of them.
    """
    seen = {e.program for e in taken}
    families: dict[object, int] = {}
    chosen: list[Entry] = []
    spread = count - count // 2
    share = max(1, spread // 2)
    fitting = [e for e in entries if not surely_too_large(e.estimate, limit_bytes, factor)]

    def order(e: Entry) -> tuple[bool, float, int]:
        return (
            e.estimate.peak_memory_bytes > limit_bytes,
            corrected_s(e.estimate, correction),
            e.index,
        )

    rest: list[Entry] = []
    alike = list(taken)
    for entry in sorted(fitting, key=order):
        if entry.program in seen:
            continue
        seen.add(entry.program)
        twin = any(_alike(entry, other) for other in alike)
        alike.append(entry)
        if twin or len(chosen) == spread or families.get(entry.family, 0) >= share:
            rest.append(entry)
            continue
        families[entry.family] = families.get(entry.family, 0) + 1
        chosen.append(entry)
    return (chosen + rest)[:count]


def _alike(a: Entry, b: Entry) -> bool:
    """Whether the model cannot tell two members of one family apart."""
    x, y = a.estimate, b.estimate
    return (
        a.family == b.family
        and abs(x.time_s - y.time_s) <= 0.005 * y.time_s
        and abs(x.peak_memory_bytes - y.peak_memory_bytes) <= 0.02 * y.peak_memory_bytes
    )


def learn(pairs: list[tuple[Estimate, float]]) -> Correction:
    """How far rung 1 is off, from the step times that a higher rung gave, seconds."""
    return fit_correction((e.compute_s, e.communication_s, seen_s) for e, seen_s in pairs)


def worth_trying(times_s: dict[int, float]) -> list[int]:
    """Which of these the next rung may find the fastest, by their step times; fastest first."""
    limit_s = _PRUNE_RATIO * min(times_s.values(), default=0.0)
    return sorted((i for i, t in times_s.items() if t <= limit_s), key=lambda i: (times_s[i], i))
