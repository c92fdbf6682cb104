"""Opens a sample that was measured again: its programs as today's code makes them of its layouts.

What was measured stays with the program that it was measured of: where today's code makes another
one of a layout, or another compiler is here, nothing is done. The constants are those that the
sample was taken with, and where it has too few, this machine's, which it keeps apart.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.records.layout import Candidate
from autoshard.records.module import Module
from autoshard.rungs.profile.calibration_files import calibrated
from autoshard.target.cost import Constants, CostModel
from autoshard.target.host import machine
from autoshard.tuner.budget import Budget, Callback
from autoshard.tuner.journal import Journal
from autoshard.tuner.state import SearchState
from experiments.fidelity_parts import sampling
from experiments.fidelity_parts.store import Case, Store, Task, seen_on


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
) -> SearchState:
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
    kept = figures.get("borrowed", {}).get("constants", {})
    own = _own(figures) | {name: kept[name] for name in kept.keys() & _known()}
    if _known() <= own.keys():
        return Constants.from_json(own)
    return completed(own, calibrated(sampling.target_of(task), store.calibration))


def _known() -> set[str]:
    return {field.name for field in dataclasses.fields(Constants)}


def _own(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Constants that a sample was taken with, as far as today's model has them."""
    others = figures.get("borrowed", {}).get("machines", {}).keys()
    names = _known() - others
    return {name: value for name, value in figures["constants"].items() if name in names}


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
    """Constants of a sample; those that it lacks are this machine's."""
    return Constants.from_json(here.to_json() | own)
