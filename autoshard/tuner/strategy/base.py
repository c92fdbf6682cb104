"""The contract of a strategy."""

from typing import Protocol

from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure, Trial
from autoshard.space.space import Space


class Strategy(Protocol):
    """Chooses what rung 1 judges next.

    A strategy is pure: the same space, seed and history (in order) give the same asks, so that
    replaying a journal restores a search. It never sees the clock. It may cache what it derives.
    """

    def ask(self, space: Space, seed: int, history: tuple[Trial, ...]) -> tuple[Candidate, ...]:
        """Chooses candidates.

        Args:
          history: this problem's trials so far, in the order judged; `propagated` is what rung 1
            said of each.

        Returns:
          Candidates of `space` to judge next, none in `history`; () when there are none.
        """


def score(outcome: Estimate | Failure, memory_bytes: int) -> tuple[float, float]:
    """Order of outcomes, best first: what fits by time, then what does not by how far it misses."""
    if isinstance(outcome, Failure):
        return (float("inf"), float("inf"))
    excess = max(0, outcome.peak_memory_bytes - memory_bytes)
    return (excess / memory_bytes, outcome.time_s)
