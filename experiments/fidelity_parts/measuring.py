"""The sample part: many programs of one case, each judged by rung 1, compiled, and measured."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.budget import Budget, Callback
from autoshard.calibrate import calibrate
from autoshard.cost import CostModel
from autoshard.driver.compiling import Compiling
from autoshard.driver.ledger import Ledger, Row
from autoshard.errors import PlanError
from autoshard.journal import Journal
from autoshard.module import Module
from autoshard.plan_file import PlanRecord, differences, read_plan
from autoshard.rungs.bench import Benches
from autoshard.rungs.bench_client import ChildBench
from autoshard.rungs.inputs import make_inputs
from autoshard.rungs.race import Runner
from autoshard.trial import Estimate, Failure, Stage
from experiments import pairs
from experiments.fidelity_parts import sampling, timing
from experiments.fidelity_parts.ranks import by_round, times
from experiments.fidelity_parts.regret import rivals_of
from experiments.fidelity_parts.reopening import reopened
from experiments.fidelity_parts.store import (
    Case,
    Store,
    Task,
    commit,
    is_from_here,
    is_same_plan,
    is_unsettled,
    provenance,
    read,
    write,
)

_BATCHES = 2
_NOT_ASKED = "the sample was stopped before this pair was asked about; --retry asks"
_RUNG: tuple[str, ...] = (
    "time_s",
    "compute_s",
    "communication_s",
    "peak_memory_bytes",
    "state_bytes",
    "flops",
    "bytes_accessed",
    "op_count",
)


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


def run(
    task: Task,
    case: Case,
    store: Store,
    *,
    scale: str,
    seed: int,
    budget: Budget,
    settings: Settings = Settings(),
    callbacks: Sequence[Callback] = (),
) -> None:
    """Calibrates, samples, compiles, measures, and measures the plan against its rivals anew.

    What is interrupted before its rounds are over begins anew, so that predictions and samples
    share one stretch of time. Of a sample that is there and was taken on this machine, with the
    same plan, only those pairs are asked on that failed, that were not reached, or that want
    another process.

    Raises:
      OtherProgramsError: today's code makes another program of a layout whose pairs are asked on.
      PlanError: the plan is of another model.
    """
    figures = provenance(task, case, scale, seed)
    if not store.plan(task).exists():
        write(store.result(task), {**figures, "failed": "there is no plan: the search found none"})
        return
    record = read_plan(store.plan(task))
    planned = record.candidate.to_json()
    options: dict[str, Any] = {"seed": seed, "budget": budget, "callbacks": callbacks}
    before = read(store.result(task))
    if before and _is_asked_on(before, figures, planned):
        _ask_on(task, case, store, before, settings, options)
        return
    # What the search measured, best first, so that the plan is the first.
    finalists = [record.evidence.trials[i].candidate for i in record.evidence.ranking]
    cost = CostModel(calibrate(sampling.target_of(task), settings.draws))
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        ledger = sampling.open_ledger(task, case, store, Journal(), cost, **options)
        _check(record, ledger, store.plan(task))
        ledger.executables = pathlib.Path(scratch)
        with _bench(ledger, settings) as bench:
            sample = sampling.choose(
                ledger, finalists, settings.size, functools.partial(_try_out, ledger, bench)
            )
            names = {f"p{number:02d}": one for number, one in enumerate(sample.programs)}
            places = {row: place for place, row in reversed(list(enumerate(sample.finalists)))}
            plan = next(name for name, one in names.items() if places.get(one.row) == 0)
            bench.renew()  # what was tried is loaded there under other names
            ran = _in_rounds(ledger, bench, names, settings)
        tables = {n: by_round(r.samples_s, r.rounds) for n, r in ran.items() if r.failure is None}
        rivals = rivals_of(plan, times(tables))
        figures |= {
            "failed": "",
            "planned": planned,
            "plan": plan,
            "whole_space": sample.whole,
            "space_size": ledger.subjects[0].space.size(),
            "state_too_large": sample.skipped,
            "rounds": settings.rounds,
            "pair_limit_s": settings.pair_limit_s,
            "draws": settings.draws,
            "size": dataclasses.asdict(settings.size),
            "memory_limit_bytes": ledger.limit_bytes,
            "constants": ledger.constants.to_json(),
            "constants_digest": ledger.constants.digest,
            "fresh": [{"rival": rival, "failed": _NOT_ASKED} for rival in rivals],
            "programs": [
                program_to_json(
                    name, one.groups, ledger.rows[one.row], ran[name], places.get(one.row)
                )
                for name, one in names.items()
            ],
        }
        # The pairs take as long as the rounds: who is stopped amid them keeps what there is.
        write(store.result(task), figures)
        modules = {n: _module(ledger, ledger.rows[names[n].row]) for n in (plan, *rivals)}
        _ask(ledger, task, store, figures, modules, settings)


def _check(record: PlanRecord, ledger: Ledger, path: pathlib.Path) -> None:
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


def _is_asked_on(
    before: Mapping[str, Any], now: Mapping[str, Any], planned: dict[str, Any]
) -> bool:
    """Whether a sample stands, and pairs of it want another process, which this machine may ask."""
    same = all(before.get(name) == now[name] for name in ("seed", "scale")) and is_from_here(before)
    stands = same and not before["failed"] and is_same_plan(before.get("planned"), planned)
    return stands and bool(before["fresh"]) and is_unsettled(dict(before))


def _ask_on(
    task: Task,
    case: Case,
    store: Store,
    figures: dict[str, Any],
    settings: Settings,
    options: Mapping[str, Any],
) -> None:
    """Has further processes asked about the pairs that want them; all else of the sample stays."""
    fresh: list[dict[str, Any]] = figures["fresh"]
    open_ = [i for i, pair in enumerate(fresh) if pairs.is_open(pair)]
    programs = {program["name"]: program for program in figures["programs"]}
    names = [figures["plan"], *(fresh[i]["rival"] for i in open_)]
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        ledger = reopened(
            task, case, store, Journal(), figures, [programs[name] for name in names], **options
        )
        ledger.executables = pathlib.Path(scratch)
        compiling = Compiling(ledger, None)
        with compiling.opened():
            compiling.compile(list(range(len(names))), 1.0)
        modules = {n: _module(ledger, row) for n, row in zip(names, ledger.rows, strict=True)}
        _ask(ledger, task, store, figures, modules, settings)


def _ask(
    ledger: Ledger,
    task: Task,
    store: Store,
    figures: dict[str, Any],
    modules: Mapping[str, Module],
    settings: Settings,
) -> None:
    """Has processes asked about the plan's pairs that want them; each is written when it is done.

    Args:
      figures: the sample's; what is asked comes into it.
      modules: the plan and the rivals to ask about, by name.
    """
    fresh, plan = figures["fresh"], figures["plan"]
    open_ = [i for i, pair in enumerate(fresh) if pairs.is_open(pair)]
    for done, i in enumerate(open_):
        rival = fresh[i]["rival"]
        ledger.tell(Stage.PROFILE, done, len(open_), f"pairs of the plan {plan} and {rival}")
        begun = () if fresh[i]["failed"] else pairs.parts_of(fresh[i])
        said = _paired(ledger, modules[plan], modules[rival], settings, begun)
        fresh[i] = {"rival": rival, **said}
        write(store.result(task), figures)


def _module(ledger: Ledger, row: Row) -> Module:
    module = ledger.module_of(row)
    if isinstance(module, Failure):
        raise timing.MeasuringError(f"a program cannot be lowered: {module.message}")
    return module


def _try_out(ledger: Ledger, bench: Benches, rows: Sequence[int]) -> None:
    """Runs each row by itself; what fails keeps its failure."""
    modules = {f"row {i}": _module(ledger, ledger.rows[i]) for i in rows}
    failed = timing.tried(bench, modules, functools.partial(_tell, ledger, len(rows)))
    for i in rows:
        ledger.rows[i].profiled = failed.get(f"row {i}")


def _tell(ledger: Ledger, total: int, text: str) -> None:
    ledger.tell(Stage.PROFILE, 0, total, text)


def _in_rounds(
    ledger: Ledger, bench: Benches, names: Mapping[str, sampling.Chosen], settings: Settings
) -> dict[str, Runner]:
    """The rounds of all programs that can run."""
    modules: dict[str, Module] = {}
    ran: dict[str, Runner] = {}
    held: dict[str, int] = {}
    for name, one in names.items():
        row = ledger.rows[one.row]
        failure = _keeps_out(ledger, row)
        module = ledger.module_of(row) if failure is None else failure
        if isinstance(module, Failure):
            ran[name] = Runner(name=name, samples_s=(), rounds=(), failure=module)
        else:
            modules[name], held[name] = module, module.held_bytes(_BATCHES)
    return ran | timing.in_rounds(
        bench,
        modules,
        held,
        rounds=settings.rounds,
        seed=ledger.seed,
        # Half is for what the one that runs needs besides, and for sixty executables.
        memory_bytes=ledger.target.memory_bytes // 2,
        on_progress=functools.partial(_tell, ledger, len(modules)),
    )


def _paired(
    ledger: Ledger,
    plan: Module,
    rival: Module,
    settings: Settings,
    begun: Sequence[pairs.Comparison] = (),
) -> dict[str, Any]:
    """Pairs of two programs in processes with nothing else in them.

    Each process is that of these two alone: what a third leaves of the memory's state may be felt.

    Args:
      begun: what processes said before.

    Returns:
      The comparison, its day and commit; `failed` says why there is none, `why` that it is one of
      fewer processes than were wanted.
    """

    said = [*begun]

    def in_a_process(number: int, limit_s: float) -> pairs.Comparison:
        with _bench(ledger, settings) as bench:
            said.append(
                timing.fresh_pair(
                    bench, plan, rival, limit_s=limit_s, seed=ledger.seed + 1 + number
                )
            )
            return said[-1]

    found: dict[str, Any] = {"failed": ""}
    try:
        found |= dataclasses.asdict(pairs.in_processes(in_a_process, settings.pair_limit_s, begun))
    except timing.MeasuringError as error:
        if not said:
            return {"failed": str(error)[:500]}
        # Not as many processes as were wanted: what there is decides nothing, and can be asked on.
        found |= {**dataclasses.asdict(pairs.of_processes(said)), "decided": False}
        found["why"] = str(error)[:500]
    return found | {"date": time.strftime("%Y-%m-%d"), "commit": commit()}


def _keeps_out(ledger: Ledger, row: Row) -> Failure | None:
    """Why a program is not measured: it could not be compiled, does not fit, or failed alone."""
    if not isinstance(row.compiled, Estimate):
        return row.compiled if isinstance(row.compiled, Failure) else None
    if row.compiled.peak_memory_bytes > ledger.limit_bytes:
        return timing.too_large(row.compiled.peak_memory_bytes, ledger.limit_bytes)
    return row.profiled if isinstance(row.profiled, Failure) else None


@contextlib.contextmanager
def _bench(ledger: Ledger, settings: Settings) -> Iterator[ChildBench]:
    """A child process with nothing but the inputs in it.

    Raises:
      timing.MeasuringError: the initial state cannot be made.
    """
    program = ledger.subjects[0].analysis.program
    bench = ChildBench(
        ledger.settings("fidelity"),
        time_limit_s=settings.call_limit_s,
        executables=ledger.executables,
    )
    try:
        inputs = make_inputs(program, ledger.target, ledger.seed, _BATCHES)
        failure = bench.set_inputs(inputs.init, inputs.batches)
        if failure is not None:
            raise timing.MeasuringError(f"the initial state cannot be made: {failure.message}")
        yield bench
    finally:
        bench.close()


def program_to_json(
    name: str, groups: Sequence[str], row: Row, ran: Runner, place: int | None
) -> dict[str, Any]:
    """One program as results hold it.

    Args:
      place: in the ranking of the search, 0 for the plan; None if it was not there.
    """
    return {
        "name": name,
        "groups": list(groups),
        "baseline": row.baseline,
        "place": place,
        "candidate": row.candidate.to_json(),
        "module": None if row.module is None else row.module.digest,
        "rung1": rung_to_json(row.propagated),
        "rung2": rung_to_json(row.compiled),
        **_samples(ran),
    }


def _samples(ran: Runner) -> dict[str, Any]:
    failure = ran.failure
    return {
        "failure": None
        if failure is None
        else {"stage": failure.stage, "kind": failure.kind, "message": failure.message[:500]},
        "samples_s": list(ran.samples_s),
        "rounds": list(ran.rounds),
    }


def rung_to_json(outcome: Estimate | Failure | None) -> dict[str, Any] | None:
    """An estimate's figures with the bytes and executions of each kind of collective."""
    if outcome is None:
        return None
    if isinstance(outcome, Failure):
        return {"failure": outcome.kind, "message": outcome.message[:300]}
    counts: dict[str, int] = {}
    for one in outcome.collectives:
        counts[one.kind] = counts.get(one.kind, 0) + one.count
    return {
        **{name: getattr(outcome, name) for name in _RUNG},
        "bytes_by_kind": outcome.bytes_by_kind(),
        "count_by_kind": counts,
        "elapsed_s": outcome.elapsed_s,
    }
