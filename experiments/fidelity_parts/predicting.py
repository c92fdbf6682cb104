"""The predict part: what rungs 1 and 2 say today of programs that were measured before.

A step's time does not depend on the model of cost, so a better model needs no new samples. It does
depend on the program: where today's code makes another one of a layout, nothing is changed. The
constants of the machine are those that the sample was taken with.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoshard.budget import Budget, Callback
from autoshard.calibrations import calibrated
from autoshard.cost import MODEL_REVISION, Constants, CostModel
from autoshard.driver.compiling import Compiling
from autoshard.journal import opened
from autoshard.layout import Candidate
from autoshard.module import Module
from experiments.fidelity_parts import sampling
from experiments.fidelity_parts.measuring import rung_to_json
from experiments.fidelity_parts.store import Case, Store, Task, provenance, read, write

_BESIDE = {
    "bandwidths": "bandwidth_bytes_per_s",
    "collided_s": "transposed_s",
    "degenerate_s": "element_flops_per_s",
    "degenerate_across_s": "element_flops_per_s",
    "turned_flops_per_s": "contract_flops_per_s",
    "unvectorized_flops_per_s": "element_flops_per_s",
    "array_s": "launch_s",
}
"""Constants that older calibrations lack -> one that they have, and that goes with it.

In proportion where both are rates, or both seconds; else the other way round.
"""


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
        cost = CostModel(_constants(figures, task, store))
        ledger = sampling.open_ledger(
            task, case, store, log, cost, seed=seed, budget=budget, callbacks=callbacks
        )
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


def _constants(figures: dict[str, Any], task: Task, store: Store) -> Constants:
    """Those of a sample, completed where nobody asked for some when it was taken."""
    own = figures["constants"]
    if {field.name for field in dataclasses.fields(Constants)} <= own.keys():
        return Constants.from_json(own)
    return completed(own, calibrated(sampling.target_of(task), store.calibration))


def completed(own: dict[str, Any], here: Constants) -> Constants:
    """Constants that lack some, which are this machine's in proportion to what both have.

    The machine, or its hour, may have been another: a rate beyond the caches that was measured then
    is not to stand beside rates within them that were measured now.
    """
    found = here.to_json() | own
    for name, beside in _BESIDE.items():
        if name not in own and getattr(here, beside):
            scale = found[beside] / getattr(here, beside)
            alike = _is_duration(name) == _is_duration(beside)
            found[name] = _times(getattr(here, name), scale if alike else 1 / scale)
    return Constants.from_json(found)


def _is_duration(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _times(figure: Any, scale: float) -> Any:
    """A figure, or the second of each pair, in proportion."""
    if isinstance(figure, tuple):
        return tuple((what, value * scale) for what, value in figure)
    return figure * scale
