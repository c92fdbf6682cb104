"""The state of one search: trials, journal, clock, and the events for callbacks."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Sequence

from autoshard.compat.xla.versions import versions
from autoshard.errors import LoweringError
from autoshard.lowering.lower import lower_step
from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Candidate
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Measurement, Stage, Trial
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.rungs.worker.failures import failure_of
from autoshard.rungs.worker.process import WorkerSettings
from autoshard.space.specs import Specs
from autoshard.target.cost import Constants, Correction, CostModel
from autoshard.target.target import Target
from autoshard.tuner.budget import Budget, Callback, Event
from autoshard.tuner.code_digest import code_digest
from autoshard.tuner.journal import Journal, key_of


@dataclasses.dataclass(slots=True, kw_only=True)
class SearchState:
    """What all parts of a search share. Only the driver's modules write to it.

    Attributes:
      limit_bytes: what a device may use, headroom taken off.
      folder: for workers' output and traces; None to keep none.
      executables: where compiled programs wait to be measured, for as long as this search runs;
        None: they do not.
      start_s: when the search began, by `time.perf_counter`.
      correction: what measurements taught of rung 1.
      interrupted: whether Ctrl-C, or a callback that raised KeyboardInterrupt, ended the search.
      cut_short: what was left for want of time, in the order in which it was.
      notes: what else the user should know.
    """

    problems: Sequence[SearchProblem]
    target: Target
    cost: CostModel
    budget: Budget
    journal: Journal
    callbacks: Sequence[Callback]
    seed: int
    limit_bytes: int
    folder: pathlib.Path | None
    executables: pathlib.Path | None = None
    trials: list[Trial] = dataclasses.field(default_factory=list)
    correction: Correction = dataclasses.field(default_factory=Correction)
    interrupted: bool = False
    cut_short: dict[str, None] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    elapsed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    _timing: str = ""  # the rung whose time runs

    @property
    def constants(self) -> Constants:
        """What the model of time knows of the target."""
        return self.cost.constants

    def problem_of(self, trial: Trial) -> SearchProblem:
        return self.problems[trial.problem]

    def late(self, share: float) -> bool:
        """Whether that share of the budget's seconds is spent.

        Shares are of what tracing and a calibration leave: those come before rung 1.
        """
        limit, traced_s = self.budget.seconds, self.elapsed_s.get("trace", 0.0)
        since_s = time.perf_counter() - self.start_s - traced_s
        return limit is not None and since_s > share * max(0.0, limit - traced_s)

    def stops(self, work: str, share: float) -> bool:
        """`late`, asked where work is left: if it is late, that work is recorded as cut short.

        Args:
          work: for people, such as "compiling".
        """
        late = self.late(share)
        if late:
            self.cut_short.setdefault(work)
        return late

    def how_it_ended(self) -> str:
        """See `Found.ended`."""
        if self.interrupted:
            return "interrupted"
        if not self.cut_short:
            return "finished"
        return "out of time" if self.late(1.0) else f"cut short: {', '.join(self.cut_short)}"

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time inside to what rung `name` cost, and to no rung around it."""
        start, within = time.perf_counter(), self._timing
        self._timing = name
        self.elapsed_s.setdefault(name, 0.0)  # in the order in which the rungs begin
        try:
            yield
        finally:
            seconds, self._timing = time.perf_counter() - start, within
            self.elapsed_s[name] += seconds
            if within:
                self.elapsed_s[within] -= seconds

    def tell(self, stage: Stage, done: int, total: int, text: str) -> None:
        """Tells the callbacks where the search is.

        A callback may raise KeyboardInterrupt to end it; once that is done it ends nothing more.
        """
        measured = self.measured()
        best = self.time_of(measured[0]) if measured else None
        if best is None:
            judged = (trial.propagated for trial in self.trials)
            times = (
                one.time_s
                for one in judged
                if isinstance(one, Estimate) and one.peak_memory_bytes <= self.limit_bytes
            )
            best = min(times, default=None)
        event = Event(stage=stage, done=done, total=total, text=text, best_s=best)
        for callback in self.callbacks:
            try:
                callback(event)
            except KeyboardInterrupt:
                if not self.interrupted:
                    raise

    def measured(self) -> list[int]:
        """Measured trials, fastest median first."""
        timed = [
            i for i, trial in enumerate(self.trials) if isinstance(trial.profiled, Measurement)
        ]
        return sorted(timed, key=lambda i: (self.time_of(i), i))

    def time_of(self, index: int) -> float:
        """Median of a measured trial, seconds."""
        outcome = self.trials[index].profiled
        return outcome.median_s if isinstance(outcome, Measurement) else float("inf")

    def fitting(self, indices: Sequence[int]) -> list[int]:
        """Those whose compiled peak is within the limit."""
        return [
            i
            for i in indices
            if isinstance(compiled := self.trials[i].compiled, Estimate)
            and compiled.peak_memory_bytes <= self.limit_bytes
        ]

    def estimated_s(self, index: int) -> float:
        """What rung 2 says of a trial, seconds."""
        outcome = self.trials[index].compiled
        return outcome.time_s if isinstance(outcome, Estimate) else float("inf")

    def representatives(self, indices: Sequence[int]) -> list[int]:
        """Of these trials those that stand for their program, where others came to the same one.

        All baselines do, since people look for their names; where there is none, what was measured,
        or else the first.
        """
        trials = self.trials

        def program(i: int) -> object:
            return (trials[i].problem, trials[i].digest) if trials[i].digest else i

        chosen: dict[object, int] = {}
        for i in sorted(indices, key=lambda i: (trials[i].profiled is None, i)):
            chosen.setdefault(program(i), i)
        named = {program(i) for i in indices if trials[i].baseline}
        return [
            i
            for i in indices
            if trials[i].baseline or (program(i) not in named and chosen[program(i)] == i)
        ]

    def specs_of(self, trial: Trial) -> Specs:
        """Every sharding of a trial's layout."""
        return self.problem_of(trial).space.specs(trial.candidate.layout)

    def module_of(self, trial: Trial) -> Module | Failure:
        """The program of a trial, lowered once; after a failure, every time."""
        if trial.module is None:
            problem = self.problem_of(trial)
            start = time.perf_counter()
            try:
                analysis = problem.analysis_for(trial.candidate.layout)
                trial.module = lower_step(
                    analysis, minimal_constraints(analysis, self.specs_of(trial)), self.target
                )
                trial.digest = trial.module.digest
            except LoweringError as error:
                cause = error.__cause__
                assert isinstance(cause, Exception)
                return failure_of(cause, Stage.COMPILE, time.perf_counter() - start)
        return trial.module

    def settings(self, name: str) -> WorkerSettings:
        """How to start the worker process called `name`."""
        return WorkerSettings(
            platform=self.target.platform,
            device_count=self.target.device_count,
            folder=self.folder_of(f"workers/{name}"),
        )

    def folder_of(self, name: str) -> str | None:
        """A folder for something that is kept, below that of the search; None to keep it not."""
        return None if self.folder is None else str(self.folder / name)

    def key(self, rung: str, problem: SearchProblem, candidate: Candidate, **more: object) -> str:
        """The journal's key of rung 1 or 2: everything its estimate depends on.

        Args:
          rung: "propagate" or "compile".
          **more: what else it depends on, as JSON.
        """
        return key_of(
            rung=rung,
            code=code_digest(rung),
            program=problem.analysis_for(candidate.layout).digest,
            candidate=candidate.to_json(),
            constants=self.constants.digest,
            leaves=problem.space.fixed_leaves,
            versions=versions(),
            **more,
        )

    def note(self, rung: str, trial: Trial) -> dict[str, object]:
        """What a journal line says beside key and outcome, for people and reports."""
        return {"rung": rung, "baseline": trial.baseline, "candidate": trial.candidate.to_json()}
