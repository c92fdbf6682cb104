"""Rung 2 of a search: trials compiled in worker processes, or here for live accelerators."""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from autoshard.compat.xla.compilers import compiler_options, compiler_version
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Kind, Stage, Trial
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.hlo import HloError
from autoshard.rungs.compile.job import (
    FIRST_PEAK_BYTES,
    CompileRequest,
    CompileResult,
    compile_in_process,
    compile_on,
    request_for,
    workers_for,
)
from autoshard.rungs.worker.failures import failure_of
from autoshard.rungs.worker.pool import worker_threads
from autoshard.target.host import available_bytes
from autoshard.tuner.state import SearchState

_SILENT_S = 600.0
"""Besides two limits of one compile, how long a user's executor may answer nothing: it may start
machines, and have other work before ours."""

_GRACE_S = 30.0
"""So long at least a user's executor has for what it was given: also for what a search compiles,
whose seconds are spent, to return a plan at all. After Ctrl-C it may not be silent for longer."""


class _Asked(NamedTuple):
    """A program that a worker compiles, and the trials, with their keys, that came to it."""

    module: Module
    trials: list[tuple[Trial, str]]


class Compiling:
    """Compiles trials of a state.

    Attributes:
      count: programs that were given to the compiler, answers from the journal included.
      most: how many programs the search may compile, as its budget says, or by `workers` where that
        leaves it open.
    """

    def __init__(self, state: SearchState, executor: concurrent.futures.Executor | None):
        self.count = 0
        self._state = state
        self._executor = executor
        # The user's executor may compile on other machines, whose programs are not for this one.
        self._executables = state.executables if executor is None else None
        self._waiting: dict[concurrent.futures.Future[CompileResult | Failure], _Asked] = {}
        self._theirs = executor is not None
        # Of a user's executor alone: when it was last given something, and last answered; and what
        # is said of candidates since it is taken for lost.
        self._given_s = self._heard_s = 0.0
        self._lost: Failure | None = None
        self._in_process = state.target.is_here and state.target.platform != "cpu"
        self._free_bytes = available_bytes()
        self._peaks_bytes: list[int] = []  # of the workers here, after each compile
        self.most = state.budget.compiles_by(self.workers())

    def workers(self) -> int:
        """How many programs compile at once on this machine, by the largest peak seen so far.

        1 where a user's executor compiles, or this process for its own accelerators.
        """
        if self._theirs or self._in_process:
            return 1
        peak_bytes = max(self._peaks_bytes, default=FIRST_PEAK_BYTES)
        return workers_for(self._free_bytes, peak_bytes)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes the executor, where the user gave none; ends it and its workers.

        The user's own goes on without what is still in its queue.
        """
        if self._executor is not None or self._in_process:
            try:
                yield
            finally:
                self._cancel()
            return
        with worker_threads(self.workers, "autoshard-compile") as pool:
            self._executor = pool
            try:
                yield
            finally:
                self._executor = None

    def _compile(self, request: CompileRequest) -> CompileResult | Failure:
        """Runs in a thread of our own pool, whose limit follows from what it learns here."""
        result = compile_in_process(request)
        if isinstance(result, CompileResult) and result.peak_bytes:
            self._peaks_bytes.append(result.peak_bytes)
        return result

    def compile(self, indices: list[int], share: float) -> None:
        """`begin`, then `finish`."""
        self.begin(indices, share)
        self.finish()

    def begin(self, indices: list[int], share: float) -> None:
        """Hands trials to the workers and does not wait. The journal's answers are used again.

        One program is compiled once, also where several trials came to it.

        Args:
          share: part of the budget's seconds after which no trial is begun, except the first.
        """
        state, total = self._state, self.most
        for i in indices:
            if self.count and state.stops("compiling", share):
                break
            trial = state.trials[i]
            if any(trial is other for asked in self._waiting.values() for other, _ in asked.trials):
                continue
            key = self.key(trial)
            found = self._recorded(key)
            if found is not None:
                trial.digest = str(state.journal.note(key).get("module", ""))
                self.count += self._judged_as(trial) is None
                trial.compiled = found
                continue
            if self._lost is not None:
                self.count += 1
                trial.compiled = self._lost
                continue
            state.tell(Stage.COMPILE, self.count + 1 - len(self._waiting), total, "lowering")
            module = state.module_of(trial)
            if isinstance(module, Failure):
                self.count += 1
                self._record(trial, key, module)
                continue
            if (judged := self._judged_as(trial)) is not None:
                self._record(trial, key, judged)
                continue
            asked = next(
                (a for a in self._waiting.values() if _are_one(a.trials[0][0], trial)), None
            )
            if asked is not None:
                asked.trials.append((trial, key))
                continue
            self.count += 1
            note = state.note("compile", trial)
            if self._executor is None and state.journal.attempts(key) > 1:
                self._record(trial, key, _crashed())
                continue
            if self._executor is None:
                # Live accelerators: this process holds them, so it compiles.
                with state.journal.attempted({key: note}):
                    placed = state.target.placed(module.mesh)
                    result = compile_on(module, placed, self._executables)
                    self._record(trial, key, self._priced(module, result))
                continue
            state.journal.started(key, note)
            request = request_for(
                module,
                state.target,
                # Another machine may not have this folder, nor may make it.
                None if self._theirs else state.folder_of("workers/compile"),
                state.budget.compile_seconds,
                self._executables,
            )
            try:
                job = compile_in_process if self._theirs else self._compile
                future = self._executor.submit(job, request)
            except RuntimeError as error:  # the user's executor is broken or shut down
                trial.compiled = failure_of(error, Stage.COMPILE, 0.0)
            else:
                self._waiting[future] = _Asked(module, [(trial, key)])
                self._given_s = time.perf_counter()

    def finish(self) -> None:
        """Waits for what was begun, and records it.

        A user's executor is waited for until the budget's seconds are spent, or it has been silent
        for long: what it still has is then a failure, of which nothing is recorded.
        """
        state, total = self._state, self.most
        begin = time.perf_counter()
        while self._waiting:
            done, _ = concurrent.futures.wait(
                self._waiting, self._patience_s(), concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                self._give_up(begin)
                return
            self._heard_s = time.perf_counter()
            for future in [f for f in self._waiting if f in done]:  # in the order begun
                asked = self._waiting.pop(future)
                try:
                    result = future.result()
                except Exception as error:  # the executor lost its worker: no word on the program
                    for trial, _ in asked.trials:
                        trial.compiled = failure_of(error, Stage.COMPILE, 0.0)
                else:
                    outcome = self._priced(asked.module, result)
                    for trial, key in asked.trials:
                        self._record(trial, key, outcome)
                state.tell(
                    Stage.COMPILE, self.count - len(self._waiting), total, "compiling candidates"
                )

    def _patience_s(self) -> float | None:
        """How long the next answer is waited for; None without limit: our own workers have one."""
        if not self._theirs:
            return None
        state, budget = self._state, self._state.budget
        last = max(self._given_s, self._heard_s)
        if state.interrupted:
            until = last + _GRACE_S
        else:
            until = last + _SILENT_S + 2 * budget.compile_seconds
        if budget.seconds is not None:
            spent = state.start_s + budget.seconds
            until = min(until, max(spent, self._given_s + _GRACE_S))
        return min(max(0.0, until - time.perf_counter()), threading.TIMEOUT_MAX)

    def _give_up(self, begin: float) -> None:
        """Fails what a user's executor has not answered, and takes it back.

        Args:
          begin: since when it is waited for. If nothing came since, the executor is taken for lost.
        """
        failure = self._silence(max(self._given_s, self._heard_s))
        for asked in self._waiting.values():
            for trial, _ in asked.trials:
                trial.compiled = failure
        self._cancel()
        if self._heard_s < begin:
            self._lost = failure

    def _silence(self, since: float) -> Failure:
        """What is said of a candidate that a user's executor did not answer."""
        name, elapsed_s = type(self._executor).__name__, time.perf_counter() - since
        said, more = f"the executor {name} has answered nothing for {elapsed_s:.1f} s", ""
        if not self._state.interrupted and self._state.stops("compiling", 1.0):
            said += f" and Budget(seconds={self._state.budget.seconds:g}) is spent"
            more = "; or give the search more seconds"
        return Failure(
            stage=Stage.COMPILE,
            kind=Kind.TIMEOUT,
            message=f"{said}: see whether its workers still run and can be reached, and whether"
            f" they have other work{more}; without an executor this machine compiles",
            elapsed_s=elapsed_s,
        )

    def _cancel(self) -> None:
        """Takes back what waits; what a worker has begun goes on there until its time limit."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()

    def key(self, trial: Trial) -> str:
        """The journal's key of what the compiler makes of a trial."""
        return self._state.key(
            "compile", self._state.problem_of(trial), trial.candidate, **self.compiled_by()
        )

    def compiled_by(self) -> dict[str, object]:
        """Which compiler it is, with which options."""
        target = self._state.target
        platform = target.lowering_platform
        options = compiler_options(platform, deviceless=not target.is_here)
        apart = target.platform == "tpu"  # libtpu is a package of its own
        return {
            "platform": target.platform,
            "device": target.device_kind,
            # Of CPUs and GPUs that are here jaxlib's version says it, which is in every key.
            "compiler": "" if target.is_here and not apart else compiler_version(platform),
            "options": options,
        }

    def known(self, trial: Trial) -> bool:
        """Whether the journal says what the compiler makes of a trial."""
        return self._recorded(self.key(trial)) is not None

    def _recorded(self, key: str) -> Estimate | Failure | None:
        found = self._state.journal.find(key)
        if isinstance(found, (Estimate, Failure)) and not self._may_take_longer(found):
            return found
        return None

    def _may_take_longer(self, found: Estimate | Failure) -> bool:
        """Whether a recorded timeout ran under a shorter limit than today's."""
        limit_s = self._state.budget.compile_seconds
        return (
            isinstance(found, Failure) and found.kind is Kind.TIMEOUT and found.elapsed_s < limit_s
        )

    def _judged_as(self, trial: Trial) -> Estimate | Failure | None:
        """What the compiler said of the same program under another trial, None if nothing yet."""
        others = (
            self._recorded(self.key(other))
            for other in self._state.trials
            if other is not trial and other.compiled is not None and _are_one(other, trial)
        )
        return next((found for found in others if found is not None), None)

    def _priced(self, module: Module, result: CompileResult | Failure) -> Estimate | Failure:
        if isinstance(result, Failure):
            return result
        try:
            return estimate_of(module, result, self._state.cost)
        except HloError as error:
            return Failure(
                stage=Stage.COMPILE,
                kind=Kind.UNSUPPORTED,
                message=f"cannot read the compiled program: {error}",
                elapsed_s=result.elapsed_s,
            )

    def _record(self, trial: Trial, key: str, outcome: Estimate | Failure) -> None:
        if isinstance(outcome, Estimate) and isinstance(trial.propagated, Estimate):
            outcome = dataclasses.replace(outcome, dropped=trial.propagated.dropped)
        trial.compiled = outcome
        note = self._state.note("compile", trial)
        self._state.journal.add(key, outcome, {**note, "module": trial.digest, "most": self.most})


def _are_one(one: Trial, other: Trial) -> bool:
    """Whether two trials are known to have come to one program."""
    return bool(one.digest) and (one.problem, one.digest) == (other.problem, other.digest)


def _crashed() -> Failure:
    return Failure(
        stage=Stage.COMPILE,
        kind=Kind.CRASH,
        message="the process died twice while compiling this program",
    )
