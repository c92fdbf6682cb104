"""The sample part: many programs of one case, each judged by rung 1, compiled, and measured."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.plan.file import read_plan
from autoshard.records.module import Module
from autoshard.records.rounds import by_round
from autoshard.records.trial import Stage
from autoshard.rungs.profile.race import Runner
from autoshard.tuner.budget import Budget, Callback
from autoshard.tuner.state import SearchState
from experiments import pairs
from experiments.fidelity_parts import opening, timing
from experiments.fidelity_parts.opening import Opened, Opening, Settings
from experiments.fidelity_parts.program_json import samples_to_json
from experiments.fidelity_parts.ranks import times
from experiments.fidelity_parts.regret import rivals_of
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

_NOT_ASKED = "the sample was stopped before this pair was asked about; --retry asks"


def run(
    task: Task,
    case: Case,
    store: Store,
    *,
    scale: str,
    seed: int,
    budget: Budget,
    settings: Settings,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Calibrates, samples, compiles, measures, and measures the plan against its rivals anew.

    What is interrupted amid its rounds goes on with those that are left, on such a machine as they
    were begun on, while the programs are the same; `resumed` says when. What is interrupted before
    begins anew. Of a sample that is there and was taken on this machine, with the same plan, only
    those pairs are asked on that failed, that were not reached, or that want another process.

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
    kept = store.run_folder(task) / "rounds.json"
    executables = store.run_folder(task) / "executables"
    programs = Opening(task, case, store, settings, options, executables)
    if before and _is_asked_on(before, figures, planned):
        wanted = [pair["rival"] for pair in before["fresh"] if pairs.is_open(pair)]
        opened = programs.again(before, [before["plan"], *wanted])
    else:
        figures |= {"failed": "", "planned": planned, **settings.to_json()}
        stopped = programs.stopped(read(kept), figures)
        if stopped is None:  # both are of one machine and one sample, or neither is there
            kept.unlink(missing_ok=True)
            shutil.rmtree(executables, ignore_errors=True)
        opened = stopped or programs.anew(record, figures)
        _run_rounds(opened, settings, kept)
        opened.figures["fresh"] = [
            {"rival": rival, "failed": _NOT_ASKED} for rival in _rivals(opened.figures)
        ]
        # The pairs take as long as the rounds: who is stopped amid them keeps what there is.
        write(store.result(task), opened.figures)
        kept.unlink()
    _ask(opened, task, store, settings)
    shutil.rmtree(executables, ignore_errors=True)


def _rivals(figures: Mapping[str, Any]) -> list[str]:
    """The fastest programs beside the plan, by the rounds."""
    tables = {
        program["name"]: by_round(program["samples_s"], program["rounds"])
        for program in figures["programs"]
        if not program["failure"]
    }
    return rivals_of(figures["plan"], times(tables))


def _is_asked_on(
    before: Mapping[str, Any], now: Mapping[str, Any], planned: dict[str, Any]
) -> bool:
    """Whether a sample stands, and pairs of it want another process, which this machine may ask."""
    same = all(before.get(name) == now[name] for name in ("seed", "scale")) and is_from_here(before)
    stands = same and not before["failed"] and is_same_plan(before.get("planned"), planned)
    return stands and bool(before["fresh"]) and is_unsettled(dict(before))


def _ask(opened: Opened, task: Task, store: Store, settings: Settings) -> None:
    """Has processes asked about the plan's pairs that want them; writes what each of them says."""
    figures, ledger = opened.figures, opened.ledger
    fresh, plan = figures["fresh"], figures["plan"]
    open_ = [i for i, pair in enumerate(fresh) if pairs.is_open(pair)]
    for done, i in enumerate(open_):
        rival = fresh[i]["rival"]
        first, second = (opened.module_of(name) for name in (plan, rival))
        ledger.tell(Stage.PROFILE, done, len(open_), f"pairs of the plan {plan} and {rival}")
        begun = () if fresh[i]["failed"] else pairs.parts_of(fresh[i])

        def keep(found: dict[str, Any], i: int = i, rival: str = rival) -> None:
            fresh[i] = {"rival": rival, **found}
            write(store.result(task), figures)

        keep(_paired(ledger, first, second, settings, begun, keep))


def _run_rounds(opened: Opened, settings: Settings, kept: pathlib.Path) -> None:
    """The rounds that are not over, of all programs that can run; their samples come into figures.

    Args:
      kept: where the figures stand after each round, until all are over.
    """
    ledger, figures = opened.ledger, opened.figures
    programs = {p["name"]: p for p in figures["programs"] if not p["failure"]}
    modules = {name: opened.module_of(name) for name in programs}

    def keep(ran: Mapping[str, Runner]) -> None:
        for name, runner in ran.items():
            programs[name] |= samples_to_json(runner)
        write(kept, figures)

    with opening.opened_runner(ledger, settings) as bench:
        keep(
            timing.in_rounds(
                bench,
                modules,
                {name: module.held_bytes(opening.BATCHES) for name, module in modules.items()},
                rounds=settings.rounds,
                seed=ledger.seed,
                # Half is for what the one that runs needs besides, and for sixty executables.
                memory_bytes=ledger.target.memory_bytes // 2,
                begun={
                    name: Runner(name=name, samples_s=tuple(p["samples_s"]), rounds=(*p["rounds"],))
                    for name, p in programs.items()
                },
                keep=keep,
                on_progress=functools.partial(opening.tell, ledger, len(modules)),
            )
        )


def _paired(
    ledger: SearchState,
    plan: Module,
    rival: Module,
    settings: Settings,
    begun: Sequence[pairs.Comparison],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Pairs of two programs in processes with nothing else in them.

    Each process is that of these two alone: what a third leaves of the memory's state may be felt.

    Args:
      begun: what processes said before.
      keep: told what there is after each process, which is undecided until the last.

    Returns:
      The comparison, its day and commit; `failed` says why there is none, `why` that it is one of
      fewer processes than were wanted.
    """

    said = [*begun]
    at = {"date": time.strftime("%Y-%m-%d"), "commit": commit()}

    def so_far(why: str) -> dict[str, Any]:
        """Not as many processes as were wanted: what there is decides nothing, and is asked on."""
        found = dataclasses.asdict(pairs.of_processes(said))
        return {"failed": "", **found, "decided": False, "why": why, **at}

    def in_a_process(number: int, limit_s: float) -> pairs.Comparison:
        with opening.opened_runner(ledger, settings) as bench:
            said.append(
                timing.fresh_pair(
                    bench, plan, rival, limit_s=limit_s, seed=ledger.seed + 1 + number
                )
            )
        keep(so_far("stopped before enough processes were asked"))
        return said[-1]

    try:
        found = pairs.in_processes(in_a_process, settings.pair_limit_s, begun)
    except timing.MeasuringError as error:
        return so_far(str(error)[:500]) if said else {"failed": str(error)[:500]}
    return {"failed": "", **dataclasses.asdict(found), **at}
