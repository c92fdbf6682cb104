"""The programs of a sample, ready to run: chosen anew, or those that were chosen before."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.errors import PlanError
from autoshard.plan.file import PlanRecord, differences
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Stage
from autoshard.rungs.compile.store import is_kept
from autoshard.rungs.profile.calibration import REVISION as CALIBRATION_REVISION
from autoshard.rungs.profile.calibration import calibrate
from autoshard.rungs.profile.inputs import make_inputs
from autoshard.rungs.profile.race import Runner
from autoshard.rungs.profile.runner import Runner
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.target.cost import CostModel
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.journal import Journal
from autoshard.tuner.state import Row, SearchState
from experiments.fidelity_parts import sampling, timing
from experiments.fidelity_parts.program_json import program_to_json
from experiments.fidelity_parts.reopening import OtherProgramsError, reopened
from experiments.fidelity_parts.store import Case, Store, Task, is_from_here, is_same_plan

BATCHES = 2
"""Different ones that a program runs on in turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long is measured.

    Attributes:
      rounds: in which every program runs once; two halves of them should rank alike.
      pair_limit_s: step time spent on fresh pairs of the plan with each of its rivals in the first
        process; in each further one a quarter of that.
      call_limit_s: of one call of the bench, whose child is killed then.
      draws: of the calibration; see `calibrate`.
    """

    rounds: int = 16
    pair_limit_s: float = 240.0
    call_limit_s: float = 300.0
    draws: int = 15
    size: sampling.Size = dataclasses.field(default_factory=sampling.Size)

    def to_json(self) -> dict[str, Any]:
        """As results hold them: what decides on figures, not when a child is given up."""
        every = dataclasses.asdict(self)
        return {name: every[name] for name in ("rounds", "pair_limit_s", "draws", "size")}


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A sample whose programs can be run.

    Attributes:
      figures: as the result holds them.
      rows: of the ledger, by the programs' names; those that cannot run may be missing.
    """

    figures: dict[str, Any]
    ledger: SearchState
    rows: Mapping[str, Row]

    def module_of(self, name: str) -> Module:
        """A program to load; `timing.MeasuringError` where it cannot be lowered."""
        return _module(self.ledger, self.rows[name])


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """Chooses a sample's programs, or opens those that were chosen before.

    Attributes:
      options: the seed, the budget and the callbacks of a ledger.
      executables: a folder for what is compiled, and for what was when the sample was stopped.
    """

    task: Task
    case: Case
    store: Store
    settings: Settings
    options: Mapping[str, Any]
    executables: pathlib.Path

    def anew(self, record: PlanRecord, figures: dict[str, Any]) -> Opened:
        """Calibrates, chooses the programs, compiles them and tries each out.

        Args:
          figures: what is known of the sample before; the rest comes into it.
        """
        # What the search measured, best first, so that the plan is the first.
        finalists = [record.evidence.trials[i].candidate for i in record.evidence.ranking]
        cost = CostModel(calibrate(sampling.target_of(self.task), self.settings.draws))
        ledger = sampling.open_ledger(
            self.task, self.case, self.store, Journal(), cost, **self.options
        )
        _check(record, ledger, self.store.plan(self.task))
        ledger.executables = self.executables
        with opened_runner(ledger, self.settings) as bench:
            sample = sampling.choose(
                ledger, finalists, self.settings.size, functools.partial(_try_out, ledger, bench)
            )
        names = {f"p{number:02d}": one for number, one in enumerate(sample.programs)}
        rows = {name: ledger.rows[one.row] for name, one in names.items()}
        places = {row: place for place, row in reversed(list(enumerate(sample.finalists)))}
        figures |= {
            "plan": next(name for name, one in names.items() if places.get(one.row) == 0),
            "whole_space": sample.whole,
            "space_size": ledger.subjects[0].space.size(),
            "state_too_large": sample.skipped,
            "memory_limit_bytes": ledger.limit_bytes,
            "constants": ledger.constants.to_json(),
            "constants_digest": ledger.constants.digest,
            "calibration_revision": CALIBRATION_REVISION,
            "fresh": [],
            "programs": [
                program_to_json(
                    name,
                    one.groups,
                    rows[name],
                    Runner(
                        name=name, samples_s=(), rounds=(), failure=_keeps_out(ledger, rows[name])
                    ),
                    places.get(one.row),
                )
                for name, one in names.items()
            ],
        }
        return Opened(figures, ledger, rows)

    def again(self, figures: dict[str, Any], names: Sequence[str]) -> Opened:
        """Makes these programs of a sample once more, and compiles those that are not there.

        Raises:
          OtherProgramsError: today's code makes another program of one of their layouts.
        """
        programs = {program["name"]: program for program in figures["programs"]}
        ledger = reopened(
            self.task,
            self.case,
            self.store,
            Journal(),
            figures,
            [programs[name] for name in names],
            **self.options,
        )
        ledger.executables = self.executables
        opened = Opened(figures, ledger, dict(zip(names, ledger.rows, strict=True)))
        missing = [
            i
            for i, name in enumerate(names)
            if not is_kept(opened.module_of(name), self.executables)
        ]
        compiling = Compiling(ledger, None)
        with compiling.opened():
            compiling.compile(missing, 1.0)
        return opened

    def stopped(self, kept: dict[str, Any] | None, now: Mapping[str, Any]) -> Opened | None:
        """A sample that was stopped amid its rounds, if these can go on; else None.

        Its predictions stay those of the model of cost that chose its programs.

        Args:
          kept: what there is of it.
          now: the figures of one that would begin now.
        """
        same = ("scale", "seed", "rounds", "draws", "size")
        if (
            kept is None
            or not is_from_here(kept)
            or not is_same_plan(kept.get("planned"), now["planned"])
            or any(kept.get(name) != now[name] for name in same)
        ):
            return None
        running = [program for program in kept["programs"] if not program["failure"]]
        if not any(program["rounds"] for program in running):
            return None
        try:
            opened = self.again(kept, [program["name"] for program in running])
        except OtherProgramsError:
            return None
        over = 1 + max(number for program in running for number in program["rounds"])
        when = {name: now[name] for name in ("date", "commit", "load_at_start")}
        kept.setdefault("resumed", []).append({"rounds_before": over, **when})
        kept["pair_limit_s"] = now["pair_limit_s"]
        return opened


def _check(record: PlanRecord, ledger: SearchState, path: pathlib.Path) -> None:
    """Refuses a plan of another model: its layouts would be measured as if they had been searched.

    Raises:
      PlanError: what of the model is another.
    """
    analysis = ledger.subjects[0].analysis
    if others := differences(record, analysis.program, analysis.digest):
        raise PlanError(
            f"{path} is of another model than the case has now: delete {path.parent}/search.json"
            " to search it anew",
            others,
        )


def _module(ledger: SearchState, row: Row) -> Module:
    module = ledger.module_of(row)
    if isinstance(module, Failure):
        raise timing.MeasuringError(f"a program cannot be lowered: {module.message}")
    return module


def _try_out(ledger: SearchState, bench: Runner, rows: Sequence[int]) -> None:
    """Runs each row by itself; what fails keeps its failure."""
    modules = {f"row {i}": _module(ledger, ledger.rows[i]) for i in rows}
    failed = timing.tried(bench, modules, functools.partial(tell, ledger, len(rows)))
    for i in rows:
        ledger.rows[i].profiled = failed.get(f"row {i}")


def tell(ledger: SearchState, total: int, text: str) -> None:
    """Tells the ledger's callbacks what is run on the devices; so many programs are."""
    ledger.tell(Stage.PROFILE, 0, total, text)


def _keeps_out(ledger: SearchState, row: Row) -> Failure | None:
    """Why a program is not measured: it could not be compiled, does not fit, or failed alone."""
    if not isinstance(row.compiled, Estimate):
        return row.compiled if isinstance(row.compiled, Failure) else None
    if row.compiled.peak_memory_bytes > ledger.limit_bytes:
        return timing.too_large(row.compiled.peak_memory_bytes, ledger.limit_bytes)
    return row.profiled if isinstance(row.profiled, Failure) else None


@contextlib.contextmanager
def opened_runner(ledger: SearchState, settings: Settings) -> Iterator[ChildRunner]:
    """A child process with nothing but the inputs in it.

    Raises:
      timing.MeasuringError: the initial state cannot be made.
    """
    program = ledger.subjects[0].analysis.program
    bench = ChildRunner(
        ledger.settings("fidelity"),
        time_limit_s=settings.call_limit_s,
        executables=ledger.executables,
    )
    try:
        inputs = make_inputs(program, ledger.target, ledger.seed, BATCHES)
        failure = bench.set_inputs(inputs.init, inputs.batches)
        if failure is not None:
            raise timing.MeasuringError(f"the initial state cannot be made: {failure.message}")
        yield bench
    finally:
        bench.close()
