"""Rung 3: finalists raced on the devices, traced, and checked against the unsharded step."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from autoshard.module import Module
from autoshard.rungs.bench import Benches
from autoshard.rungs.race import Footprint, RaceSettings, race
from autoshard.rungs.traces import read_trace
from autoshard.trial import DeviceProfile, Failure, Measurement

_TRACED_STEPS = 2
_LEAST_ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A candidate that is measured.

    Attributes:
      name: distinct among the finalists.
      module: the program that will run.
      footprint: what it takes on a device, loaded and running.
      reference: name of the unsharded program of the same knobs, "" to leave numerics unchecked.
      checked: an earlier measurement whose numerics check stands, None if there is none.
      traced: whether the profiler runs on it once it has been measured.
    """

    name: str
    module: Module
    footprint: Footprint
    reference: str
    checked: Measurement | None
    traced: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What rung 3 says of the finalists.

    Attributes:
      outcomes: name -> measurement or failure; those the budget left no time for are left out.
      ranking: names of those that may win, best first.
      why_it_ended: from the race.
    """

    outcomes: Mapping[str, Measurement | Failure]
    ranking: tuple[str, ...]
    why_it_ended: str


def judge(
    bench: Benches,
    finalists: Sequence[Finalist],
    references: Mapping[str, Module],
    *,
    seed: int,
    folder: str,
    memory_bytes: int,
    settings: RaceSettings,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, str], None] = lambda done, text: None,
    on_failure: Callable[[str, Failure], None] = lambda name, failure: None,
) -> Judged:
    """Checks each finalist's numerics, races those that pass, traces those that are to be traced.

    A finalist whose reference cannot run (it does not fit) is compared with the first finalist
    that ran: `numerics` then says "relative".

    Args:
      on_failure: told of each failure at once, so that an interrupt later does not lose it.
    """
    start = {f.name: time.perf_counter() for f in finalists}
    by_name = {f.name: f for f in finalists}
    outcomes: dict[str, Measurement | Failure] = {}
    checked: dict[str, tuple[str, float | None, str]] = {}
    usable: dict[str, str] = {}
    for name, module in references.items():
        on_progress(0, "loading the unsharded step")
        loaded = bench.load(name, module)
        usable[name] = name if not isinstance(loaded, Failure) else ""
    for finalist in finalists:
        if should_stop() and checked:
            break
        if (earlier := finalist.checked) is not None:
            checked[finalist.name] = (
                earlier.numerics,
                earlier.numerics_error,
                earlier.numerics_where,
            )
            continue
        on_progress(len(checked) + len(outcomes), f"checking the numerics of {finalist.name}")
        failed: Failure | None = None
        loaded = bench.load(finalist.name, finalist.module)
        reference = usable.get(finalist.reference, "")
        kind = "exact"
        if not reference and finalist.reference:
            kind = "relative"
            reference = next((n for n in checked if _loads(bench, by_name[n])), "")
        if isinstance(loaded, Failure):
            failed = loaded
        elif not reference:
            checked[finalist.name] = ("unchecked", None, "")
        else:
            report = bench.numerics(finalist.name, reference)
            worst = None if isinstance(report, Failure) else report.worst
            elapsed_s = time.perf_counter() - start[finalist.name]
            failed = report if isinstance(report, Failure) else report.failure(elapsed_s)
            if failed is None:
                checked[finalist.name] = (
                    kind,
                    worst.error if worst else 0.0,
                    worst.path if worst else "",
                )
                if checked.get(reference, ("",))[0] == "unchecked":
                    checked[reference] = checked[finalist.name]  # they agree: both are checked
        if failed is not None:
            outcomes[finalist.name] = failed
            on_failure(finalist.name, failed)
        bench.unload(finalist.name)
        if kind == "relative" and reference:
            bench.unload(reference)
    for name in references:
        bench.unload(name)
    racing = [f for f in finalists if f.name in checked]
    on_progress(0, f"racing {len(racing)} programs")
    asked = 0

    def stop() -> bool:
        """Who passed the check runs two rounds at least: there is something to plan by."""
        nonlocal asked
        asked += 1
        return asked > _LEAST_ROUNDS and should_stop()

    result = race(
        [f.name for f in racing],
        bench.run,
        seed=seed,
        settings=settings,
        should_stop=stop,
        load=lambda name: bench.load(name, by_name[name].module),
        unload=bench.unload,
        renew=bench.renew,
        footprints={f.name: f.footprint for f in racing},
        memory_bytes=memory_bytes,
    )
    for runner in result.runners:
        if runner.failure is not None:
            outcomes[runner.name] = runner.failure
            on_failure(runner.name, runner.failure)
        if not runner.samples_s or runner.failure is not None:
            continue
        kind, error, where = checked[runner.name]
        devices: tuple[DeviceProfile, ...] = ()
        trace = ""
        best = runner.name == result.winner
        if by_name[runner.name].traced and (best or not should_stop()):
            on_progress(len(outcomes), f"tracing {runner.name}")
            bench.load(runner.name, by_name[runner.name].module)
            devices, trace = _trace(bench, runner.name, folder)
        outcomes[runner.name] = Measurement(
            samples_s=runner.samples_s,
            rounds=runner.rounds,
            devices=devices,
            numerics=kind,
            numerics_error=error,
            numerics_where=where,
            trace=trace,
            elapsed_s=time.perf_counter() - start[runner.name],
        )
    for finalist in finalists:
        bench.unload(finalist.name)
    on_progress(len(outcomes), "measured")
    ranking = tuple(n for n in result.ranking if isinstance(outcomes.get(n), Measurement))
    return Judged(outcomes=outcomes, ranking=ranking, why_it_ended=result.ended)


def _loads(bench: Benches, finalist: Finalist) -> bool:
    return not isinstance(bench.load(finalist.name, finalist.module), Failure)


def _trace(bench: Benches, name: str, folder: str) -> tuple[tuple[DeviceProfile, ...], str]:
    where = pathlib.Path(folder) / "".join(c if c.isalnum() else "_" for c in name)
    where.mkdir(parents=True, exist_ok=True)
    traced = bench.trace(name, str(where), _TRACED_STEPS)
    if isinstance(traced, Failure):
        return (), ""
    try:
        return read_trace(traced, _TRACED_STEPS), traced
    except (FileNotFoundError, ValueError, RuntimeError):
        return (), traced  # the trace stays for other tools
