"""Which of two steps is faster: interleaved pairs until the interval of the ratio is narrow.

The statistic is the geometric mean of the paired ratios, so that a drift of the machine, which hits
both steps of a pair alike, cancels; its interval is a percentile bootstrap over pairs (Efron 1979).

The ratio of the same two steps is another one in another process, by a few per cent, and no number
of pairs in one tells (docs/decisions/0020). So where that could decide several processes are asked;
the interval is then Student's over the means of processes, the highest level of repetition
(Kalibera and Jones, ISMM 2013).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # pytrees have no narrower type

import jax
import numpy as np
import scipy.special  # type: ignore[import-untyped]

Run = Callable[[], None]
"""Runs one step and waits for it."""

_HALF_WIDTH = 0.02
"""Of an interval, relative to the ratio, at which it is decided."""

_NEAR = 1.1
"""Processes may differ by so much: one said 1.07 (1.05 to 1.09) of a ratio that was 0.95 to 1.02 in
four others, twelve said 0.96 to 1.13 of another."""

_PROCESSES = 4, 24
"""At least so many are asked about a ratio near 1, and at most so many about any. Where they differ
by 3 %, twelve are needed for an interval of 2 %; where by 4.5, twenty-two."""

_SETTLING = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Paired step times and what they say.

    Attributes:
      ratio: geometric mean of first / second; below 1 the first is faster.
      low, high: its 95 % interval.
      decided: the interval's half width came under the limit before the time was up.
      first_s, second_s: all samples in order; equal positions are a pair.
      processes: pairs that each process took, in the order of the samples.
    """

    ratio: float
    low: float
    high: float
    decided: bool
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    processes: tuple[int, ...]


def compare(
    first: Run,
    second: Run,
    *,
    limit_s: float,
    half_width: float = _HALF_WIDTH,
    min_pairs: int = 20,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times both, in random order within each pair, until decided or out of time.

    Args:
      first, second: run one step and wait for it. Called twice before the clock starts.
      limit_s: time for all pairs, seconds; at least `min_pairs` are taken all the same.
      half_width: of the interval, relative to the ratio, at which sampling stops.
    """
    rng = np.random.default_rng(seed)
    for run in (first, second, first, second):
        run()
    samples: tuple[list[float], list[float]] = ([], [])
    started = clock()
    while True:
        for which in rng.permutation(2):
            begin = clock()
            (first, second)[which]()
            samples[which].append(clock() - begin)
        pairs = len(samples[0])
        # The bootstrap costs less than a step when it is done for every fifth pair only.
        if pairs < min_pairs or pairs % 5:
            continue
        found = of_process(samples[0], samples[1], half_width=half_width, seed=seed)
        if found.decided or clock() - started > limit_s:
            return found


def of_process(
    first_s: Sequence[float],
    second_s: Sequence[float],
    *,
    half_width: float = _HALF_WIDTH,
    seed: int = 0,
) -> Comparison:
    """What the pairs of one process say."""
    ratio, low, high = ratio_interval(list(first_s), list(second_s), seed=seed)
    return Comparison(
        ratio=ratio,
        low=low,
        high=high,
        decided=(high - low) / 2 <= half_width * ratio,
        first_s=tuple(first_s),
        second_s=tuple(second_s),
        processes=(len(first_s),),
    )


def of_processes(parts: Sequence[Comparison], half_width: float = _HALF_WIDTH) -> Comparison:
    """What several processes say, each counting alike.

    The interval is that over the means of processes, or the one that their own make together if
    that is wider: few means may agree by luck.
    """
    if len(parts) == 1:
        return parts[0]
    means = np.log([part.ratio for part in parts])
    between = float(scipy.special.stdtrit(len(means) - 1, 0.975)) * float(
        means.std(ddof=1) / math.sqrt(len(means))
    )
    within = math.sqrt(sum((math.log(p.high / p.low) / 2) ** 2 for p in parts)) / len(parts)
    half = max(between, within)
    return Comparison(
        ratio=math.exp(means.mean()),
        low=math.exp(means.mean() - half),
        high=math.exp(means.mean() + half),
        decided=math.sinh(half) <= half_width,
        first_s=tuple(s for part in parts for s in part.first_s),
        second_s=tuple(s for part in parts for s in part.second_s),
        processes=tuple(n for part in parts for n in part.processes),
    )


def parts_of(row: Mapping[str, Any]) -> list[Comparison]:
    """What each process said, from a comparison as results hold it; see `of_row`."""
    found = of_row(row)
    ends = np.cumsum(found.processes)
    return [
        of_process(found.first_s[end - count : end], found.second_s[end - count : end])
        for end, count in zip(ends, found.processes, strict=True)
    ]


def wants_another(found: Comparison) -> bool:
    """Whether one more process should be asked.

    Up to 24 while the interval is too wide, and four at least where the ratio is near 1: far
    from it processes differ by less than would matter.
    """
    asked = len(found.processes)
    far = found.high < 1 / _NEAR or found.low > _NEAR
    return asked < _PROCESSES[1] and (not found.decided or (asked < _PROCESSES[0] and not far))


def of_row(row: Mapping[str, Any]) -> Comparison:
    """A comparison as results hold it; one without `processes` is of one."""
    first_s, second_s = row["first_s"], row["second_s"]
    return Comparison(
        ratio=row["ratio"],
        low=row["low"],
        high=row["high"],
        decided=row["decided"],
        first_s=tuple(first_s),
        second_s=tuple(second_s),
        processes=tuple(row.get("processes") or [len(first_s)]),
    )


def is_open(row: Mapping[str, Any]) -> bool:
    """Whether a comparison as results hold it failed, or wants another process."""
    return row.get("ratio") is None or wants_another(of_row(row))


def in_processes(
    ask: Callable[[int, float], Comparison], limit_s: float, begun: Sequence[Comparison] = ()
) -> Comparison:
    """Asks processes until no other is wanted.

    Args:
      ask: (number of the process, seconds for its pairs) -> what it says.
      limit_s: for the pairs of the first, see `limit_of`.
      begun: what processes before these said.
    """
    parts = [*begun]
    while not parts or wants_another(of_processes(parts)):
        parts.append(ask(len(parts), limit_of(len(parts), limit_s)))
    return of_processes(parts)


def limit_of(number: int, limit_s: float) -> float:
    """Seconds for the pairs of a process: each after the first has a quarter of the first's."""
    return limit_s / 4 if number else limit_s


def ratio_interval(
    first_s: list[float], second_s: list[float], *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """The geometric mean of the paired ratios and its 95 % bootstrap interval."""
    logs = np.log(np.asarray(first_s) / np.asarray(second_s))
    return ratio_interval_of_logs(logs, seed=seed, resamples=resamples)


def ratio_interval_of_logs(
    logs: Sequence[float] | np.ndarray, *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """The same from the logarithms of the paired ratios."""
    values = np.asarray(logs, dtype=float)
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (resamples, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return math.exp(values.mean()), math.exp(low), math.exp(high)


def verdict(ratio: float | None, decided: bool) -> str:
    """The goal is a ratio of at most 1.00, to two decimals. "undecided" counts as missed.

    >>> verdict(1.004, True), verdict(1.006, True), verdict(0.9, False), verdict(None, True)
    ('met', 'missed', 'undecided', 'undecided')
    """
    if ratio is None or not decided:
        return "undecided"
    return "met" if round(ratio, 2) <= 1.0 else "missed"


def stepper(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> Run:
    """What `compare` times: one step on the state of the last, and the wait for it.

    Steps are run here until the types of the state stay as they are: jit compiles anew for each
    combination of weak types, and a state that begins with some may take two steps to lose them.

    Raises:
      ValueError: they still change after ten steps.
    """

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    def types() -> list[Any]:
        return [jax.typeof(leaf) for leaf in jax.tree.leaves(state)]

    for _ in range(_SETTLING):
        before = types()
        run()
        if types() == before:
            return run
    raise ValueError(
        f"the types of the state still change after {_SETTLING} steps, expected them to stay: each"
        " step would be compiled"
    )
