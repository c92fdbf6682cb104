"""Promotion from one rung to the next: successive halving (Jamieson and Talwalkar 2016).

Two changes to the algorithm: half of the places go to different families of candidates, and rung 1
is corrected by what higher rungs said. Pure functions of trials.
"""

from collections.abc import Collection, Mapping

from autoshard.records.trial import Estimate, Trial
from autoshard.target.cost import Correction, fit_correction

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
    trials: Mapping[int, Trial],
    count: int,
    correction: Correction,
    limit_bytes: int,
    factor: float,
    taken: Collection[int],
) -> list[int]:
    """Chooses the `count` most promising trials by corrected time, each program once.

    The first half is spread over families: no family takes more than its share, and a trial that
    rung 1 cannot tell from a chosen one is left out. Rung 1 may be wrong about a whole family. The
    second half is the best of the rest, since rung 1 does not see all differences within a family.

    Args:
      trials: by index, those that rung 1 has an estimate for.
      factor: see `lower_bound_factor`.
      taken: indices of `trials` that went on before. Neither they nor trials that rung 1 cannot
        tell from them go on in the first half.

    Returns:
      Indices, best first within each half.
    """
    programs = {trials[i].shardings for i in taken}
    families: dict[object, int] = {}
    chosen: list[int] = []
    spread = count - count // 2
    share = max(1, spread // 2)
    estimates = {i: _estimate(trial) for i, trial in trials.items()}
    fitting = [i for i, e in estimates.items() if not surely_too_large(e, limit_bytes, factor)]

    def order(i: int) -> tuple[bool, float, int]:
        e = estimates[i]
        return e.peak_memory_bytes > limit_bytes, corrected_s(e, correction), i

    rest: list[int] = []
    compared = [trials[i] for i in taken]
    for i in sorted(fitting, key=order):
        trial = trials[i]
        if trial.shardings in programs:
            continue
        programs.add(trial.shardings)
        twin = any(_alike(trial, other) for other in compared)
        compared.append(trial)
        if twin or len(chosen) == spread or families.get(_family(trial), 0) >= share:
            rest.append(i)
            continue
        families[_family(trial)] = families.get(_family(trial), 0) + 1
        chosen.append(i)
    return (chosen + rest)[:count]


def _estimate(trial: Trial) -> Estimate:
    assert isinstance(trial.propagated, Estimate)
    return trial.propagated


def _family(trial: Trial) -> object:
    """Candidates of one family divide the same axes, over other mesh axes or with other states."""
    axes = tuple(axis for axis, _ in trial.candidate.layout.activation_rules)
    return trial.candidate.knobs, axes


def _alike(a: Trial, b: Trial) -> bool:
    """Whether rung 1 cannot tell two members of one family apart."""
    x, y = _estimate(a), _estimate(b)
    return (
        _family(a) == _family(b)
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
