"""Times of rounds, and what they are compared by where one round in five is bad."""

import math
import statistics
from collections.abc import Collection, Iterable

_SHORTEST_S = 1e-12
"""Of a step that no clock has seen pass: it has a logarithm."""

TRIM = 0.2
"""The share that is left out at either end."""


def by_round(samples_s: Iterable[float], rounds: Iterable[int]) -> dict[int, float]:
    """Round -> the logarithm of the median, in seconds, of its samples.

    Args:
      rounds: of each sample.

    >>> by_round([1.0, 1.0, 9.0, 1.0], [0, 1, 1, 1])
    {0: 0.0, 1: 0.0}
    """
    grouped: dict[int, list[float]] = {}
    for sample, number in zip(samples_s, rounds, strict=True):
        grouped.setdefault(number, []).append(sample)
    return {n: math.log(max(statistics.median(s), _SHORTEST_S)) for n, s in grouped.items()}


def trimmed_mean(values: Collection[float]) -> float:
    """The mean without the least and the greatest fifth, each rounded down to whole values.

    >>> trimmed_mean([0.0, 1.0, 1.5, 2.0, 9.0])
    1.5
    """
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
