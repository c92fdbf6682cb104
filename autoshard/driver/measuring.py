"""Rung 3 of a search: finalists raced on the devices, in a child process where they are CPUs."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from autoshard.driver.ledger import Ledger, Row
from autoshard.driver.race_records import RaceRecords
from autoshard.lowering import lower_unsharded
from autoshard.module import Module
from autoshard.rungs import numerics, profile
from autoshard.rungs.bench import Bench, Benches
from autoshard.rungs.bench_client import ChildBench
from autoshard.rungs.checking import Finalist
from autoshard.rungs.inputs import Inputs, make_inputs
from autoshard.rungs.race import Footprint, RaceSettings
from autoshard.trial import Estimate, Failure, Kind, Measurement, Stage

_BATCHES = 2
_APART = 1 << 20
"""Between the rounds of groups that are raced apart: their samples must not pair up."""


@contextlib.contextmanager
def opened_bench(ledger: Ledger) -> Iterator[Benches]:
    """What measures: this process for accelerators, a child that can be killed for CPUs."""
    if ledger.target.platform != "cpu":
        yield Bench(ledger.target.placed, ledger.executables)
        return
    child = ChildBench(
        ledger.settings("measure"),
        time_limit_s=ledger.budget.measure_seconds,
        executables=ledger.executables,
    )
    try:
        yield child
    finally:
        child.close()


class Measuring:
    """Measures rows of a ledger in waves.

    Attributes:
      ranking: rows that may be planned, best first: the survivors of the last race in its order,
        then the others by their own times.
    """

    def __init__(self, ledger: Ledger, compile_key: Callable[[Row], str]):
        self.ranking: tuple[int, ...] = ()
        self._ledger = ledger
        self._compile_key = compile_key
        self._inputs: dict[int, Inputs] = {}

    def measure(
        self,
        bench: Benches,
        indices: Sequence[int],
        wave: str,
        rounds: int,
        first_round: int,
        share: float,
    ) -> None:
        """Races rows against each other, unless the journal holds the wave.

        A wave is recorded in one write; failures are recorded as they happen, and who failed is not
        tried again, unless it computed something else from other values.

        Args:
          wave: name of the wave, part of the journal's keys.
          rounds: the most rounds.
          first_round: number of the wave's first round; samples of one round pair up.
          share: part of the budget's seconds after which the race stops.
        """
        ledger = self._ledger
        if not indices:
            return
        keys = {i: self._key(ledger.rows[i], wave) for i in indices}
        found = {i: ledger.journal.find(key) for i, key in keys.items()}
        ranked: list[int] = []
        # Programs with one kind of state and batch start from the same values.
        groups: dict[object, list[int]] = {}
        for i in indices:
            failure = found[i]
            if isinstance(failure, Failure) and self._stands(failure, ledger.rows[i], keys[i]):
                ledger.rows[i].profiled = failure
                continue
            program = ledger.subject_of(ledger.rows[i]).analysis.program
            groups.setdefault((program.state, program.state_tree, program.batch), []).append(i)
        for group in groups.values():
            raced = {i: f for i in group if isinstance(f := found[i], Measurement)}
            if len(raced) == len(group):
                ranked += self._replayed(raced, keys)
            else:
                first = first_round + _APART * ledger.rows[group[0]].subject
                ranked += self._race(bench, group, wave, rounds, first, share, keys)
        if len(groups) > 1:
            ranked.sort(key=ledger.time_of)
        self._rank(ranked)

    def _race(
        self,
        bench: Benches,
        group: list[int],
        wave: str,
        rounds: int,
        first_round: int,
        share: float,
        keys: dict[int, str],
    ) -> list[int]:
        ledger = self._ledger
        if ledger.late(1.0):
            return []
        inputs = self._inputs_of(ledger.rows[group[0]])
        failure = bench.set_inputs(inputs.init, inputs.batches)
        if failure is not None:  # that says nothing of the programs
            ledger.notes.append(
                f"not measured: the initial state cannot be made unsharded: {failure.message[:500]}"
            )
            return []

        names = {self._name(i): i for i in group}
        records = RaceRecords(
            ledger,
            {name: ledger.rows[i] for name, i in names.items()},
            {name: keys[i] for name, i in names.items()},
            {"wave": wave, "inputs": inputs.digest, "numerics": numerics.REVISION},
        )
        here = ledger.target.platform != "cpu"  # what takes a process down takes down this one
        racing = [name for name in names if not (here and records.died_twice(name))]
        finalists = [self._finalist(name, names[name], wave) for name in racing]
        if not here:
            records.started(racing)
        judged = profile.judge(
            bench,
            finalists,
            self._references(finalists, [names[name] for name in racing]),
            seed=ledger.seed,
            folder=str(ledger.folder / "traces"),
            memory_bytes=ledger.target.memory_bytes,
            settings=RaceSettings(max_rounds=rounds),
            should_stop=lambda: ledger.late(share),
            touching=records.touching if here else contextlib.nullcontext,
            on_progress=lambda done, text: ledger.tell(Stage.PROFILE, done, len(racing), text),
            on_failure=records.failed,
        )
        records.measured(judged, first_round)
        return [names[n] for n in judged.ranking]

    def _finalist(self, name: str, index: int, wave: str) -> Finalist:
        row = self._ledger.rows[index]
        module, compiled = self._ledger.module_of(row), row.compiled
        assert isinstance(module, Module) and isinstance(compiled, Estimate)
        return Finalist(
            name=name,
            module=module,
            footprint=footprint(module, compiled.peak_memory_bytes),
            reference=f"reference {row.subject}",
            checked=row.profiled if isinstance(row.profiled, Measurement) else None,
            traced=wave == "final",
        )

    def _references(
        self, finalists: Sequence[Finalist], indices: Sequence[int]
    ) -> dict[str, Module]:
        """The unsharded step of the knobs of each finalist that is not checked yet."""
        ledger = self._ledger
        found: dict[str, Module] = {}
        for finalist, index in zip(finalists, indices, strict=True):
            if finalist.checked is None and finalist.reference not in found:
                program = ledger.subject_of(ledger.rows[index]).analysis.program
                found[finalist.reference] = lower_unsharded(program, ledger.target)
        return found

    def _replayed(self, raced: dict[int, Measurement], keys: dict[int, str]) -> list[int]:
        """Takes over a race that the journal holds; returns its ranking."""
        for i, measured in raced.items():
            self._ledger.rows[i].profiled = measured

        def place(i: int) -> tuple[float, float]:
            place = self._ledger.journal.note(keys[i]).get("place")
            return (place if isinstance(place, int) else float("inf"), self._ledger.time_of(i))

        return sorted(raced, key=place)

    def _name(self, index: int) -> str:
        return f"{self._ledger.rows[index].baseline or 'candidate'} {index}"

    def _key(self, row: Row, wave: str) -> str:
        ledger = self._ledger
        workload = ledger.subject_of(row).analysis.program.workload
        return ledger.key(
            "profile",
            ledger.subject_of(row),
            row.candidate,
            wave=wave,
            compiled=self._compile_key(row),
            host=os.uname().nodename,
            devices=[str(d) for d in ledger.target.devices],
            seed=ledger.seed,
            init=self._inputs_of(row).init.digest,
            synthetic=workload.sample is None,
        )

    def _stands(self, failure: Failure, row: Row, key: str) -> bool:
        """Whether a recorded failure says something of today's batches too."""
        if failure.kind is not Kind.NUMERICS:
            return True
        note = self._ledger.journal.note(key)
        same = note.get("numerics") == numerics.REVISION
        return same and note.get("inputs") == self._inputs_of(row).digest

    def _inputs_of(self, row: Row) -> Inputs:
        """What the programs of a row's knobs start from, made once."""
        if row.subject not in self._inputs:
            ledger = self._ledger
            program = ledger.subject_of(row).analysis.program
            self._inputs[row.subject] = make_inputs(program, ledger.target, ledger.seed, _BATCHES)
        return self._inputs[row.subject]

    def _rank(self, ranked: Sequence[int]) -> None:
        ok = [i for i in ranked if isinstance(self._ledger.rows[i].profiled, Measurement)]
        self.ranking = (*ok, *(i for i in self._ledger.measured() if i not in set(ok)))


def footprint(module: Module, peak_bytes: int) -> Footprint:
    """What a program takes that is raced; the compiler's peak is that of one step and batch."""
    running = peak_bytes - module.held_bytes(1)
    return Footprint(held=module.held_bytes(_BATCHES), running=max(0, running))
