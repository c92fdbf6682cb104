"""What the journal is told of one race: what began, failed, was left, and was measured."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from autoshard.records.trial import Failure, Kind, Measurement, Outcome, Stage, Trial
from autoshard.rungs.profile.profile import PartitionedProgram, Profiles
from autoshard.tuner.journal import key_of
from autoshard.tuner.state import SearchState


class RaceRecords:
    """Writes to the journal, and to the trials, as finalists are judged.

    Args:
      trials: by name of the finalist.
      keys: the journal's, of each finalist's measurement and of each unsharded step's run, by name.
      more: what every line says beside the trial.
    """

    def __init__(
        self,
        state: SearchState,
        trials: Mapping[str, Trial],
        keys: Mapping[str, str],
        more: Mapping[str, object],
    ):
        self._state = state
        self._trials = trials
        self._keys = keys
        self._more = more

    @property
    def final(self) -> bool:
        """Whether it is the last race, whose programs are traced."""
        return self._more.get("wave") == "final"

    def _note(self, name: str) -> dict[str, object]:
        trial = self._trials.get(name)
        if trial is None:  # an unsharded step
            return {**self._more, "rung": "profile", "baseline": name}
        return {**self._more, **self._state.note("profile", trial)}

    def started(self, names: Sequence[str]) -> None:
        """Programs begin to run that may take the process down."""
        for name in names:
            self._state.journal.started(self._keys[name], self._note(name))

    def touching(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """They run inside."""
        return self._state.journal.attempted({self._keys[n]: self._note(n) for n in names})

    def died_twice(self, name: str) -> Failure | None:
        """The crash, recorded, if the process died in the midst of it twice; else None."""
        found = self._state.journal.find(self._keys[name])
        if name not in self._trials and isinstance(found, Failure):
            return found
        if self._state.journal.attempts(self._keys[name]) < 2:
            return None
        message = "the process died twice while measuring this program"
        failure = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message=message)
        self.failed(name, failure)
        return failure

    def failed(self, name: str, failure: Failure) -> None:
        """Recorded at once."""
        if name in self._trials:
            self._trials[name].profiled = failure
        self._state.journal.add(self._keys[name], failure, self._note(name))

    def measured(self, judged: PartitionedProgram, first_round: int) -> None:
        """Recorded in one write, with their places in the ranking.

        Args:
          first_round: number of the race's first round.
        """
        records: list[tuple[str, Outcome, dict[str, object]]] = []
        for name, outcome in judged.outcomes.items():
            if isinstance(outcome, Failure):
                continue
            trial, note = self._trials[name], self._note(name)
            trial.profiled = _joined(trial.profiled, outcome, first_round)
            if name in judged.ranking:
                note["place"] = judged.ranking.index(name)
            if judged.cut_short:
                note["cut_short"] = judged.why_it_ended
            records.append((self._keys[name], trial.profiled, note))
        self._state.journal.add_all(records)

    def traced(self, name: str, devices: Profiles, trace: str) -> None:
        """Recorded beside the measurement, which stands without it."""
        trial = self._trials[name]
        found = Measurement(samples_s=(), rounds=(), devices=devices, trace=trace)
        assert isinstance(trial.profiled, Measurement)
        trial.profiled = with_trace(trial.profiled, found)
        note = {**self._note(name), "rung": "trace"}
        self._state.journal.add(trace_key(self._keys[name]), found, note)


def trace_key(key: str) -> str:
    """The journal's key of a trace, from that of the measurement."""
    return key_of(trace_of=key)


def with_trace(measured: Measurement, trace: Measurement) -> Measurement:
    """A measurement with what was recorded of its trace."""
    return dataclasses.replace(measured, devices=trace.devices, trace=trace.trace)


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
