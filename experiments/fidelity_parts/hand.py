"""The hand part: the plan against each layout that people write, in a fresh process each."""

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax

import autoshard
from experiments import pairs
from experiments.fidelity_parts.store import Store, Task, commit, provenance, read, write
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
    """Has every layout compared that is not yet, and writes what came of it.

    A comparison is kept if it was of the same plan and seed, and if it was decided or had as much
    time: an earlier result with undecided ones goes on with a larger limit.

    Args:
      start: compares one layout by `compare_one` in a process of its own and waits for it; returns
        why there may be no result.
    """
    plan = store.planned(task)
    figures = {**provenance(task, case, scale, seed), "failed": "", "planned": plan}
    if plan is None:
        figures["failed"] = "there is no plan: the search found none"
        write(store.result(task), figures)
        return

    def kept(row: dict[str, Any] | None) -> bool:
        return (
            row is not None
            and (row.get("planned"), row.get("seed")) == (plan, seed)
            and (row["decided"] or row["limit_s"] >= limit_s)
        )

    before = {row["layout"]: row for row in (read(store.result(task)) or {}).get("rows", ())}
    rows = []
    for name in steps.hand_steps(case, task.devices):
        file = row_file(store, task, name)
        row = next((row for row in (read(file), before.get(name)) if kept(row)), None)
        if row is None:
            file.unlink(missing_ok=True)
            reason = start(name)
            row = read(file) or {
                "layout": name,
                "verdict": "undecided",
                "ratio": None,
                "why": reason,
            }
        rows.append(row)
    figures["lost"] = sum("why" in row for row in rows)
    figures["undecided"] = sum(row["verdict"] == "undecided" for row in rows)
    write(store.result(task), {**figures, "rows": rows})
    for name in steps.hand_steps(case, task.devices):
        row_file(store, task, name).unlink(missing_ok=True)  # the result holds them now


def row_file(store: Store, task: Task, layout: str) -> pathlib.Path:
    """Where the comparison with one layout is kept until all are done."""
    return store.run_folder(task) / "hand" / (re.sub(r"\W+", "_", layout) + ".json")


def compare_one(
    task: Task, case: Any, store: Store, layout: str, *, seed: int, limit_s: float
) -> None:
    """Interleaved pairs of the plan's step and the hand-written one, on this process's devices."""
    devices = jax.devices()[: task.devices]
    plan = autoshard.load_plan(store.plan(task), case.workload, devices)
    built = steps.build(case, steps.hand_steps(case, task.devices)[layout], devices, seed)
    found = pairs.compare(
        pairs.stepper(plan.step, plan.init(), plan.put(case.sample(seed))),
        pairs.stepper(built.step, built.state, built.batch),
        limit_s=limit_s,
        edge=pairs.MET,
        seed=seed,
    )
    row = {
        "layout": layout,
        "verdict": pairs.verdict(found.ratio, found.decided),
        "plan_is": plan.trial.baseline if plan.trial else "",
        "planned": plan.candidate.to_json(),
        "seed": seed,
        "limit_s": limit_s,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        **dataclasses.asdict(found),
    }
    write(row_file(store, task, layout), row)
