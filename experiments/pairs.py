"""Which of two steps is faster: interleaved pairs until the interval of the ratio is narrow.

The statistic is the geometric mean of the paired ratios, so that a drift of the machine, which hits
both steps of a pair alike, cancels; its interval is a percentile bootstrap over pairs (Efron 1979).
"""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Paired step times and what they say.

    Attributes:
      ratio: geometric mean of first / second; below 1 the first is faster.
      low, high: its 95 % bootstrap interval.
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
    first: Callable[[], None],
    second: Callable[[], None],
    *,
    limit_s: float,
    half_width: float = 0.02,
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
        ratio, low, high = ratio_interval(samples[0], samples[1], seed=seed)
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
