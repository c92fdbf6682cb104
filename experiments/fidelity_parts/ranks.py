"""Step times from rounds, and rank correlation with the noise ceiling beside it. Pure functions.

The time of a program is the 20 %-trimmed mean over rounds of its logarithm, after the mean over all
programs has been taken off each round: a drift of the machine hits all programs of a round alike.
The ceiling is Kendall's tau of the times from one half of the rounds with those from the other,
averaged over random halves. Half of the rounds is noisier than all of them, so a ceiling is a
little lower than what could be reached, and shares of it may exceed 1.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.records.rounds import trimmed_mean
from experiments.agreement import kendall, tau

Rounds = Mapping[int, float]
"""Round -> logarithm of the median sample of one program, seconds."""

NEAR = 1.5
"""Programs that take at most so many times as long as the fastest are ranked once more, alone."""

LEAST_CEILING = 0.7
"""Below it the rounds say too little of the order: there is no share of such a ceiling."""

_SPLITS = 100


def times(tables: Mapping[str, Rounds], among: Sequence[int] | None = None) -> dict[str, float]:
    """Step times, seconds, from the rounds that all programs ran.

    Args:
      among: only these rounds count.

    >>> drifting = {"a": {0: 0.0, 1: 1.0}, "b": {0: 0.5, 1: 1.5}}
    >>> {name: round(math.log(s), 6) for name, s in times(drifting).items()}
    {'a': 0.5, 'b': 1.0}
    """
    if not tables:
        return {}
    common = set.intersection(*(set(table) for table in tables.values()))
    used = sorted(common if among is None else common & set(among))
    if not used:
        return {}
    weather = {r: statistics.fmean(table[r] for table in tables.values()) for r in used}
    climate = statistics.fmean(weather.values())
    return {
        name: math.exp(climate + trimmed_mean([table[r] - weather[r] for r in used]))
        for name, table in tables.items()
    }


def ceiling(tables: Mapping[str, Rounds], names: Sequence[str]) -> float | None:
    """Kendall's tau of half of the rounds with the other half, over `names`; None for too few."""
    own = {name: tables[name] for name in names}
    rounds = sorted(set.intersection(*(set(t) for t in own.values()))) if own else []
    if len(own) < 3 or len(rounds) < 2:
        return None
    rng = random.Random(0)
    found = []
    for _ in range(_SPLITS):
        rng.shuffle(rounds)
        half = len(rounds) // 2
        first, second = times(own, rounds[:half]), times(own, rounds[half:])
        found.append(kendall([first[n] for n in names], [second[n] for n in names]))
    return float(statistics.fmean(found))


def correlation(
    predicted: Mapping[str, float], tables: Mapping[str, Rounds]
) -> dict[str, Any] | None:
    """Kendall's tau of predictions with measured times, and the share of the ceiling it reaches.

    Args:
      predicted: seconds; only what is measured counts.

    Returns:
      tau with its bootstrap interval, the ceiling of the same programs, tau's share of it (None
      for a ceiling below `LEAST_CEILING`), their number; None where fewer than three are there.
    """
    measured = times(tables)
    names = sorted(set(predicted) & set(measured))
    top = ceiling(tables, names)
    if top is None:
        return None
    found = tau([predicted[n] for n in names], [measured[n] for n in names])
    if math.isnan(found["tau"]):  # one of the two gives all the same time
        found = {"tau": 0.0, "low": 0.0, "high": 0.0}
    return {
        **found,
        "ceiling": top,
        "share": found["tau"] / top if top >= LEAST_CEILING else None,
        "count": len(names),
    }


def near(measured: Mapping[str, float]) -> list[str]:
    """Those within `NEAR` times the fastest."""
    if not measured:
        return []
    limit = NEAR * min(measured.values())
    return [name for name, seconds in measured.items() if seconds <= limit]
