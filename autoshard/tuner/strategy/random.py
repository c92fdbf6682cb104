"""Random search: the yardstick for the others."""

import random

from autoshard.records.layout import Candidate
from autoshard.records.trial import Trial
from autoshard.space.space import Space


class RandomSearch:
    """Asks for random candidates, `batch` at a time, until draws only repeat."""

    def __init__(self, batch: int = 16):
        self._batch = batch

    def ask(self, space: Space, seed: int, history: tuple[Trial, ...]) -> tuple[Candidate, ...]:
        done = {seen.candidate for seen in history}
        rng = random.Random(f"{seed}:{len(history)}")
        found: list[Candidate] = []
        for _ in range(20 * self._batch):
            candidate = space.sample(rng, tries=1)
            if candidate is not None and candidate not in done:
                done.add(candidate)
                found.append(candidate)
                if len(found) == self._batch:
                    break
        return tuple(found)
