"""The goals of the benchmark, and whether a figure meets one. What was not measured is missed."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit for one figure.

    Attributes:
      name: of the figure, a key of the summary's `figures`.
      part: what the figure comes from: "search", "sample" or "hand".
      text: of the figure, for tables.
      limit: the goal.
      at_most: whether lower is better.
      style: how figures of this kind are printed: "percent", "ratio".
    """

    name: str
    part: str
    text: str
    limit: float
    at_most: bool
    style: str

    def met(self, value: float | None) -> bool:
        if value is None:
            return False
        return value <= self.limit if self.at_most else value >= self.limit

    def in_words(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {shown(self.limit, self.style)}"


GOALS = (
    Goal(
        name="coverage",
        part="search",
        text="cases whose search completes, numerics equal to the unsharded step's",
        limit=1.0,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="hand_met",
        part="hand",
        text="hand layouts that the plan is no slower than",
        limit=1.0,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="programs_enough",
        part="sample",
        text="cases with 48 programs measured, 30 of them drawn, and rung 1's ten best; or all",
        limit=1.0,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="regret_median",
        part="sample",
        text="regret, median",
        limit=0.01,
        at_most=True,
        style="percent",
    ),
    Goal(
        name="regret_worst",
        part="sample",
        text="regret, worst",
        limit=0.05,
        at_most=True,
        style="percent",
    ),
    Goal(
        name="best_in_top_3",
        part="sample",
        text="best program among the search's first 3, within the interval",
        limit=1.0,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="top_1",
        part="sample",
        text="plan is the best program, within the interval",
        limit=0.9,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="speed_up_share_worst",
        part="sample",
        text="share of the best speed-up over data parallel, worst",
        limit=0.95,
        at_most=False,
        style="percent",
    ),
    Goal(
        name="rung2_tau_share",
        part="sample",
        text="rung 2: Kendall's tau over its ceiling, median",
        limit=0.93,
        at_most=False,
        style="ratio",
    ),
    Goal(
        name="rung1_tau_share",
        part="sample",
        text="rung 1: Kendall's tau over its ceiling, median",
        limit=0.86,
        at_most=False,
        style="ratio",
    ),
    Goal(
        name="rung2_error",
        part="sample",
        text="rung 2: error of predicted step time, median over cases",
        limit=0.08,
        at_most=True,
        style="percent",
    ),
    Goal(
        name="rung1_error",
        part="sample",
        text="rung 1: error of predicted step time, median over cases",
        limit=0.08,
        at_most=True,
        style="percent",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A figure against its goal."""

    goal: Goal
    value: float | None
    met: bool


def judged(figures: Mapping[str, Any], incomplete: Collection[str]) -> list[Judgement]:
    """Every goal, in order.

    Args:
      incomplete: parts that have not been run for every case: their goals are not met yet.
    """
    return [
        Judgement(
            goal=goal,
            value=(value := figures.get(goal.name)),
            met=goal.met(value) and goal.part not in incomplete,
        )
        for goal in GOALS
    ]


def shown(value: float | None, style: str) -> str:
    """A figure as tables print it.

    >>> shown(0.0123, "percent"), shown(0.9, "ratio"), shown(None, "ratio")
    ('1.2 %', '0.900', '-')
    """
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if style == "percent" else f"{value:.3f}"
