"""Beam search: the neighbours of the best candidates so far that have any left.

Beam search as in Lowerre (1976), on the graph of one-decision changes; where the best have no
neighbours left, the next best take their places. A few random candidates in each ask keep it from
resting in one basin. The start comes from the history (the baselines) and from a first ask, for
each axis alone.
"""

import itertools
import random

from autoshard.records.layout import Candidate
from autoshard.records.trial import Trial
from autoshard.space.moves import axis_swaps, moves
from autoshard.space.space import Space
from autoshard.tuner.strategy.base import score
from autoshard.tuner.strategy.one_axis import one_axis_layouts


class Beam:
    """Asks for neighbours of the `width` best candidates that have some left.

    Attributes:
      width: how many are kept open.
      batch: candidates in one ask; at most half as many axes are asked for alone.
      explore: how many of them are random.
    """

    def __init__(self, memory_bytes: int, width: int = 4, batch: int = 32, explore: int = 2):
        self.width, self.batch, self.explore = width, batch, explore
        self._memory_bytes = memory_bytes
        # Derived from the space they are of; they save time and decide nothing.
        self._space: Space | None = None
        self._neighbours: dict[Candidate, tuple[list[Candidate], list[Candidate]]] = {}
        self._contained: dict[Candidate, bool] = {}
        self._alone: list[Candidate] = []

    def ask(self, space: Space, seed: int, history: tuple[Trial, ...]) -> tuple[Candidate, ...]:
        if space is not self._space:
            self._space = space
            self._neighbours.clear()
            self._contained.clear()
            self._alone = list(itertools.islice(one_axis_layouts(space), self.batch // 2))
        done = {seen.candidate for seen in history}
        if alone := [c for c in self._alone if c not in done]:
            return tuple(alone)
        rng = random.Random(f"{seed}:{len(history)}")
        ranked = sorted(
            (s for s in history if not s.candidate.layout.as_annotated),
            key=lambda s: (score(s.propagated, self._memory_bytes), s.candidate.key),
        )
        scores: set[tuple[float, float]] = set()
        found: list[Candidate] = []
        rank = 0
        for seen in ranked:
            value = score(seen.propagated, self._memory_bytes)
            if value in scores:  # equal programs are one
                continue
            scores.add(value)
            first, others = self._near(space, seen.candidate)
            rest = [c for c in others if c not in done]
            rng.shuffle(rest)
            # Few, and they decide on which links all the rest lies.
            fresh = (*(c for c in first if c not in done), *rest)
            share = max(4, (self.batch - self.explore) >> (rank + 1))
            members = (c for c in fresh if self._contains(space, c))
            taken = list(itertools.islice(members, share))
            done.update(taken)
            found += taken
            rank += bool(taken)
            if rank == self.width:
                break
        if not found and history:
            return ()
        for _ in range(self.explore if history else self.batch):
            drawn = space.sample(rng)
            if drawn is not None and drawn not in done:
                done.add(drawn)
                found.append(drawn)
        return tuple(found)

    def _near(self, space: Space, candidate: Candidate) -> tuple[list[Candidate], list[Candidate]]:
        """Drafts: axis_swaps of mesh axes, and all others."""
        if candidate not in self._neighbours:
            first = list(axis_swaps(space, candidate))
            others = [c for c in moves(space, candidate) if c not in first]
            self._neighbours[candidate] = first, others
        return self._neighbours[candidate]

    def _contains(self, space: Space, candidate: Candidate) -> bool:
        if candidate not in self._contained:
            self._contained[candidate] = space.contains(candidate) is None
        return self._contained[candidate]
