"""Exhaustive search: every candidate of a small space, in the space's own order."""

import itertools
from collections.abc import Iterator

from autoshard.records.layout import Candidate
from autoshard.records.trial import Trial
from autoshard.space.space import Space


class Exhaustive:
    """Asks for everything, `batch` candidates at a time."""

    def __init__(self, batch: int = 32):
        self._batch = batch
        self._space: Space | None = None
        self._known: list[Candidate] = []
        self._rest: Iterator[Candidate] = iter(())

    def ask(self, space: Space, seed: int, history: tuple[Trial, ...]) -> tuple[Candidate, ...]:
        del seed
        done = {seen.candidate for seen in history}
        fresh = (c for c in self._every(space) if c not in done)
        return tuple(itertools.islice(fresh, self._batch))

    def _every(self, space: Space) -> Iterator[Candidate]:
        """The space in its order; what was enumerated for earlier asks is kept."""
        if space is not self._space:
            self._space, self._known, self._rest = space, [], space.enumerate()
        yield from tuple(self._known)
        for candidate in self._rest:
            self._known.append(candidate)
            yield candidate
