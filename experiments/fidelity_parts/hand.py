"""The hand part: the plan against each layout that people write, in fresh processes."""

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax

import autoshard
from experiments import pairs
from experiments.fidelity_parts.store import (
    Store,
    Task,
    commit,
    is_from_here,
    is_same_plan,
    provenance,
    read,
    seen_on,
    write,
)
from experiments.handwritten import steps


def run(
    task: Task,
    case: Any,
    store: Store,
    *,
    scale: str,
    seed: int,
    limit_s: float,
    start: Callable[[str], str],
) -> None:
    """Has every layout compared that is not yet, and writes what came of each as it comes.

    A comparison is kept if it was of the same plan and seed, of enough processes, and if it was
    decided or had as much time: an earlier result with undecided ones goes on with a larger limit.
    Each says which machine and versions it is of; one that is to go on begins anew elsewhere. What
    is to be asked anew stays as it is until there is something to put in its place.

    Args:
      limit_s: for the pairs of a layout's first process, see `pairs.limit_of`.
      start: asks one more process about a layout (`compare_one`) and waits for it; returns why
        there may be no result.
    """
    plan = store.planned(task)
    figures = {**provenance(task, case, scale, seed), "failed": "", "planned": plan}
    if plan is None:
        figures["failed"] = "there is no plan: the search found none"
        write(store.result(task), figures)
        return

    def is_ours(row: dict[str, Any]) -> bool:
        return is_same_plan(row.get("planned"), plan) and row.get("seed") == seed

    def stands(row: dict[str, Any]) -> bool:
        if not is_ours(row):
            return False
        if pairs.is_open(row) and not is_from_here(row):
            return False
        return bool(row["decided"] or row["limit_s"] >= limit_s)

    kept = read(store.result(task)) or {}
    # Rows did not say it themselves before docs/decisions/0045.
    of_all = {name: kept[name] for name in ("machine", "versions") if name in kept}
    before = {row["layout"]: of_all | row for row in kept.get("rows", ()) if is_ours(row)}
    layouts = list(steps.hand_steps(case, task.devices))
    rows: dict[str, dict[str, Any]] = {}
    for name in layouts:
        file = row_file(store, task, name)
        begun, row = read(file), before.get(name)
        if begun and not stands(begun):
            file.unlink()
            begun = None
        if row and not begun and stands(row) and pairs.is_open(row) and "processes" in row:
            write(file, row)  # asked on
        if begun or row is None or not stands(row) or pairs.is_open(row):
            row = _asked(file, name, row, start)
        rows[name] = row
        later = [before[n] for n in layouts if n in before and n not in rows]
        so_far = [*rows.values(), *later]
        figures["lost"] = sum("why" in row for row in so_far)
        figures["undecided"] = sum(row["verdict"] == "undecided" for row in so_far)
        write(store.result(task), {**figures, "rows": so_far})
        file.unlink(missing_ok=True)  # the result holds it now


def _asked(
    file: pathlib.Path, layout: str, before: dict[str, Any] | None, start: Callable[[str], str]
) -> dict[str, Any]:
    """Asks processes until no other is wanted, or one says nothing; `why` then says why.

    Args:
      before: what an earlier run said of the same plan, maybe elsewhere.
    """
    row: dict[str, Any] = read(file) or {"layout": layout, "verdict": "undecided", "ratio": None}
    while "processes" not in row or pairs.is_open(row):
        reason = start(layout)
        now = read(file)
        if now is None or now.get("processes") == row.get("processes"):
            # Not as many processes as a near tie wants: what is there decides nothing.
            said = row if "processes" in row else before or row
            return {**said, "verdict": "undecided", "why": reason}
        row = now
    return row


def row_file(store: Store, task: Task, layout: str) -> pathlib.Path:
    """Where the comparison with one layout is kept until it is done."""
    return store.run_folder(task) / "hand" / (re.sub(r"\W+", "_", layout) + ".json")


def compare_one(
    task: Task, case: Any, store: Store, layout: str, *, seed: int, limit_s: float
) -> None:
    """Interleaved pairs of the plan's step and the hand-written one, on this process's devices.

    They are added to those of the processes before.
    """
    devices = jax.devices()[: task.devices]
    plan = autoshard.load_plan(store.plan(task), case.workload, devices)
    built = steps.build(case, steps.hand_steps(case, task.devices)[layout], devices, seed)
    before = read(row_file(store, task, layout))
    parts = pairs.parts_of(before) if before else []
    one = pairs.compare(
        pairs.stepper(plan.step, plan.init(), plan.put(case.sample(seed))),
        pairs.stepper(built.step, built.state, built.batch),
        limit_s=pairs.limit_of(len(parts), limit_s),
        seed=seed + len(parts),
    )
    found = pairs.of_processes([*parts, one])
    row = {
        "layout": layout,
        "verdict": pairs.verdict(found.ratio, found.decided),
        "plan_is": plan.trial.baseline if plan.trial else "",
        "planned": plan.candidate.to_json(),
        "seed": seed,
        "limit_s": limit_s,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        **seen_on(),
        **dataclasses.asdict(found),
    }
    write(row_file(store, task, layout), row)
