"""The predict part: what rungs 1 and 2 say today of programs that were measured before.

A step's time does not depend on the model of cost, so a better model needs no new samples. It does
depend on the program: where today's code makes another one of a layout, nothing is changed. And on
the machine: on one of another kind, the constants are those that the sample was measured with.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoshard.budget import Budget, Callback
from autoshard.cost import MODEL_REVISION, Constants, CostModel
from autoshard.driver.compiling import Compiling
from autoshard.journal import opened
from autoshard.layout import Candidate
from autoshard.module import Module
from experiments.fidelity_parts import sampling, yardstick
from experiments.fidelity_parts.measuring import rung_to_json
from experiments.fidelity_parts.store import Case, Store, Task, machine, provenance, read, write


class OtherProgramsError(RuntimeError):
    """Programs of a sample are not those that were measured."""


def run(
    task: Task,
    case: Case,
    store: Store,
    *,
    scale: str,
    seed: int,
    budget: Budget,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Puts today's predictions into the result of the sample part; all else in it stays.

    Groups stay too: "top" are the best of the rung 1 that drew the sample.

    Raises:
      OtherProgramsError: a layout's program is another one than was measured, or the sample does
        not say which it was; the result is as it was.
    """
    path = store.result(dataclasses.replace(task, part="sample"))
    figures = read(path)
    if figures is None or figures["failed"]:
        return
    programs: list[dict[str, Any]] = figures["programs"]
    with opened(store.run_folder(task) / "predict.jsonl") as log:
        ledger = sampling.open_ledger(
            task, case, store, log, seed=seed, budget=budget, callbacks=callbacks
        )
        ledger.cost = CostModel(_constants(figures, ledger.constants))
        for program in programs:
            candidate = Candidate.from_json(program["candidate"])
            ledger.rows.append(sampling.judged(ledger, candidate))
        ran = [i for i, program in enumerate(programs) if program["samples_s"]]
        others = []
        for i in ran:
            module = ledger.module_of(ledger.rows[i])
            if not isinstance(module, Module) or module.digest != programs[i].get("module"):
                others.append(programs[i]["name"])
        if others:
            raise OtherProgramsError(
                f"{len(others)} of {len(ran)} programs of {task.case} on {task.devices} devices are"
                f" not those that were measured ({', '.join(others[:5])}): delete {path} to"
                " measure them anew"
            )
        compiling = Compiling(ledger, None)
        with compiling.opened():
            compiling.compile(ran, 1.0)
        if beside := figures.get(yardstick.NAME):
            anew = yardstick.prepared(task, store, log, None, tuple(callbacks), ledger.cost)
            if anew.module.digest != beside["module"]:
                raise OtherProgramsError(
                    f"the yardstick is not the program that was measured: delete {path} to measure"
                    " all anew"
                )
            beside["rung2"] = rung_to_json(anew.estimate)
    for i in ran:
        programs[i]["rung1"] = rung_to_json(ledger.rows[i].propagated)
        programs[i]["rung2"] = rung_to_json(ledger.rows[i].compiled)
    figures |= {
        "constants": ledger.constants.to_json(),
        "constants_digest": ledger.constants.digest,
        "predicted": {
            "model_revision": MODEL_REVISION,
            **{
                key: value
                for key, value in provenance(task, case, scale, seed).items()
                if key in ("versions", "date")
            },
        },
    }
    write(path, figures)


def _constants(figures: dict[str, Any], here: Constants) -> Constants:
    """Of the kind of machine that a sample was measured on.

    Args:
      here: of this machine; also what the sample's do not say, since nobody asked then.
    """
    if figures["machine"] == machine():
        return here
    return Constants.from_json({**here.to_json(), **figures["constants"]})
