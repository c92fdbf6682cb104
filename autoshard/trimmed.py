"""The trimmed mean: what times are compared by, on machines where one round in five is bad."""

import statistics
from collections.abc import Collection

TRIM = 0.2
"""The share that is left out at either end."""


def trimmed_mean(values: Collection[float]) -> float:
    """The mean without the least and the greatest fifth, each rounded down to whole values.

    >>> trimmed_mean([0.0, 1.0, 1.5, 2.0, 9.0])
    1.5
    """
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
