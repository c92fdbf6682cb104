"""Opens a sample that was measured again: its programs as today's code makes them of its layouts.

What was measured stays with the program that it was measured of: where today's code makes another
one of a layout, or another compiler is here, nothing is done. The constants are those that the
sample was taken with, and where it has too few, others in proportion that it keeps apart.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.budget import Budget, Callback
from autoshard.calibrations import calibrated
from autoshard.cost import Constants, CostModel
from autoshard.driver.ledger import Ledger
from autoshard.host import machine
from autoshard.journal import Journal
from autoshard.layout import Candidate
from autoshard.module import Module
from experiments.fidelity_parts import sampling
from experiments.fidelity_parts.store import Case, Store, Task, is_from_here, seen_on

_PROBED_ANEW = {"transposed_s": 22}
"""Constants whose probe has changed -> the first calibrations to measure them so.

What a sample has of them from before is set aside where this machine is like its own
(docs/decisions/0060).
"""
_BESIDE = {
    "bandwidths": "bandwidth_bytes_per_s",
    "transposed_s": "collided_s",
    "collided_s": "transposed_s",
    "degenerate_s": "element_flops_per_s",
    "degenerate_across_s": "element_flops_per_s",
    "turned_flops_per_s": "contract_flops_per_s",
    "unvectorized_flops_per_s": "element_flops_per_s",
    "array_s": "launch_s",
    "patch_s": "element_flops_per_s",
}
"""Constants that older calibrations lack, or measured otherwise -> one that goes with it.

In proportion where both are rates, or both seconds; else the other way round.
"""


class OtherProgramsError(RuntimeError):
    """Programs of a sample are not those that were measured."""


def reopened(
    task: Task,
    case: Case,
    store: Store,
    journal: Journal,
    figures: Mapping[str, Any],
    programs: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    budget: Budget,
    callbacks: Sequence[Callback] = (),
) -> Ledger:
    """A ledger whose rows are these programs of a sample, in order, judged by rung 1 alone.

    Args:
      figures: the sample, of which `programs` are some or all.

    Raises:
      OtherProgramsError: of a layout that was measured today's code makes another program, or the
        sample does not say which it was; or another compiler made the programs.
    """
    then, now = figures["versions"].get("jaxlib"), seen_on()["versions"]["jaxlib"]
    if then != now:
        raise OtherProgramsError(
            f"{task.case} on {task.devices} devices was measured as jaxlib {then} compiles it, here"
            f" is {now}: install that one, or delete {_file(task, store)} to measure it anew"
        )
    cost = CostModel(_constants(figures, task, store))
    ledger = sampling.open_ledger(
        task, case, store, journal, cost, seed=seed, budget=budget, callbacks=callbacks
    )
    measured = 0
    others = []
    for program in programs:
        row = sampling.judged(ledger, Candidate.from_json(program["candidate"]))
        ledger.rows.append(row)
        if program["samples_s"]:
            measured += 1
            module = ledger.module_of(row)
            if not isinstance(module, Module) or module.digest != program.get("module"):
                others.append(program["name"])
    if others:
        raise OtherProgramsError(
            f"{len(others)} of {measured} programs of {task.case} on {task.devices} devices are not"
            f" those that were measured ({', '.join(others[:5])}): delete"
            f" {_file(task, store)} to measure them anew"
        )
    return ledger


def _file(task: Task, store: Store) -> pathlib.Path:
    return store.result(dataclasses.replace(task, part="sample"))


def _constants(figures: Mapping[str, Any], task: Task, store: Store) -> Constants:
    """Those of a sample, completed where nobody asked for some when it was taken."""
    own = {**_own(figures), **figures.get("borrowed", {}).get("constants", {})}
    if {field.name for field in dataclasses.fields(Constants)} <= own.keys():
        return Constants.from_json(own)
    return completed(own, calibrated(sampling.target_of(task), store.calibration))


def _own(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Constants that a sample was taken with, but for those that are set aside."""
    then = figures.get("calibration_revision", 0)
    aside = {name for name, since in _PROBED_ANEW.items() if then < since}
    known = figures.get("borrowed", {}).get("machines", {}).keys()
    if is_from_here(figures):
        known |= aside
    return {name: value for name, value in figures["constants"].items() if name not in known}


def borrowed(figures: Mapping[str, Any], used: Constants) -> dict[str, Any]:
    """What a sample keeps of constants that it was priced with and that are not its own.

    Returns:
      {} where all are; else them, and of each the machine that it is of.
    """
    before = figures.get("borrowed", {})
    known = before.get("machines", {})
    own = _own(figures)
    others = {k: v for k, v in used.to_json().items() if k not in own}
    if not others:
        return {}
    return {"machines": {k: known.get(k, machine()) for k in others}, "constants": others}


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
