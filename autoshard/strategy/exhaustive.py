"""Exhaustive search: every candidate of a small space, in the space's own order."""

import itertools

from autoshard.layout import Candidate
from autoshard.space import Space
from autoshard.strategy.base import Seen


class Exhaustive:
    """Asks for everything, `batch` candidates at a time."""

    def __init__(self, batch: int = 32):
        self._batch = batch

    def ask(self, space: Space, seed: int, history: tuple[Seen, ...]) -> tuple[Candidate, ...]:
        del seed
        done = {seen.candidate for seen in history}
        fresh = (c for c in space.enumerate() if c not in done)
        return tuple(itertools.islice(fresh, self._batch))
