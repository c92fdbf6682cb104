"""How much slower the plan is than the best program that was measured. Pure functions.

The best of many noisy measurements looks better than it is, and which one it is, is luck too. So
the plan is paired anew with its rivals, the fastest of all others in the sample, and the regret is
taken from those fresh pairs: the plan's time over that of the best of them all, less one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.fidelity_parts.ranks import Rounds
from experiments.pairs import ratio_interval_of_logs

RIVALS = 3

_HALF_WIDTH = 0.02
"""Of the interval over rounds, at which they say whether two programs are equally fast."""


def rivals_of(plan: str, measured: Mapping[str, float], count: int = RIVALS) -> list[str]:
    """The fastest other programs, the fastest first; [] if the plan was not measured.

    >>> rivals_of("plan", {"plan": 1.0, "b": 1.5, "c": 1.2, "d": 1.3}, 2)
    ['c', 'd']
    """
    others = {name: seconds for name, seconds in measured.items() if name != plan}
    if plan not in measured:
        return []
    return sorted(others, key=lambda name: (others[name], name))[:count]


def regret(fresh: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Regret from fresh pairs of the plan with each rival.

    Returns:
      `regret`, that against the rival the plan does worst against (None where a pair was not
      measured, or there is none), its interval, `decided`: all pairs are, and `top1`: the plan is
      the best, or no slower than any rival within the interval. Undecided pairs are no top 1.
    """
    if not fresh or any(pair["failed"] for pair in fresh):
        return {"regret": None, "low": None, "high": None, "decided": False, "top1": False}
    worst = max(fresh, key=lambda pair: pair["ratio"])
    ratio, low, high = (max(worst[k], 1.0) - 1.0 for k in ("ratio", "low", "high"))
    decided = all(pair["decided"] for pair in fresh)
    return {
        "regret": ratio,
        "low": low,
        "high": high,
        "decided": decided,
        "top1": decided and all(pair["low"] <= 1.0 for pair in fresh),
    }


def best_in_top(
    places: Mapping[str, int | None],
    measured: Mapping[str, float],
    tables: Mapping[str, Rounds],
    fresh: Sequence[Mapping[str, Any]],
    count: int = 3,
) -> dict[str, bool]:
    """Whether the search's first `count` hold the best program of the sample.

    Args:
      places: of each program in the search's ranking; the plan's is 0.
      fresh: the pairs of the plan with its rivals.

    Returns:
      `strict`: the fastest of all is among them. Where fresh pairs say that rivals are faster than
      the plan, that is the one the plan does worst against, else the fastest by the rounds; that
      it is the plan only where all pairs were decided. `tied`: one of them is no slower than the
      fastest within the 95 % interval: the plan by the fresh pairs, the others by the rounds,
      where that interval is narrow enough to say.
    """
    first = [n for n, place in places.items() if place is not None and place < count]
    first = [n for n in first if n in measured]
    if not first:
        return {"strict": False, "tied": False}
    plan = next((name for name, place in places.items() if place == 0), None)
    told = [pair for pair in fresh if not pair["failed"] and pair["decided"]]
    faster = [pair for pair in told if pair["low"] > 1.0]
    best = min(measured, key=lambda name: (measured[name], name))
    if faster:
        best = max(faster, key=lambda pair: pair["ratio"])["rival"]
    elif best == plan and (not fresh or len(told) < len(fresh)):
        return {"strict": False, "tied": False}
    paired = any(pair["rival"] == best and pair["low"] <= 1.0 for pair in told)
    others = [name for name in first if name != plan]
    tied = best in first or paired or any(_equal(tables[n], tables[best]) for n in others)
    return {"strict": best in first, "tied": tied}


def _equal(one: Rounds, best: Rounds) -> bool:
    """Whether the rounds say that `one` is no slower, and can say so."""
    common: Sequence[int] = sorted(set(one) & set(best))
    ratio, low, high = ratio_interval_of_logs([one[r] - best[r] for r in common])
    return low <= 1.0 and (high - low) / 2 <= _HALF_WIDTH * ratio
