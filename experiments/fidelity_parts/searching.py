"""The search part: `autoshard.search` on a case as a user would call it, and what it cost."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import autoshard
from autoshard.plan.plan import Plan
from autoshard.records.trial import Failure, Measurement, Trial
from experiments.fidelity_parts.store import Case, Store, Task, provenance, write


def run(
    task: Task,
    case: Case,
    store: Store,
    *,
    scale: str,
    seed: int,
    budget: autoshard.Budget,
    callbacks: tuple[Callable[[autoshard.Event], None], ...] = (),
) -> None:
    """Searches, saves the plan and writes the result; a search that fails is a result too.

    An interrupted search goes on from its journal under the runs; one that ended leaves none there:
    whoever deletes its result wants it searched anew.
    """
    folder = store.run_folder(task)
    journal = folder / "search.jsonl"
    figures: dict[str, Any] = {
        **provenance(task, case, scale, seed),
        "budget": dataclasses.asdict(budget),
        "resumed": journal.exists(),
    }
    try:
        plan = autoshard.search(
            case.workload,
            jax.devices()[: task.devices],
            budget=budget,
            journal=journal,
            calibration=store.calibration,
            seed=seed,
            callbacks=callbacks,
            progress=False,  # the callbacks show bars
        )
    except Exception as error:  # whatever keeps a case from having a plan belongs in the table
        figures["failed"] = f"{type(error).__name__}: {error}"[:2000]
        store.plan(task).unlink(missing_ok=True)  # one of an earlier search says nothing of this
    else:
        if plan.evidence.ended == "interrupted":
            raise KeyboardInterrupt  # half a search is no result; its journal stays
        figures |= figures_of(plan)
        plan.save(str(folder / "plan.json"))
        slim(plan).save(str(store.plan(task)))
    write(store.result(task), figures)
    journal.unlink(missing_ok=True)


def figures_of(plan: Plan) -> dict[str, Any]:
    """What a finished search says: its plan, its numerics check, its cost."""
    evidence, trial = plan.evidence, plan.trial
    profiled = trial.profiled if trial else None
    measured = profiled if isinstance(profiled, Measurement) else None
    return {
        "failed": "",
        "ended": evidence.ended,
        "numerics": measured.numerics if measured else "unchecked",
        "numerics_error": measured.numerics_error if measured else None,
        "step_s": measured.median_s if measured else None,
        "plan": plan.candidate.to_json(),
        "plan_is": trial.baseline if trial else "",
        "axes": [[name, size] for name, size, _ in evidence.axes],
        "memory_limit_bytes": evidence.memory_limit_bytes,
        "candidates": evidence.candidates,
        "compiles": sum(t.was_compiled for t in evidence.trials),
        "profiles": sum(isinstance(t.profiled, Measurement) for t in evidence.trials),
        "profiles_failed": sum(isinstance(t.profiled, Failure) for t in evidence.trials),
        "failures": sorted({_in_words(t.failure) for t in evidence.trials if t.failure}),
        "false_rejections": evidence.false_rejections,
        "elapsed_s": dict(evidence.elapsed_s),
        "correction": list(evidence.correction),
        "constants_digest": evidence.constants_digest,
        "notes": list(evidence.notes),
    }


def _in_words(failure: Failure) -> str:
    return f"{failure.stage}: {failure.kind}: {(failure.message.splitlines() or [''])[0][:200]}"


def slim(plan: Plan) -> Plan:
    """The same plan as it is kept for good: small, and without what stays on this machine.

    It has the trials of its ranking alone, and their traces' folders are not named.
    """
    evidence = plan.evidence
    found = copy.copy(plan)
    found.evidence = dataclasses.replace(
        evidence,
        trials=tuple(_without_trace(evidence.trials[i]) for i in evidence.ranking),
        ranking=tuple(range(len(evidence.ranking))),
    )
    return found


def _without_trace(trial: Trial) -> Trial:
    if not isinstance(trial.profiled, Measurement):
        return trial
    return dataclasses.replace(trial, profiled=dataclasses.replace(trial.profiled, trace=""))
