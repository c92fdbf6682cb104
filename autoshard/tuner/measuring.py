"""Rung 3 of a search: finalists raced on the devices, in a child process where they are CPUs."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from autoshard.compat.xla.threads import threads_asked
from autoshard.compat.xla.versions import versions
from autoshard.errors import WorkerError
from autoshard.lowering.lower import lower_unsharded
from autoshard.records.module import Module
from autoshard.records.trial import (
    Estimate,
    Failure,
    Kind,
    Measurement,
    Stage,
    Trial,
    relative_time,
)
from autoshard.rungs.profile import numerics, profile
from autoshard.rungs.profile.checking import Finalist, Touching
from autoshard.rungs.profile.inputs import Inputs, make_inputs
from autoshard.rungs.profile.race import INTERRUPTED, Footprint, RaceSettings
from autoshard.rungs.profile.runner import LocalRunner, Runner, runs_ahead
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.target.host import cores
from autoshard.tuner.journal import key_of
from autoshard.tuner.race_records import RaceRecords, trace_key, with_trace
from autoshard.tuner.state import SearchState

_BATCHES = 2

PROTOCOL = 1
"""The race's protocol: rounds, order, warm-up, how a sample is timed. Another one measures anew."""

_APART = 1 << 20
"""Between the rounds of groups that are raced apart: their samples must not pair up."""


@contextlib.contextmanager
def opened_runner(state: SearchState) -> Iterator[Runner]:
    """What measures: this process for accelerators, a child that can be killed for CPUs."""
    if state.target.platform != "cpu":
        yield LocalRunner(state.target.placed, state.executables)
        return
    child = ChildRunner(
        state.settings("measure"),
        time_limit_s=state.budget.measure_seconds,
        executables=state.executables,
    )
    try:
        yield child
    finally:
        child.close()


class Measuring:
    """Measures trials of a state in waves.

    Attributes:
      ranking: trials that may be planned, best first: the fastest of the last race, then the others
        by `trial.relative_time` to it.
    """

    def __init__(self, state: SearchState, compiled_by: Mapping[str, object]):
        self.ranking: tuple[int, ...] = ()
        self._asked: set[int] = set()
        self._state = state
        self._compiled_by = compiled_by
        self._inputs: dict[int, Inputs] = {}

    @property
    def left(self) -> list[int]:
        """Trials that were to be measured, and were neither that nor failed."""
        return [i for i in sorted(self._asked) if self._state.trials[i].profiled is None]

    def measure(
        self,
        bench: Runner,
        indices: Sequence[int],
        wave: str,
        rounds: int,
        first_round: int,
        share: float,
    ) -> None:
        """Races trials against each other, unless the journal holds the wave.

        A wave is recorded in one write; failures are recorded as they happen, and who failed is not
        tried again, unless it computed something else from other values.

        Args:
          wave: name of the wave, part of the journal's keys.
          rounds: the most rounds.
          first_round: number of the wave's first round; samples of one round pair up.
          share: part of the budget's seconds after which the race stops.
        """
        state = self._state
        if not indices:
            return
        self._asked.update(indices)
        keys = {i: self._key(state.trials[i], wave) for i in indices}
        races: list[list[int]] = []
        # Programs with one kind of state and batch start from the same values.
        groups: dict[object, list[int]] = {}
        for i in indices:
            program = state.problem_of(state.trials[i]).analysis.program
            groups.setdefault((program.state, program.state_tree, program.batch), []).append(i)
        for group in groups.values():
            more = self._about([keys[i] for i in group], self._inputs_of(state.trials[group[0]]))
            more |= {"wave": wave, "rounds": rounds}
            open_ = []
            for i in group:
                failure = state.journal.find(keys[i])
                if isinstance(failure, Failure) and self._stands(failure, keys[i], more):
                    state.trials[i].profiled = failure
                else:
                    open_.append(i)
            if not open_:
                continue
            if (raced := self._raced_before(open_, keys, more, share)) is not None:
                races.append(self._replayed(raced, keys))
            else:
                first = first_round + _APART * state.trials[group[0]].problem
                races.append(self._race(bench, open_, rounds, first, share, keys, more))
        # Times of different races say little: the fastest of one of them comes first.
        races.sort(key=lambda race: state.time_of(race[0]) if race else float("inf"))
        self._rank([i for race in races for i in race])

    def _race(
        self,
        bench: Runner,
        group: list[int],
        rounds: int,
        first_round: int,
        share: float,
        keys: dict[int, str],
        more: Mapping[str, object],
    ) -> list[int]:
        """Races a group, and traces those of the final wave; returns the ranking.

        Args:
          more: what the journal says beside each record.
        """
        state = self._state
        if state.stops("measuring", 1.0):
            return []
        names = {self._name(i): i for i in group}
        by_name = {name: keys[i] for name, i in names.items()}
        by_name |= {self._reference(i): self._reference_key(state.trials[i]) for i in group}
        trials = {name: state.trials[i] for name, i in names.items()}
        records = RaceRecords(state, trials, by_name, more)
        try:
            return self._raced(bench, names, records, rounds, first_round, share)
        except WorkerError as error:  # that says nothing of the programs
            state.notes.append(f"not measured: {str(error)[:500]}")
            return []

    def _raced(
        self,
        bench: Runner,
        names: Mapping[str, int],
        records: RaceRecords,
        rounds: int,
        first_round: int,
        share: float,
    ) -> list[int]:
        """The same, of trials by the names that they race under.

        Raises:
          WorkerError: no process can be started to measure in.
        """
        state = self._state
        inputs = self._inputs_of(state.trials[next(iter(names.values()))])
        failure = bench.set_inputs(inputs.init, inputs.batches)
        if failure is not None:  # that says nothing of the programs
            state.notes.append(
                f"not measured: the initial state cannot be made unsharded: {failure.message[:500]}"
            )
            return []
        here = state.target.platform != "cpu"  # what takes a process down takes down this one
        racing = [name for name in names if not (here and records.died_twice(name))]
        finalists = [self._finalist(name, names[name]) for name in racing]
        references: dict[str, Module | Failure] = {
            name: (records.died_twice(name) if here else None) or module
            for name, module in self._references(finalists, [names[n] for n in racing]).items()
        }
        if not here:
            records.started(racing)
        touching: Touching = records.touching if here else contextlib.nullcontext
        judged = profile.judge(
            bench,
            finalists,
            references,
            seed=state.seed,
            memory_bytes=state.target.memory_bytes,
            settings=RaceSettings(max_rounds=rounds),
            should_stop=lambda: state.stops("measuring", share),
            touching=touching,
            on_progress=lambda done, text: state.tell(Stage.PROFILE, done, len(racing), text),
            on_failure=records.failed,
        )
        records.measured(judged, first_round)
        state.notes += judged.notes
        ranked = [names[n] for n in judged.ranking]
        self._rank(ranked)  # whatever interrupts what follows, this is known
        if judged.why_it_ended == INTERRUPTED:
            raise KeyboardInterrupt
        if judged.cut_short and judged.why_it_ended != "stopped":
            state.notes.append(f"measuring ended early: {judged.why_it_ended[:500]}")
        state.tell(Stage.PROFILE, len(judged.outcomes), len(racing), "measured")
        if records.final:
            by_name = {finalist.name: finalist for finalist in finalists}
            self._trace(bench, [by_name[n] for n in judged.ranking], records, touching, share)
        return ranked

    def _trace(
        self,
        bench: Runner,
        measured: Sequence[Finalist],
        records: RaceRecords,
        touching: Touching,
        share: float,
    ) -> None:
        """Traces the first in any case, the others as long as there is time."""
        state = self._state
        for number, finalist in enumerate(measured):
            if number and state.stops("tracing", share):
                return
            state.tell(Stage.PROFILE, number, len(measured), f"tracing {finalist.name}")
            try:
                with touching([finalist.name]):
                    found = profile.traced(bench, finalist, state.folder_of("traces"))
            except WorkerError as error:
                state.notes.append(f"not traced: {str(error)[:500]}")
                return
            if any(found):
                records.traced(finalist.name, *found)

    def _finalist(self, name: str, index: int) -> Finalist:
        trial = self._state.trials[index]
        module, compiled = self._state.module_of(trial), trial.compiled
        assert isinstance(module, Module) and isinstance(compiled, Estimate)
        return Finalist(
            name=name,
            module=module,
            footprint=footprint(module, compiled.peak_memory_bytes),
            reference=self._reference(index),
            checked=trial.profiled if isinstance(trial.profiled, Measurement) else None,
        )

    def _references(
        self, finalists: Sequence[Finalist], indices: Sequence[int]
    ) -> dict[str, Module]:
        """The unsharded step of the knobs of each finalist that is not checked yet."""
        state = self._state
        found: dict[str, Module] = {}
        for finalist, index in zip(finalists, indices, strict=True):
            if finalist.checked is None and finalist.reference not in found:
                program = state.problem_of(state.trials[index]).analysis.program
                found[finalist.reference] = lower_unsharded(program, state.target)
        return found

    def _replayed(self, raced: dict[int, Measurement], keys: dict[int, str]) -> list[int]:
        """Takes over a race that the journal holds; returns its ranking."""
        for i, measured in raced.items():
            trace = self._state.journal.find(trace_key(keys[i]))
            if isinstance(trace, Measurement):
                measured = with_trace(measured, trace)
            self._state.trials[i].profiled = measured

        def place(i: int) -> tuple[float, float]:
            place = self._state.journal.note(keys[i]).get("place")
            return (place if isinstance(place, int) else float("inf"), self._state.time_of(i))

        return sorted(raced, key=place)

    def _name(self, index: int) -> str:
        return f"{self._state.trials[index].baseline or 'candidate'} {index}"

    def _reference(self, index: int) -> str:
        """The name of the unsharded step of a trial's knobs."""
        return f"reference {self._state.trials[index].problem}"

    def _reference_key(self, trial: Trial) -> str:
        """The journal's key of a run of the unsharded step of a trial's knobs."""
        state = self._state
        return key_of(
            rung="reference",
            program=state.problem_of(trial).analysis.digest,
            devices=[str(d) for d in state.target.devices],
            host=os.uname().nodename,
            versions=versions(),
        )

    def _key(self, trial: Trial, wave: str) -> str:
        state = self._state
        threads = threads_asked() if state.target.platform == "cpu" else 0
        workload = state.problem_of(trial).analysis.program.workload
        assert trial.digest, "what is measured was lowered, here or by an earlier search"
        return key_of(
            rung="profile",
            protocol=PROTOCOL,
            program=trial.digest,
            compiled_by=self._compiled_by,
            versions=versions(),
            wave=wave,
            host=os.uname().nodename,
            cores=cores(),
            devices=[str(d) for d in state.target.devices],
            seed=state.seed,
            init=self._inputs_of(trial).start_digest,
            synthetic=workload.sample is None,
            ahead=runs_ahead(state.target.platform),
            threads=threads,
        )

    def _about(self, keys: Sequence[str], inputs: Inputs) -> dict[str, object]:
        """What the journal says of a race beside what came of it: who ran, from what, how."""
        return {
            "racing": key_of(racing=sorted(keys)),
            "inputs": inputs.digest,
            "numerics": numerics.REVISION,
            "limit_s": self._state.budget.measure_seconds,
        }

    def _stands(self, failure: Failure, key: str, more: Mapping[str, object]) -> bool:
        """Whether a recorded failure says something of today's race too.

        What took too long may have longer today. Numerics are another matter with other batches;
        and where the unsharded step did not run, which may have longer too, they depend on which
        others there are.
        """
        limit_s = self._state.budget.measure_seconds
        if failure.kind is Kind.TIMEOUT:
            return failure.elapsed_s >= limit_s
        if failure.kind is not Kind.NUMERICS:
            return True
        note = self._state.journal.note(key)
        had_s = note.get("limit_s")
        longer = not isinstance(had_s, (int, float)) or had_s < limit_s
        return not longer and all(note.get(k) == more[k] for k in ("racing", "inputs", "numerics"))

    def _raced_before(
        self,
        group: Sequence[int],
        keys: Mapping[int, str],
        more: Mapping[str, object],
        share: float,
    ) -> dict[int, Measurement] | None:
        """What the journal holds of a race of just these; None where it holds no such one.

        One that was cut short is raced again, as long as there is time.
        """
        journal = self._state.journal
        found = {i: one for i in group if isinstance(one := journal.find(keys[i]), Measurement)}
        notes = [journal.note(keys[i]) for i in group]
        same = ("racing", "inputs", "numerics", "rounds")
        if len(found) < len(group) or any(note.get(k) != more[k] for note in notes for k in same):
            return None
        if any(note.get("cut_short") for note in notes) and not self._state.stops(
            "measuring", share
        ):
            return None
        return found

    def _inputs_of(self, trial: Trial) -> Inputs:
        """What the programs of a trial's knobs start from, made once."""
        if trial.problem not in self._inputs:
            state = self._state
            program = state.problem_of(trial).analysis.program
            self._inputs[trial.problem] = make_inputs(program, state.target, state.seed, _BATCHES)
        return self._inputs[trial.problem]

    def _rank(self, ranked: Sequence[int]) -> None:
        """Ranks all that is measured: the race's fastest first, the others by their times to it."""
        trials = self._state.trials
        measured = {
            i: found
            for i in (*ranked, *self.ranking, *self._state.measured())
            if isinstance(found := trials[i].profiled, Measurement)
        }
        fastest = next(iter(measured.values()), None)

        def behind(i: int) -> float:
            return relative_time(fastest, measured[i]) if fastest else 1.0

        self.ranking = tuple(sorted(measured, key=behind))


def footprint(module: Module, peak_bytes: int) -> Footprint:
    """What a program takes that is raced; the compiler's peak is that of one step and batch."""
    running = peak_bytes - module.held_bytes(1)
    return Footprint(held=module.held_bytes(_BATCHES), running=max(0, running))
