"""Layouts by hand for a pod that is not here, compiled and priced as rung 2 does."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from autoshard.compat.shardy import stablehlo
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Kind, Stage
from autoshard.records.words import mebibytes, seconds
from autoshard.target.cost import CostModel
from autoshard.target.target import Target
from experiments import rung2_now
from experiments.handwritten.cases import HandCase
from experiments.handwritten.layouts import HandLayout
from experiments.handwritten.step import prepare

EQUAL = 1e-4
"""Programs are equal if their times differ by less: a few launches of kernels in seconds."""


_COMPILE_LIMIT_S = 600.0


def judged(
    case: HandCase, layouts: Mapping[str, HandLayout], target: Target, cost: CostModel
) -> dict[str, Estimate | Failure]:
    """Rung 2's outcome for each layout, in order; "unsupported" if the batch does not divide."""
    modules: dict[str, Module] = {}
    found: dict[str, Estimate | Failure] = {}
    for name, layout in layouts.items():
        try:
            modules[name] = lowered(case, layout, target)
        except ValueError as error:
            found[name] = Failure(stage=Stage.COMPILE, kind=Kind.UNSUPPORTED, message=str(error))
    outcomes = rung2_now.estimates(modules.values(), target, cost, _COMPILE_LIMIT_S)
    found |= zip(modules, outcomes, strict=True)
    return {name: found[name] for name in layouts}


def lowered(case: HandCase, layout: HandLayout, target: Target) -> Module:
    """The step under a layout, for the target's platform and without a device."""
    prepared = prepare(case, layout, layout.abstract_mesh())
    platform = target.lowering_platform
    program = prepared.step.trace(*prepared.args).lower(lowering_platforms=(platform,))
    return Module(
        stablehlo=stablehlo.bytecode(program.compiler_ir("stablehlo").operation),
        mesh=layout.axes,
        platform=platform,
        inputs=(),
        outputs=(),
        state_count=0,
    )


def rows(
    plan_s: float, limit_bytes: int, found: Mapping[str, Estimate | Failure]
) -> list[dict[str, Any]]:
    """Each hand layout beside the plan.

    Args:
      plan_s: rung 2's time of the plan.
      limit_bytes: memory that the search allowed on a device.
    """
    return [_row(plan_s, limit_bytes, name, outcome) for name, outcome in found.items()]


def _row(plan_s: float, limit_bytes: int, name: str, outcome: Estimate | Failure) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"name": name, "verdict": outcome.kind, "message": outcome.message[:300]}
    ratio = plan_s / outcome.time_s
    verdict = "equal" if abs(ratio - 1) <= EQUAL else "met" if ratio < 1 else "missed"
    fits = outcome.peak_memory_bytes <= limit_bytes
    return {
        "name": name,
        "verdict": verdict if fits else "does not fit",
        "ratio": ratio,
        **times(outcome),
    }


def times(estimate: Estimate) -> dict[str, float]:
    """The figures of an estimate that results keep."""
    names = ("time_s", "compute_s", "communication_s", "peak_memory_bytes")
    return {name: getattr(estimate, name) for name in names}


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="the plan over hand layouts, by the target's own compiler")
    for head in ("hand layout", "step", "memory", "plan / hand", "verdict"):
        found.add_column(head)
    for row in rows:
        found.add_row(
            row["name"],
            seconds(row.get("time_s")),
            mebibytes(row.get("peak_memory_bytes")),
            f"{row['ratio']:.3f}" if "ratio" in row else "-",
            str(row["verdict"]),
        )
    return found
