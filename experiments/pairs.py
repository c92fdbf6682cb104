"""Which of two steps is faster: interleaved pairs until the interval of the ratio is narrow.

The statistic is the geometric mean of the paired ratios, so that a drift of the machine, which hits
both steps of a pair alike, cancels; its interval is a percentile bootstrap over pairs (Efron 1979).

The ratio of the same two steps differs from process to process by a few per cent, and no number of
pairs in one process shows it (docs/decisions/0020). The interval does not cover that.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any  # pytrees have no narrower type

import jax
import numpy as np

Run = Callable[[], None]
"""Runs one step and waits for it."""

_HALF_WIDTH = 0.02
"""Of an interval, relative to the ratio, at which it is decided."""

_SETTLING = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Paired step times and what they say.

    Attributes:
      ratio: geometric mean of first / second; below 1 the first is faster.
      low, high: its 95 % interval.
      decided: the interval's half width came under the limit before the time was up.
      first_s, second_s: all samples in order; equal positions are a pair.
    """

    ratio: float
    low: float
    high: float
    decided: bool
    first_s: tuple[float, ...]
    second_s: tuple[float, ...]


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
        ratio, low, high = ratio_interval(*samples, seed=seed)
        decided = (high - low) / 2 <= half_width * ratio
        if decided or clock() - started > limit_s:
            return Comparison(
                ratio=ratio,
                low=low,
                high=high,
                decided=decided,
                first_s=tuple(samples[0]),
                second_s=tuple(samples[1]),
            )


def ratio_interval(
    first_s: list[float], second_s: list[float], *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """The geometric mean of the paired ratios and its 95 % bootstrap interval."""
    logs = np.log(np.asarray(first_s) / np.asarray(second_s))
    rng = np.random.default_rng(seed)
    means = rng.choice(logs, (resamples, len(logs))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return math.exp(logs.mean()), math.exp(low), math.exp(high)


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
