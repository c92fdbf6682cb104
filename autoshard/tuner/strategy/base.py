"""The contract of a strategy."""

import dataclasses
from typing import Protocol

from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure
from autoshard.space.space import Space


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One tell: a candidate of the space and what rung 1 said of it."""

    candidate: Candidate
    outcome: Estimate | Failure


class Strategy(Protocol):
    """Chooses what rung 1 judges next.

    A strategy is pure: the same space, seed and history (in order) give the same asks, so that
    replaying a journal restores a search. It never sees the clock. It may cache what it derives.
    """

    def ask(self, space: Space, seed: int, history: tuple[Seen, ...]) -> tuple[Candidate, ...]:
        """Candidates of `space` to judge next, none in `history`; () when there are none."""
        ...


def score(outcome: Estimate | Failure, memory_bytes: int) -> tuple[float, float]:
    """Order of outcomes, best first: what fits by time, then what does not by how far it misses."""
    if isinstance(outcome, Failure):
        return (float("inf"), float("inf"))
    excess = max(0, outcome.peak_memory_bytes - memory_bytes)
    return (excess / memory_bytes, outcome.time_s)
