"""Rung 1's part of a search by any strategy, with a count and a clock beside it."""

import dataclasses
import time
from collections.abc import MutableMapping

from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.target.cost import CostModel
from autoshard.tuner.strategy import Seen, Strategy
from autoshard.tuner.strategy.base import score

Known = MutableMapping[Candidate, Estimate | Failure]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """When a search got better: CPU seconds and candidates since the baselines, predicted step."""

    cpu_s: float
    candidates: int
    time_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """One search.

    Attributes:
      baselines, judged: candidates that every search begins with; those the strategy asked for.
      cpu_s: CPU seconds of all, the baselines included, but of outcomes that were known before.
      curve: the best of the baselines that fit (0 candidates), then every improvement.
    """

    baselines: int
    judged: int
    cpu_s: float
    curve: tuple[Improvement, ...]

    @property
    def best_s(self) -> float:
        """The best predicted step; infinite if nothing fitted."""
        return self.curve[-1].time_s if self.curve else float("inf")

    def candidates_until(self, time_s: float) -> int | None:
        """Candidates until the predicted step was at most `time_s`, None if it never was."""
        return next((i.candidates for i in self.curve if i.time_s <= time_s), None)


def climb(
    subject: SearchProblem,
    cost: CostModel,
    memory_bytes: int,
    strategy: Strategy,
    budget: int,
    seed: int,
    known: Known | None = None,
) -> Climb:
    """Judges the baselines, then up to `budget` candidates that the strategy asks for.

    Args:
      known: outcomes of other searches of the same subject, to save time; added to.
    """
    judge = Propagator(subject.analysis).judge
    known = {} if known is None else known
    start = time.process_time()
    history: list[Seen] = []
    curve: list[Improvement] = []
    best = (float("inf"), float("inf"))
    first = [b.candidate for b in baselines(subject.space) if not b.candidate.layout.as_annotated]

    def tell(candidate: Candidate) -> None:
        nonlocal best
        if candidate not in known:
            known[candidate] = judge(subject.space, candidate.layout, cost)
        history.append(Seen(candidate=candidate, outcome=known[candidate]))
        value = score(known[candidate], memory_bytes)
        if value < best:
            best = value
            if value[0] == 0.0:
                count = max(0, len(history) - len(first))
                spent_s = time.process_time() - start
                curve.append(Improvement(cpu_s=spent_s, candidates=count, time_s=value[1]))

    for candidate in first:
        tell(candidate)
    while len(history) < len(first) + budget:
        asked = strategy.ask(subject.space, seed, tuple(history))
        if not asked:
            break
        for candidate in asked[: len(first) + budget - len(history)]:
            tell(candidate)
    return Climb(
        baselines=len(first),
        judged=len(history) - len(first),
        cpu_s=time.process_time() - start,
        curve=tuple(curve),
    )
