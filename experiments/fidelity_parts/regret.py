"""How much slower the plan is than the best program that was measured. Pure functions.

The best of many noisy measurements looks better than it is. So the plan is paired anew with its
rival, the fastest of all others in the sample, and the regret is taken from those fresh pairs: the
plan's time over that of the better of the two, less one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.fidelity_parts.ranks import Rounds
from experiments.pairs import ratio_interval_of_logs


def rival_of(plan: str, measured: Mapping[str, float]) -> str | None:
    """The fastest other program; None if there is none, or the plan was not measured.

    >>> rival_of("plan", {"plan": 1.0, "b": 1.5, "c": 1.2})
    'c'
    """
    others = {name: seconds for name, seconds in measured.items() if name != plan}
    if plan not in measured or not others:
        return None
    return min(others, key=lambda name: (others[name], name))


def regret(fresh: Mapping[str, Any] | None) -> dict[str, Any]:
    """Regret from fresh pairs of plan and rival.

    Returns:
      `regret` (None where nothing was measured), its interval, `decided`, and `top1`: the plan is
      the best, or no slower within the interval. Undecided pairs are no top 1.
    """
    if not fresh or fresh.get("failed"):
        return {"regret": None, "low": None, "high": None, "decided": False, "top1": False}
    ratio, low, high = (max(fresh[k], 1.0) - 1.0 for k in ("ratio", "low", "high"))
    decided = bool(fresh["decided"])
    return {
        "regret": ratio,
        "low": low,
        "high": high,
        "decided": decided,
        "top1": decided and fresh["low"] <= 1.0,
    }


def best_in_top(
    places: Mapping[str, int | None],
    measured: Mapping[str, float],
    tables: Mapping[str, Rounds],
    count: int = 3,
) -> dict[str, bool]:
    """Whether the search's first `count` hold the best program of the sample.

    Args:
      places: of each program in the search's ranking.

    Returns:
      `strict`: the fastest of all is among them. `tied`: one of them is no slower than the fastest
      within the 95 % interval over the rounds.
    """
    first = [n for n, place in places.items() if place is not None and place < count]
    first = [n for n in first if n in measured]
    if not first:
        return {"strict": False, "tied": False}
    best = min(measured, key=lambda name: (measured[name], name))
    tied = best in first or any(_may_equal(tables[name], tables[best]) for name in first)
    return {"strict": best in first, "tied": tied}


def _may_equal(one: Rounds, best: Rounds) -> bool:
    common: Sequence[int] = sorted(set(one) & set(best))
    _, low, _ = ratio_interval_of_logs([one[r] - best[r] for r in common])
    return low <= 1.0
