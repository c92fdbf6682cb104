"""New rows for a ledger, drawn by chance: the layouts that rungs are compared on."""

import random
from collections.abc import Callable, Iterator

from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.space.space import Space
from autoshard.tuner.state import Row, SearchState

PATIENCE = 2000
"""Draws without a new program, after which a space counts as exhausted."""

Draw = Callable[[Space, random.Random], Candidate | None]


def uniform(space: Space, rng: random.Random) -> Candidate | None:
    """Any candidate of the space."""
    return space.sample(rng)


def fastest(ledger: SearchState, count: int) -> list[int]:
    """Rows of the `count` programs that rung 1 says are fastest, of those that it says fit.

    Not what a search compiles: that leaves out what rung 1 cannot tell from a chosen one, and those
    are the pairs that a rank correlation is about.
    """
    best: dict[object, tuple[float, int]] = {}
    for i, row in enumerate(ledger.rows):
        said = row.propagated
        if isinstance(said, Estimate) and said.peak_memory_bytes <= ledger.limit_bytes:
            best.setdefault(row.program, (said.time_s, i))
    return [i for _, i in sorted(best.values())[:count]]


class Draws:
    """New rows of a ledger, each program once.

    Args:
      seen: programs (`Row.program`) that are not drawn again.
      patience: after so many draws that gave nothing new a kind of draw ends.

    Attributes:
      skipped: candidates whose state alone is too large.
    """

    def __init__(self, ledger: SearchState, seen: set[object], patience: int = PATIENCE):
        self.skipped = 0
        self._state, self._seen, self._patience = ledger, seen, patience
        self._propagators = [Propagator(subject.analysis) for subject in ledger.subjects]

    def rows(self, draw: Draw) -> Iterator[int]:
        """Indices of the rows added; the same seed draws the same."""
        ledger = self._state
        rng = random.Random(ledger.seed)
        idle = 0
        while idle < self._patience:
            idle += 1
            index = rng.randrange(len(ledger.subjects))
            space = ledger.subjects[index].space
            candidate = draw(space, rng)
            if candidate is None:
                continue
            program = (index, space.specs(candidate.layout).key())
            if program in self._seen:
                continue
            self._seen.add(program)
            outcome = self._propagators[index].judge(space, candidate.layout, ledger.cost)
            if isinstance(outcome, Estimate) and outcome.state_bytes > ledger.limit_bytes:
                self.skipped += 1
                continue
            idle = 0
            ledger.rows.append(
                Row(
                    subject=index,
                    candidate=candidate,
                    baseline="",
                    program=program,
                    propagated=outcome,
                )
            )
            yield len(ledger.rows) - 1
