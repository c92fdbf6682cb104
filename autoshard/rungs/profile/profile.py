"""Rung 3: finalists whose numerics are right, raced on the devices; and a trace of one."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from autoshard.records.module import Module
from autoshard.records.trial import DeviceProfile, Failure, Measurement
from autoshard.rungs.profile.checking import Checking, Finalist, Touching
from autoshard.rungs.profile.race import COMPLETE, RaceSettings, race
from autoshard.rungs.profile.runner import Runner
from autoshard.rungs.profile.traces import read_trace

Profiles = tuple[DeviceProfile, ...]

_TRACED_STEPS = 2
_LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedProgram:
    """What rung 3 says of the finalists.

    Attributes:
      outcomes: name -> measurement or failure; those the budget left no time for are left out.
      ranking: names of those that may win, best first.
      why_it_ended: from the race.
      notes: what else the user should know.
    """

    outcomes: Mapping[str, Measurement | Failure]
    ranking: tuple[str, ...]
    why_it_ended: str
    notes: tuple[str, ...] = ()

    @property
    def cut_short(self) -> bool:
        """Whether the race ended before it had told what it could."""
        return self.why_it_ended not in COMPLETE


def judge(
    bench: Runner,
    finalists: Sequence[Finalist],
    references: Mapping[str, Module | Failure],
    *,
    seed: int,
    memory_bytes: int,
    settings: RaceSettings,
    should_stop: Callable[[], bool] = lambda: False,
    touching: Touching = contextlib.nullcontext,
    on_progress: Callable[[int, str], None] = lambda done, text: None,
    on_failure: Callable[[str, Failure], None] = lambda name, failure: None,
) -> PartitionedProgram:
    """Checks each finalist's numerics and races those that pass.

    Where a reference cannot run (it does not fit), the finalists of the same knobs are compared
    with each other: `numerics` then says "relative".

    Args:
      touching: entered for as long as finalists of these names run, which may take the process
        down.
      on_failure: told of each failure at once, so that an interrupt later does not lose it.
    """
    start = {f.name: time.perf_counter() for f in finalists}
    by_name = {f.name: f for f in finalists}
    checking = Checking(
        bench,
        should_stop=should_stop,
        touching=touching,
        on_progress=on_progress,
        on_failure=on_failure,
    )
    checking.check(finalists, references)
    checked = checking.passed
    outcomes: dict[str, Measurement | Failure] = dict(checking.failed)
    racing = [f for f in finalists if f.name in checked]
    on_progress(0, f"racing {len(racing)} programs")
    asked = 0

    def stop() -> bool:
        """Who passed the check runs two rounds at least: there is something to plan by."""
        nonlocal asked
        asked += 1
        return asked > _LEAST_ROUNDS and should_stop()

    def load(name: str) -> object:
        with touching([name]):
            return bench.load(name, by_name[name].module)

    def run(name: str, steps: int) -> Sequence[float] | Failure:
        with touching([name]):
            return bench.run(name, steps)

    result = race(
        [f.name for f in racing],
        run,
        seed=seed,
        settings=settings,
        should_stop=stop,
        load=load,
        unload=bench.unload,
        renew=bench.renew,
        footprints={f.name: f.footprint for f in racing},
        memory_bytes=memory_bytes,
    )
    for runner in result.contestants:
        if runner.failure is not None:
            outcomes[runner.name] = runner.failure
            on_failure(runner.name, runner.failure)
        if not runner.samples_s or runner.failure is not None:
            continue
        verdict = checked[runner.name]
        outcomes[runner.name] = Measurement(
            samples_s=runner.samples_s,
            rounds=runner.rounds,
            numerics=verdict.kind,
            numerics_error=verdict.error,
            numerics_where=verdict.where,
            numerics_allowed=verdict.allowed,
            elapsed_s=time.perf_counter() - start[runner.name],
        )
    for finalist in finalists:
        bench.unload(finalist.name)
    ranking = tuple(n for n in result.ranking if isinstance(outcomes.get(n), Measurement))
    return PartitionedProgram(
        outcomes=outcomes,
        ranking=ranking,
        why_it_ended=result.ended,
        notes=tuple(checking.notes),
    )


def traced(bench: Runner, finalist: Finalist, folder: str | None) -> tuple[Profiles, str]:
    """Runs the profiler on a finalist that was measured.

    Args:
      folder: where traces are kept; None to keep none.

    Returns:
      What each device spent, and where the trace is, "" where none is kept; (), "" where there is
      none: nothing that was measured depends on it.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="autoshard-") as scratch:
            return traced(bench, finalist, scratch)[0], ""
    name = "".join(c if c.isalnum() else "_" for c in finalist.name)
    # Another search may keep its traces there, whose programs have the same names.
    where = pathlib.Path(folder) / f"{name}_{finalist.module.digest[:8]}"
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError:
        return (), ""
    found: object = bench.load(finalist.name, finalist.module)
    if not isinstance(found, Failure):
        found = bench.trace(finalist.name, str(where), _TRACED_STEPS)
    bench.unload(finalist.name)
    if not isinstance(found, str):
        return (), ""
    try:
        return read_trace(found, _TRACED_STEPS), found
    except (FileNotFoundError, ValueError, RuntimeError):
        return (), found  # the trace stays for other tools
