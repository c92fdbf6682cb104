"""Rung 3 of a search: finalists raced on the devices, in a child process where they are CPUs."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

from autoshard.driver.ledger import Ledger, Row
from autoshard.lowering import lower_unsharded
from autoshard.module import Module
from autoshard.rungs import profile
from autoshard.rungs.bench import Bench, Benches
from autoshard.rungs.bench_client import ChildBench
from autoshard.rungs.checking import Finalist
from autoshard.rungs.inputs import Inputs, make_inputs
from autoshard.rungs.race import Footprint, RaceSettings
from autoshard.trial import Estimate, Failure, Kind, Measurement, Outcome, Stage

_BATCHES = 2
_APART = 1 << 20
"""Between the rounds of groups that are raced apart: their samples must not pair up."""


@contextlib.contextmanager
def opened_bench(ledger: Ledger) -> Iterator[Benches]:
    """What measures: this process for accelerators, a child that can be killed for CPUs."""
    if ledger.target.platform != "cpu":
        yield Bench(ledger.target.placed)
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

        def note_of(row: Row) -> dict[str, object]:
            return {"wave": wave, "inputs": inputs.digest, **ledger.note("profile", row)}

        references: dict[str, Module] = {}
        finalists: list[Finalist] = []
        names: dict[str, int] = {}
        here = ledger.target.platform != "cpu"  # what takes a process down takes down this one
        for i in group:
            row = ledger.rows[i]
            if here and ledger.journal.attempts(keys[i]) > 1:
                row.profiled = _crashed()
                ledger.journal.add(keys[i], row.profiled, note_of(row))
                continue
            module = ledger.module_of(row)
            compiled = row.compiled
            assert isinstance(module, Module) and isinstance(compiled, Estimate)
            reference = f"reference {row.subject}"
            if reference not in references:
                subject = ledger.subject_of(row)
                references[reference] = lower_unsharded(subject.analysis.program, ledger.target)
            name = self._name(i)
            names[name] = i
            checked = row.profiled if isinstance(row.profiled, Measurement) else None
            finalists.append(
                Finalist(
                    name=name,
                    module=module,
                    footprint=footprint(module, compiled.peak_memory_bytes),
                    reference=reference,
                    checked=checked,
                    traced=wave == "final",
                )
            )
            if not here:
                ledger.journal.started(keys[i], note_of(row))
        total = len(finalists)

        @contextlib.contextmanager
        def touching(running: Sequence[str]) -> Iterator[None]:
            for name in running:
                ledger.journal.started(keys[names[name]], note_of(ledger.rows[names[name]]))
            try:
                yield
            finally:
                for name in running:
                    if ledger.journal.attempts(keys[names[name]]):
                        ledger.journal.withdrawn(keys[names[name]])

        def failed(name: str, failure: Failure) -> None:
            row = ledger.rows[names[name]]
            row.profiled = failure
            ledger.journal.add(keys[names[name]], failure, note_of(row))

        needed = {f.reference for f in finalists if f.checked is None}
        judged = profile.judge(
            bench,
            finalists,
            {name: module for name, module in references.items() if name in needed},
            seed=ledger.seed,
            folder=str(ledger.folder / "traces"),
            memory_bytes=ledger.target.memory_bytes,
            settings=RaceSettings(max_rounds=rounds),
            should_stop=lambda: ledger.late(share),
            touching=touching if here else contextlib.nullcontext,
            on_progress=lambda done, text: ledger.tell(Stage.PROFILE, done, total, text),
            on_failure=failed,
        )
        records: list[tuple[str, Outcome, dict[str, object]]] = []
        for name, outcome in judged.outcomes.items():
            if isinstance(outcome, Failure):
                continue
            row = ledger.rows[names[name]]
            row.profiled = _joined(row.profiled, outcome, first_round)
            note = note_of(row)
            if name in judged.ranking:
                note["place"] = judged.ranking.index(name)
            records.append((keys[names[name]], row.profiled, note))
        ledger.journal.add_all(records)
        return [names[n] for n in judged.ranking]

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
        known = self._ledger.journal.note(key).get("inputs")
        return failure.kind is not Kind.NUMERICS or known == self._inputs_of(row).digest

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


def _joined(
    earlier: Measurement | Failure | None, later: Measurement, first_round: int
) -> Measurement:
    """Samples of all races of one program, kept together."""
    later = dataclasses.replace(later, rounds=tuple(first_round + r for r in later.rounds))
    if not isinstance(earlier, Measurement):
        return later
    return dataclasses.replace(
        later,
        samples_s=earlier.samples_s + later.samples_s,
        rounds=earlier.rounds + later.rounds,
        devices=later.devices or earlier.devices,
        trace=later.trace or earlier.trace,
        elapsed_s=earlier.elapsed_s + later.elapsed_s,
    )


def footprint(module: Module, peak_bytes: int) -> Footprint:
    """What a program takes that is raced; the compiler's peak is that of one step and batch."""
    running = peak_bytes - module.held_bytes(1)
    return Footprint(held=module.held_bytes(_BATCHES), running=max(0, running))


def _crashed() -> Failure:
    return Failure(
        stage=Stage.PROFILE,
        kind=Kind.CRASH,
        message="the process died twice while measuring this program",
    )
