"""The predict part: what rungs 1 and 2 say today of programs that were measured before.

A step's time does not depend on the model of cost, so a better model needs no new samples. It does
depend on the program: where today's code makes another one of a layout, nothing is changed. The
constants of the machine are those that the sample was taken with; what it lacks is borrowed from
this one in proportion, and kept apart (`borrowed`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.records.trial import Estimate
from autoshard.target.cost import MODEL_REVISION
from autoshard.tuner.budget import Budget, Callback
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.journal import opened
from experiments.fidelity_parts.program_json import rung_to_json
from experiments.fidelity_parts.reopening import borrowed, reopened
from experiments.fidelity_parts.store import Case, Store, Task, provenance, read, write


class UnpricedError(RuntimeError):
    """A rung says nothing of a program that was measured."""


def run(
    task: Task,
    case: Case,
    store: Store,
    *,
    scale: str,
    seed: int,
    budget: Budget,
    compiles: bool = True,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Puts today's predictions into the result of the sample part; all else in it stays.

    Groups stay too: "top" are the best of the rung 1 that drew the sample.

    Args:
      compiles: asks rung 2, too. Else what it said stays, and `predicted` keeps by which revision.

    Raises:
      OtherProgramsError: see `reopened`.
      UnpricedError: a program that was measured has no prediction by today's rungs, which would
        leave it out of their figures. The result is as it was, here as above.
    """
    path = store.result(dataclasses.replace(task, part="sample"))
    figures = read(path)
    if figures is None or figures["failed"]:
        return
    programs: list[dict[str, Any]] = figures["programs"]
    with opened(store.run_folder(task) / "predict.jsonl") as log:
        ledger = reopened(
            task,
            case,
            store,
            log,
            figures,
            programs,
            seed=seed,
            budget=budget,
            callbacks=callbacks,
        )
        ran = [i for i, program in enumerate(programs) if program["samples_s"]]
        if compiles:
            compiling = Compiling(ledger, None)
            with compiling.opened():
                compiling.compile(ran, 1.0)
    unsaid = {
        programs[i]["name"]: said
        for i in ran
        for said in (ledger.rows[i].propagated, *[ledger.rows[i].compiled] * compiles)
        if not isinstance(said, Estimate)
    }
    if unsaid:
        name, why = next(iter(unsaid.items()))
        raise UnpricedError(
            f"{len(unsaid)} of {len(ran)} programs of {task.case} on {task.devices} devices were"
            f" measured and got no prediction; {name}: {why}"
        )
    for i in ran:
        programs[i]["rung1"] = rung_to_json(ledger.rows[i].propagated)
        if compiles:
            programs[i]["rung2"] = rung_to_json(ledger.rows[i].compiled)
    if others := borrowed(figures, ledger.constants):
        figures["borrowed"] = others
    figures |= {
        "constants_digest": ledger.constants.digest,
        "predicted": {
            "model_revision": MODEL_REVISION,
            **({} if compiles else {"rung2": _rung2_said(figures)}),
            **{
                key: value
                for key, value in provenance(task, case, scale, seed).items()
                if key in ("versions", "date")
            },
        },
    }
    write(path, figures)


def _rung2_said(figures: Mapping[str, Any]) -> dict[str, Any]:
    """By which revision rung 2 predicted a sample, with which versions, and when."""
    said = figures.get("predicted", figures)
    return said.get("rung2") or {k: said[k] for k in ("model_revision", "versions", "date")}
