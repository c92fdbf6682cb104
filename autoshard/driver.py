"""The driver: the only module that knows all roles. Budget, rungs, journal, callbacks, interrupts."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence

from autoshard import promote
from autoshard.analysis import Analysis
from autoshard.budget import Budget, Callback, Event
from autoshard.compat.executable import compile_module
from autoshard.compat.versions import versions
from autoshard.cost import MODEL_REVISION, Constants, Correction, CostModel
from autoshard.hlo import HloError
from autoshard.journal import Journal, key_of
from autoshard.layout import Candidate, Layout
from autoshard.lowering import lower_init, lower_step, lower_unsharded
from autoshard.module import Module
from autoshard.program import sample_batch
from autoshard.rungs import profile
from autoshard.rungs.bench import Bench, Benches
from autoshard.rungs.bench_client import ChildBench
from autoshard.rungs.compile import estimate_of
from autoshard.rungs.compile_job import CompileRequest, CompileResult, compile_in_process
from autoshard.rungs.failures import failure_of
from autoshard.rungs.propagate import Propagator
from autoshard.rungs.race import RaceSettings
from autoshard.rungs.worker import WorkerSettings
from autoshard.space import Space
from autoshard.strategy import Beam, Exhaustive, Seen, Strategy, baselines
from autoshard.target import Target
from autoshard.trial import Estimate, Failure, Kind, Measurement, Stage, Trial

_log = logging.getLogger("autoshard")

RUNG1_SHARE, RUNG2_SHARE = 0.35, 0.65
"""Parts of a limit of seconds after which rung 1, and rung 2, stop."""

_BATCHES = 2


@dataclasses.dataclass(slots=True)
class _Row:
    """A trial in the making."""

    subject: int
    candidate: Candidate
    baseline: str
    propagated: Estimate | Failure
    compiled: Estimate | Failure | None = None
    profiled: Measurement | Failure | None = None
    module: Module | None = None

    def trial(self) -> Trial:
        return Trial(
            candidate=self.candidate,
            propagated=self.propagated,
            compiled=self.compiled,
            profiled=self.profiled,
            baseline=self.baseline,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One value of the knobs: its analysis and the space of its layouts."""

    analysis: Analysis
    space: Space

    def analysis_for(self, layout: Layout) -> Analysis:
        """What a layout is judged and lowered with: the step as written has its own analysis."""
        if layout.as_written and self.space.written is not None:
            return self.space.written.analysis
        return self.analysis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
      trials: every trial, in the order asked.
      ranking: indices of trials that may be planned, best first; empty if none may.
      subject: of each trial, which subject it belongs to.
      ended: why the search ended.
      false_rejections: candidates that rung 1 would have rejected and rung 2 found to fit.
      elapsed_s: seconds by rung, and in all.
    """

    trials: tuple[Trial, ...]
    ranking: tuple[int, ...]
    subject: tuple[int, ...]
    ended: str
    false_rejections: int
    elapsed_s: dict[str, float]
    correction: Correction


class Driver:
    """One search. Use once: `Driver(...).run()`."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        target: Target,
        constants: Constants,
        *,
        budget: Budget,
        journal: Journal,
        executor: concurrent.futures.Executor | None,
        strategy: Strategy | None,
        seed: int,
        callbacks: Sequence[Callback],
        memory_headroom: float,
        folder: pathlib.Path | None,
    ):
        self._subjects = list(subjects)
        self._target = target
        self._constants = constants
        self._cost = CostModel(constants)
        self._budget = budget
        self._journal = journal
        self._executor = executor
        self._strategy = strategy
        self._seed = seed
        self._callbacks = tuple(callbacks)
        self._limit_bytes = int(target.memory_bytes * (1 - memory_headroom))
        self._folder = folder
        self._rows: list[_Row] = []
        self._programs: dict[tuple[int, object], Estimate | Failure] = {}
        self._program_of: list[object] = []
        self._correction = Correction()
        self._start = time.perf_counter()
        self._elapsed: dict[str, float] = {}
        self._ended = "finished"
        self._ranking: tuple[int, ...] = ()
        self._compiled_count = 0

    def run(self) -> Found:
        """Runs the rungs; a KeyboardInterrupt or the end of the budget keeps what is known."""
        with tempfile.TemporaryDirectory(prefix="autoshard-") as scratch:
            if self._folder is None:
                self._folder = pathlib.Path(scratch)
            try:
                self._search()
            except KeyboardInterrupt:
                self._ended = "interrupted"
                self._tell(Stage.PROFILE, 0, 0, "interrupted: finishing with the best so far")
            if not self._ranking:
                self._fall_back()
        self._journal.sync()
        self._elapsed["all"] = time.perf_counter() - self._start
        return Found(
            trials=tuple(row.trial() for row in self._rows),
            ranking=self._ranking,
            subject=tuple(row.subject for row in self._rows),
            ended=self._ended,
            false_rejections=self._false_rejections(),
            elapsed_s=dict(self._elapsed),
            correction=self._correction,
        )

    def _search(self) -> None:
        with self._timed("propagate"):
            self._rung1()
        budget = self._budget
        with self._compiler() as compiler:
            with self._timed("compile"):
                first = self._baseline_rows()[: budget.compiles]
                room = max(0, min(budget.compiles, budget.profiles or budget.compiles) - len(first))
                first += self._promoted(room - room // 2, first)
                self._rung2(compiler, first)
            if budget.profiles == 0:
                with self._timed("compile"):
                    more = self._promoted(budget.compiles - self._compiled_count, first)
                    self._rung2(compiler, more)
                self._rank_by_estimate()
                return
            with self._bench() as bench:
                with self._timed("profile"):
                    self._rung3(bench, self._fitting(first)[: budget.profiles], "first", 8)
                self._learn()
                with self._timed("compile"):
                    room = min(
                        budget.compiles - self._compiled_count,
                        budget.profiles - len(self._measured()),
                    )
                    second = self._promoted(room, first)
                    self._rung2(compiler, second)
                with self._timed("profile"):
                    best = self._measured()[:3]
                    self._rung3(
                        bench, best + self._fitting(second), "final", budget.rounds
                    )
                self._learn()

    # Rung 1

    def _rung1(self) -> None:
        propagators = [Propagator(s.analysis) for s in self._subjects]
        histories: list[list[Seen]] = [[] for _ in self._subjects]
        limit = self._budget.candidates
        self._tell(Stage.PROPAGATE, 0, limit, "judging the baselines")
        for i, subject in enumerate(self._subjects):
            for baseline in baselines(subject.space):
                outcome = self._propagate(propagators[i], i, baseline.candidate, baseline.name)
                histories[i].append(Seen(candidate=baseline.candidate, outcome=outcome))
        strategies = [self._strategy_for(s.space) for s in self._subjects]
        live = list(range(len(self._subjects)))
        while live and len(self._rows) < limit:
            # The subject that is furthest behind goes next, so that knobs share the budget.
            i = min(live, key=lambda k: (len(histories[k]), k))
            asked = strategies[i].ask(self._subjects[i].space, self._seed, tuple(histories[i]))
            if not asked:
                live.remove(i)
                continue
            for candidate in asked:
                if len(self._rows) >= limit or self._late(RUNG1_SHARE):
                    self._journal.sync()
                    return
                outcome = self._propagate(propagators[i], i, candidate, "")
                histories[i].append(Seen(candidate=candidate, outcome=outcome))
            self._journal.sync()

    def _strategy_for(self, space: Space) -> Strategy:
        if self._strategy is not None:
            return self._strategy
        if space.size() <= self._budget.candidates // len(self._subjects):
            return Exhaustive()
        return Beam(self._limit_bytes)

    def _propagate(
        self, propagator: Propagator, index: int, candidate: Candidate, baseline: str
    ) -> Estimate | Failure:
        subject = self._subjects[index]
        key = key_of(
            rung="propagate",
            revision=MODEL_REVISION,
            program=subject.analysis.digest,
            candidate=candidate.to_json(),
            constants=self._constants.digest,
            leaves=subject.space.fixed_leaves,
            versions=versions(),
        )
        outcome = self._journal.find(key)
        program: object = candidate.layout
        if not candidate.layout.as_written:
            program = subject.space.specs(candidate.layout).key()
        known = self._programs.get((index, program))
        if not isinstance(outcome, (Estimate, Failure)):
            if known is not None:
                outcome = known  # another spelling of the same program
            else:
                if candidate.layout.as_written:
                    propagator = Propagator(subject.analysis_for(candidate.layout))
                outcome = propagator.judge(subject.space, candidate.layout, self._cost)
            self._journal.add(
                key, outcome, {"rung": "propagate", "candidate": candidate.to_json()}, sync=False
            )
        self._programs[index, program] = outcome
        self._rows.append(
            _Row(subject=index, candidate=candidate, baseline=baseline, propagated=outcome)
        )
        self._program_of.append((index, program))
        done = len(self._rows)
        if done % 10 == 0:
            self._tell(Stage.PROPAGATE, done, self._budget.candidates, "propagating layouts")
        return outcome

    # Promotion

    def _entries(self) -> list[promote.Entry]:
        return [
            promote.Entry(
                index=i,
                estimate=row.propagated,
                family=(
                    row.candidate.knobs,
                    tuple(axis for axis, _ in row.candidate.layout.compute),
                ),
                program=self._program_of[i],
            )
            for i, row in enumerate(self._rows)
            if isinstance(row.propagated, Estimate)
        ]

    def _baseline_rows(self) -> list[int]:
        """Of each baseline the fastest that may fit, over knobs and meshes."""
        best: dict[str, int] = {}
        for i, row in enumerate(self._rows):
            estimate = row.propagated
            if not row.baseline or not isinstance(estimate, Estimate):
                continue
            if promote.surely_too_large(estimate, self._limit_bytes, self._lower_bound()):
                row.compiled = self._too_large(estimate, Stage.PROPAGATE)
                continue
            other = best.get(row.baseline)
            if other is None or estimate.time_s < self._estimate(other).time_s:
                best[row.baseline] = i
        return sorted(best.values(), key=lambda i: self._estimate(i).time_s)

    def _promoted(self, count: int, taken: Sequence[int]) -> list[int]:
        entries = self._entries()
        done = [e for e in entries if e.index in set(taken) or self._rows[e.index].compiled]
        chosen = promote.promote(
            entries, count, self._correction, self._limit_bytes, self._lower_bound(), done
        )
        return [e.index for e in chosen]

    def _estimate(self, index: int) -> Estimate:
        found = self._rows[index].propagated
        assert isinstance(found, Estimate)
        return found

    def _pairs(self) -> list[tuple[Estimate, Estimate]]:
        return [
            (row.propagated, row.compiled)
            for row in self._rows
            if isinstance(row.propagated, Estimate) and isinstance(row.compiled, Estimate)
        ]

    def _lower_bound(self) -> float:
        return promote.lower_bound_factor(self._pairs())

    def _false_rejections(self) -> int:
        factor = promote.DEFAULT_LOWER_BOUND
        return sum(
            promote.surely_too_large(a, self._limit_bytes, factor)
            and b.peak_memory_bytes <= self._limit_bytes
            for a, b in self._pairs()
        )

    def _learn(self) -> None:
        pairs = [
            (row.propagated, row.profiled)
            for row in self._rows
            if isinstance(row.propagated, Estimate) and isinstance(row.profiled, Measurement)
        ]
        if pairs:
            self._correction = promote.learn(pairs)

    # Rung 2

    @contextlib.contextmanager
    def _compiler(self) -> Iterator[concurrent.futures.Executor | None]:
        if self._executor is not None or self._target.platform != "cpu":
            yield self._executor
            return
        workers = min(2, os.cpu_count() or 1)
        pool = concurrent.futures.ThreadPoolExecutor(workers, "autoshard-compile")
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _rung2(self, compiler: concurrent.futures.Executor | None, indices: list[int]) -> None:
        waiting: dict[concurrent.futures.Future[CompileResult | Failure], tuple[int, str]] = {}
        for i in indices:
            if self._late(RUNG2_SHARE) and self._compiled_count:
                break
            self._compiled_count += 1
            row = self._rows[i]
            key = self._compile_key(row)
            found = self._journal.find(key)
            if isinstance(found, (Estimate, Failure)):
                row.compiled = found
                continue
            self._tell(Stage.COMPILE, self._compiled_count, self._budget.compiles, "lowering")
            lowered = self._lower(row)
            if isinstance(lowered, Failure):
                self._record_compiled(row, key, lowered)
                continue
            self._journal.started(key, {"rung": "compile", "candidate": row.candidate.to_json()})
            if compiler is None:
                self._record_compiled(row, key, self._priced(row, self._compile_here(lowered)))
                continue
            request = CompileRequest(
                module=lowered,
                time_limit_s=self._budget.compile_seconds,
                settings=self._settings("compile"),
            )
            waiting[compiler.submit(compile_in_process, request)] = (i, key)
        for future in concurrent.futures.as_completed(waiting):
            i, key = waiting[future]
            row = self._rows[i]
            try:
                result = future.result()
            except concurrent.futures.CancelledError:
                raise
            except Exception as error:  # the user's executor lost its worker
                result = failure_of(error, Stage.COMPILE, 0.0)
            self._record_compiled(row, key, self._priced(row, result))

    def _compile_key(self, row: _Row) -> str:
        subject = self._subjects[row.subject]
        return key_of(
            rung="compile",
            revision=MODEL_REVISION,
            program=subject.analysis.digest,
            candidate=row.candidate.to_json(),
            constants=self._constants.digest,
            leaves=subject.space.fixed_leaves,
            platform=self._target.platform,
            device=self._target.device_kind,
            versions=versions(),
        )

    def _lower(self, row: _Row) -> Module | Failure:
        if row.module is not None:
            return row.module
        subject = self._subjects[row.subject]
        start = time.perf_counter()
        try:
            layout = row.candidate.layout
            specs = subject.space.specs(layout)
            row.module = lower_step(subject.analysis_for(layout), specs, self._target)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            return failure_of(error, Stage.COMPILE, time.perf_counter() - start)
        return row.module

    def _compile_here(self, module: Module) -> CompileResult | Failure:
        """Live accelerators: this process holds them, so it compiles."""
        start = time.perf_counter()
        try:
            executable = compile_module(module, self._target.devices)
        except (RuntimeError, NotImplementedError) as error:
            return failure_of(error, Stage.COMPILE, time.perf_counter() - start)
        return CompileResult(
            memory=executable.memory,
            hlo_text=executable.hlo_text,
            warnings=(),
            elapsed_s=time.perf_counter() - start,
        )

    def _priced(self, row: _Row, result: CompileResult | Failure) -> Estimate | Failure:
        if isinstance(result, Failure):
            return result
        assert row.module is not None
        try:
            dropped = self._estimate(self._rows.index(row)).dropped
            estimate = estimate_of(row.module, result, self._cost, dropped)
        except HloError as error:
            return Failure(
                stage=Stage.COMPILE,
                kind=Kind.UNSUPPORTED,
                message=f"cannot read the compiled program: {error}",
                elapsed_s=result.elapsed_s,
            )
        return estimate

    def _record_compiled(self, row: _Row, key: str, outcome: Estimate | Failure) -> None:
        row.compiled = outcome
        self._journal.add(
            key, outcome, {"rung": "compile", "candidate": row.candidate.to_json()}
        )
        self._tell(
            Stage.COMPILE, self._compiled_count, self._budget.compiles, "compiling candidates"
        )

    def _too_large(self, estimate: Estimate, stage: Stage) -> Failure:
        missing = estimate.peak_memory_bytes - self._limit_bytes
        return Failure(
            stage=stage,
            kind=Kind.OOM,
            message=(
                f"needs {estimate.peak_memory_bytes / 2**20:.1f} MiB a device, the limit is"
                f" {self._limit_bytes / 2**20:.1f} MiB"
            ),
            missing_bytes=max(missing, estimate.state_bytes - self._limit_bytes),
        )

    def _fitting(self, indices: Sequence[int]) -> list[int]:
        """Those whose compiled peak is within the limit."""
        found = []
        for i in indices:
            compiled = self._rows[i].compiled
            if isinstance(compiled, Estimate):
                if compiled.peak_memory_bytes <= self._limit_bytes:
                    found.append(i)
        return found

    # Rung 3

    @contextlib.contextmanager
    def _bench(self) -> Iterator[Benches]:
        if self._target.platform != "cpu":
            yield Bench(self._target.devices)
            return
        child = ChildBench(self._settings("measure"), time_limit_s=self._budget.measure_seconds)
        try:
            yield child
        finally:
            child.close()

    def _settings(self, name: str) -> WorkerSettings:
        assert self._folder is not None
        return WorkerSettings(
            platform=self._target.platform,
            device_count=self._target.device_count,
            folder=str(self._folder / "workers" / name),
        )

    def _measured(self) -> list[int]:
        """Measured rows, fastest first."""
        timed = [
            (row.profiled.median_s, i)
            for i, row in enumerate(self._rows)
            if isinstance(row.profiled, Measurement)
        ]
        return [i for _, i in sorted(timed)]

    def _rung3(self, bench: Benches, indices: list[int], wave: str, rounds: int) -> None:
        """Measures rows that share their knobs' state: one batch and one initial state each."""
        if not indices:
            return
        keys = {i: self._profile_key(self._rows[i], wave) for i in indices}
        found = {i: self._journal.find(key) for i, key in keys.items()}
        if all(isinstance(f, (Measurement, Failure)) for f in found.values()):
            for i, outcome in found.items():
                assert isinstance(outcome, (Measurement, Failure))
                self._rows[i].profiled = outcome
            self._set_ranking(sorted(indices, key=self._time_of))
            return
        by_state: dict[object, list[int]] = {}
        for i in indices:
            program = self._subjects[self._rows[i].subject].analysis.program
            by_state.setdefault((program.state, program.state_tree, program.batch), []).append(i)
        ranked: list[int] = []
        for group in by_state.values():
            ranked += self._race(bench, group, wave, rounds)
        for i, key in keys.items():
            outcome = self._rows[i].profiled
            if isinstance(outcome, (Measurement, Failure)):
                self._journal.add(
                    key,
                    outcome,
                    {"rung": "profile", "wave": wave, "candidate": self._rows[i].candidate.to_json()},
                )
        if len(by_state) > 1:
            ranked.sort(key=self._time_of)
        self._set_ranking(ranked)

    def _race(self, bench: Benches, group: list[int], wave: str, rounds: int) -> list[int]:
        program = self._subjects[self._rows[group[0]].subject].analysis.program
        bench.set_inputs(
            lower_init(program, self._target),
            [sample_batch(program, self._seed + k) for k in range(_BATCHES)],
        )
        references: dict[str, Module] = {}
        finalists = []
        names: dict[str, int] = {}
        for i in group:
            row = self._rows[i]
            module = self._lower(row)
            if isinstance(module, Failure):
                row.profiled = module
                continue
            reference = f"reference {row.subject}"
            references.setdefault(
                reference,
                lower_unsharded(
                    self._subjects[row.subject].analysis.program, self._target
                ),
            )
            name = f"{row.baseline or 'candidate'} {i}"
            names[name] = i
            compiled = row.compiled
            assert isinstance(compiled, Estimate)
            finalists.append(
                profile.Finalist(
                    name=name,
                    module=module,
                    peak_bytes=compiled.peak_memory_bytes,
                    reference=reference,
                    traced=wave == "final" or bool(row.baseline),
                )
            )
            self._journal.started(
                self._profile_key(row, wave),
                {"rung": "profile", "wave": wave, "candidate": row.candidate.to_json()},
            )
        total = len(finalists)
        judged = profile.judge(
            bench,
            finalists,
            references,
            seed=self._seed,
            folder=str((self._folder or pathlib.Path()) / "traces"),
            memory_bytes=self._target.memory_bytes,
            settings=RaceSettings(max_rounds=rounds),
            should_stop=lambda: self._late(1.0),
            on_progress=lambda text: self._tell(Stage.PROFILE, 0, total, text),
        )
        for name, outcome in judged.outcomes.items():
            row = self._rows[names[name]]
            row.profiled = _joined(row.profiled, outcome)
        return [names[n] for n in judged.ranking]

    def _profile_key(self, row: _Row, wave: str) -> str:
        return key_of(
            rung="profile",
            wave=wave,
            compile=self._compile_key(row),
            host=os.uname().nodename,
            devices=[str(d) for d in self._target.devices],
            seed=self._seed,
        )

    def _time_of(self, index: int) -> float:
        outcome = self._rows[index].profiled
        return outcome.median_s if isinstance(outcome, Measurement) else float("inf")

    # The end

    def _set_ranking(self, ranked: Sequence[int]) -> None:
        """Survivors of the last race first, in its order; then the others by their own times."""
        ok = [i for i in ranked if isinstance(self._rows[i].profiled, Measurement)]
        others = [i for i in self._measured() if i not in set(ok)]
        self._ranking = tuple(ok + others)

    def _rank_by_estimate(self) -> None:
        fitting = self._fitting(range(len(self._rows)))
        self._ranking = tuple(
            sorted(fitting, key=lambda i: (self._rows[i].compiled.time_s, i))  # type: ignore[union-attr]
        )

    def _fall_back(self) -> None:
        """Nothing was measured: plan by estimate, compiling until something is known to fit."""
        failed = any(isinstance(row.profiled, Failure) for row in self._rows)
        self._rank_by_estimate()
        if failed:
            bad = {i for i, row in enumerate(self._rows) if isinstance(row.profiled, Failure)}
            numerics = any(
                isinstance(f := self._rows[i].profiled, Failure) and f.kind is Kind.NUMERICS
                for i in bad
            )
            if numerics:
                self._ranking = ()
                return
            self._ranking = tuple(i for i in self._ranking if i not in bad)
        if self._ranking or not self._rows:
            return
        with self._compiler() as compiler:
            for _ in range(4):
                more = self._promoted(2, [])
                if not more:
                    return
                self._rung2(compiler, more)
                self._rank_by_estimate()
                if self._ranking:
                    return

    def _late(self, share: float) -> bool:
        limit = self._budget.seconds
        late = limit is not None and time.perf_counter() - self._start > share * limit
        if late and share == 1.0:
            self._ended = "out of time"
        return late

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._elapsed[name] = self._elapsed.get(name, 0.0) + time.perf_counter() - start

    def _tell(self, stage: Stage, done: int, total: int, text: str) -> None:
        measured = self._measured()
        best = self._time_of(measured[0]) if measured else None
        if best is None:
            times = [
                row.propagated.time_s
                for row in self._rows[-200:]
                if isinstance(row.propagated, Estimate)
            ]
            best = min(times, default=None)
        event = Event(stage=stage, done=done, total=total, text=text, best_s=best)
        for callback in self._callbacks:
            callback(event)


def _joined(
    earlier: Measurement | Failure | None, later: Measurement | Failure
) -> Measurement | Failure:
    """Samples of two races of one program, kept together; a later failure stands."""
    if not isinstance(earlier, Measurement) or not isinstance(later, Measurement):
        return later
    offset = max(earlier.rounds, default=-1) + 1
    return dataclasses.replace(
        later,
        samples_s=earlier.samples_s + later.samples_s,
        rounds=earlier.rounds + tuple(r + offset for r in later.rounds),
        devices=later.devices or earlier.devices,
        trace=later.trace or earlier.trace,
        elapsed_s=earlier.elapsed_s + later.elapsed_s,
    )
