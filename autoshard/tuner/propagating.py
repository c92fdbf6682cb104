"""Rung 1 of a search: the baselines, then what the strategies ask for, each judged and recorded."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator

from autoshard.errors import LayoutError, WorkerError
from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate, Failure, Kind, Stage, Trial
from autoshard.rungs.propagate import Propagator
from autoshard.rungs.propagate import in_workers as partitioning
from autoshard.rungs.propagate.partition import Partition
from autoshard.space.baselines import baselines
from autoshard.space.space import Space
from autoshard.target.host import cores, memory_bytes
from autoshard.tuner.state import SearchState
from autoshard.tuner.strategy import Beam, Exhaustive, Strategy

_WORTH_S = 30.0
"""So much of rung 1 must lie ahead for other processes to be started: each imports JAX first."""

_MOST_PROCESSES = 8
"""The search's own prices what they answer, a sixth of the work: more would wait for it."""

_ROOM_BYTES = 1 << 30
"""Memory of the host for each process: one took 240 MiB for a step of 28 thousand operations."""

_LONGEST_S = 600.0
"""A partitioner that says nothing about a layout for so long is killed."""


def propagate_all(
    state: SearchState,
    strategy: Strategy | None,
    share: float,
    after_baselines: Callable[[], None] = lambda: None,
) -> None:
    """Judges candidates until the strategies or the budget end.

    Args:
      strategy: for every problem; default exhaustive where the space is small, else beam.
      share: part of the budget's seconds that rung 1 may take.
      after_baselines: called when the baselines are judged and nothing else is.
    """
    _Propagation(state, strategy).run(share, after_baselines)


class _Propagation:
    def __init__(self, state: SearchState, strategy: Strategy | None):
        self._state = state
        self._cost = state.cost
        self._propagators = [Propagator(s.analysis) for s in state.problems]
        self._histories: list[list[Trial]] = [[] for _ in state.problems]
        self._known: dict[object, Estimate | Failure] = {}
        self._users = strategy is not None
        self._strategies = self._one_each(strategy)
        self._partitioners: partitioning.Partitioners | None = None
        self._asked: dict[object, partitioning.Answer] = {}  # by program

    def _one_each(self, strategy: Strategy | None) -> list[Strategy]:
        """A strategy for each problem.

        A user's strategy is copied: it may cache what it derives from one space.
        """
        spaces = [problem.space for problem in self._state.problems]
        if strategy is None:
            return [self._default(space) for space in spaces]
        try:
            return [strategy, *(copy.deepcopy(strategy) for _ in spaces[1:])]
        except Exception as error:  # of the user's own code
            self._state.notes.append(
                f"all knob settings share the strategy, which cannot be copied: {error}"
            )
            return [strategy] * len(spaces)

    def _default(self, space: Space) -> Strategy:
        if space.size() <= self._state.budget.candidates // len(self._state.problems):
            return Exhaustive()
        return Beam(self._state.limit_bytes)

    def run(self, share: float, after_baselines: Callable[[], None]) -> None:
        state, limit = self._state, self._state.budget.candidates
        state.tell(Stage.PROPAGATE, 0, limit, "judging the baselines")
        for i, problem in enumerate(state.problems):
            for baseline in baselines(problem.space):
                self._judge(i, baseline.candidate, baseline.name)
        after_baselines()
        with self._other_processes():
            self._explore(share)
        state.tell(Stage.PROPAGATE, len(state.trials), limit, "layouts judged")

    @contextlib.contextmanager
    def _other_processes(self) -> Iterator[None]:
        """Partitions in several processes, where so much lies ahead that they are worth it."""
        state = self._state
        spent_s = [trial.propagated.elapsed_s for trial in state.trials]
        ahead_s = (state.budget.candidates - len(spent_s)) * sum(spent_s) / max(1, len(spent_s))
        processes = min(cores(), memory_bytes() // _ROOM_BYTES, _MOST_PROCESSES)
        if processes < 2 or ahead_s < _WORTH_S:
            yield
            return
        with partitioning.opened(
            [problem.analysis for problem in state.problems],
            processes,
            state.folder_of("workers/partition"),
            _LONGEST_S,
        ) as self._partitioners:
            try:
                yield
            finally:
                self._partitioners = None

    def _explore(self, share: float) -> None:
        state, limit = self._state, self._state.budget.candidates
        live = list(range(len(state.problems)))
        while live and len(state.trials) < limit:
            # The problem that is furthest behind goes next, so that knobs share the budget.
            i = min(live, key=lambda k: (len(self._histories[k]), k))
            asked = self._strategies[i].ask(
                state.problems[i].space, state.seed, tuple(self._histories[i])
            )
            done = {seen.candidate for seen in self._histories[i]}
            asked = tuple(c for c in dict.fromkeys(asked) if c not in done)
            if not asked:
                live.remove(i)
                continue
            self._ask(i, asked[: limit - len(state.trials)])
            for candidate in asked:
                if len(state.trials) >= limit or state.stops("judging layouts", share):
                    live = []
                    break
                self._judge(i, candidate, "")
            state.journal.sync()

    def _ask(self, index: int, candidates: Iterable[Candidate]) -> None:
        """Has the partitioner asked, in other processes, about what is going to be judged."""
        if self._partitioners is None:
            return
        problem = self._state.problems[index]
        for candidate in candidates:
            layout = candidate.layout
            if layout.as_annotated or (
                self._users and problem.space.contains(candidate) is not None
            ):
                continue
            if self._recorded(self._state.key("propagate", problem, candidate)) is not None:
                continue
            try:
                specs = self._propagators[index].specs(problem.space, layout)
            except LayoutError:  # `judge` says so
                continue
            program = (index, specs.key())
            if specs.mesh and program not in self._known and program not in self._asked:
                self._asked[program] = self._partitioners.ask(index, specs)

    def _answer(self, program: object) -> Partition | Failure | None:
        """What another process says of a program; None where none was asked."""
        asked = self._asked.pop(program, None)
        if asked is None:
            return None
        try:
            return asked.result()
        except WorkerError as error:  # this process can do without
            self._partitioners = None
            self._asked.clear()
            self._state.notes.append(f"rung 1 had to do with one process: {error}")
            return None

    def _recorded(self, key: str) -> Estimate | Failure | None:
        found = self._state.journal.find(key)
        return found if isinstance(found, (Estimate, Failure)) else None

    def _judge(self, index: int, candidate: Candidate, baseline: str) -> None:
        state = self._state
        problem = state.problems[index]
        layout = candidate.layout
        key = state.key("propagate", problem, candidate)
        # The library's own strategies ask for members of the space only.
        foreign = problem.space.contains(candidate) if self._users else None
        if foreign is not None:
            failure = Failure(stage=Stage.PROPAGATE, kind=Kind.INFEASIBLE, message=foreign)
            # Not for the journal: another space may hold it.
            self._add(index, candidate, baseline, object(), failure, None)
            return
        program = (index, layout if layout.as_annotated else problem.space.specs(layout).key())
        outcome = self._recorded(key)
        new = outcome is None
        if outcome is None:
            outcome = self._known.get(program)  # another spelling of the same program
        if outcome is None:
            outcome = self._outcome(index, layout, program)
        self._known[program] = outcome
        self._add(index, candidate, baseline, program, outcome, key if new else None)

    def _outcome(self, index: int, layout: Layout, program: object) -> Estimate | Failure:
        problem, propagator = self._state.problems[index], self._propagators[index]
        if layout.as_annotated:
            propagator = Propagator(problem.analysis_for(layout))
        said = self._answer(program)
        if isinstance(said, Failure):
            return said
        return propagator.judge(problem.space, layout, self._cost, said)

    def _add(
        self,
        index: int,
        candidate: Candidate,
        baseline: str,
        program: object,
        outcome: Estimate | Failure,
        key: str | None,
    ) -> None:
        """Makes a trial; with a key it is new to the journal."""
        state = self._state
        trial = Trial(
            problem=index,
            candidate=candidate,
            baseline=baseline,
            shardings=program,
            propagated=outcome,
        )
        if key is not None:
            state.journal.add(key, outcome, state.note("propagate", trial), sync=False)
        state.trials.append(trial)
        self._histories[index].append(trial)
        if len(state.trials) % 10 == 0:
            state.tell(
                Stage.PROPAGATE, len(state.trials), state.budget.candidates, "propagating layouts"
            )
