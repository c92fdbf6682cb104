"""Writes the files of autoshard 0.1 that later versions must read, or refuse.

    PYTHONPATH=. python tests/goldens/make.py FOLDER    needs libtpu and the CUDA 12 plugin

The committed files come from the last commit with the words of 0.1. A later version of autoshard
writes other words: do not overwrite the files with it.

  plans-0.1/NAME.json     one plan for each entry of `CASES`
  plans-0.1.shardings.json  the sharding of each input, as version 0.1 read it from the plan
  journal-0.1.jsonl       the journal of the search that found `plain`
  calibration-0.1.json    the calibration of the same search
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import autoshard
from autoshard.lowering.problem import make_problem
from autoshard.plan.plan import Plan
from autoshard.program.program import trace
from autoshard.records.evidence import Evidence
from autoshard.records.layout import Constraints, Gather, Layout
from autoshard.space.baselines import baselines
from autoshard.space.space import Space
from autoshard.target.target import find_target
from tests import programs, workloads

FEW = autoshard.Budget(candidates=6, compiles=3, profiles=2, rounds=3)
UNMEASURED = autoshard.Budget(candidates=3, compiles=2, profiles=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One plan file.

    Attributes:
      model_fn: the model that the plan is for.
      make: (model_fn, folder) -> the plan.
      is_here: whether its devices are CPU devices.
    """

    model_fn: Callable[..., autoshard.Workload]
    make: Callable[[Callable[..., autoshard.Workload], pathlib.Path], Plan]
    is_here: bool = True


def with_rate(rate: float) -> autoshard.Workload:
    return workloads.mlp(rate)


def _plain(model_fn: Callable[..., autoshard.Workload], folder: pathlib.Path) -> Plan:
    kept = folder / "calibration"
    plan = autoshard.search(
        model_fn,
        jax.devices(),
        budget=FEW,
        journal=folder / "journal-0.1.jsonl",
        calibration=kept,
    )
    (written,) = kept.iterdir()
    written.rename(folder / "calibration-0.1.json")
    kept.rmdir()
    return plan


def _searched(
    model_fn: Callable[..., autoshard.Workload], folder: pathlib.Path, **options: object
) -> Plan:
    given = {"mesh": jax.devices(), "budget": UNMEASURED, **options}
    return autoshard.search(model_fn, **given)  # type: ignore[arg-type]


def _fixed(model_fn: Callable[..., autoshard.Workload], folder: pathlib.Path) -> Plan:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    fix = {"state['params']['w1']": jax.P("model"), "batch": "data"}
    return _searched(model_fn, folder, mesh=mesh, fix=fix)


def _unsearched(baseline: str, **changes: object) -> Callable[..., Plan]:
    """Makes a plan of the last baseline of a name, with fields of its layout changed."""

    def make(model_fn: Callable[..., autoshard.Workload], folder: pathlib.Path) -> Plan:
        target = find_target(jax.devices())
        subject = make_problem(trace(model_fn()), target, "free", None)
        found = [b.candidate.layout for b in baselines(subject.space) if b.name == baseline]
        layout = _changed(subject.space, found[-1], changes)
        analysis = subject.analysis_for(layout)
        return Plan(analysis, subject.space, target, layout, Evidence(notes=("not searched",)))

    return make


def _changed(space: Space, layout: Layout, changes: dict[str, object]) -> Layout:
    changed = dataclasses.replace(layout, **changes)  # type: ignore[arg-type]
    candidate = space.candidate(changed)
    reason = space.contains(candidate)
    wrong = [name for name, value in changes.items() if getattr(candidate.layout, name) != value]
    if reason is not None or wrong:
        raise ValueError(f"the layout with {changes} is not in the space: {reason or wrong}")
    return candidate.layout


CASES: dict[str, Case] = {
    "plain": Case(model_fn=workloads.mlp, make=_plain),
    "knobs": Case(
        model_fn=with_rate,
        make=lambda model_fn, folder: _searched(model_fn, folder, knobs={"rate": (0.1, 0.2)}),
    ),
    "fixed": Case(model_fn=workloads.mlp, make=_fixed),
    "gathered-once": Case(
        model_fn=programs.scanned_mlp,
        make=_unsearched(
            "FSDP x TP, gathered once", gather_loop_inputs=True, constraints=Constraints.MINIMAL
        ),
    ),
    "zero-1": Case(
        model_fn=programs.equal_width_mlp,
        make=_unsearched("ZeRO-1", constraints=Constraints.ALL),
    ),
    "conflict": Case(
        model_fn=programs.equal_width_mlp,
        make=_unsearched(
            "tensor parallel",
            gather=Gather.PARAMS_REPLICATED,
            conflict_losers=("*[1]:32", "0[0]:32", "1[1]:32"),
        ),
    ),
    "small-whole": Case(
        model_fn=programs.conv_net,
        make=_unsearched("FSDP, small whole"),
    ),
    "small-replicated": Case(
        model_fn=lambda: programs.grouped_experts(width=2 * programs.MLP),
        make=_unsearched("data x EP, small replicated"),
    ),
    "as-written": Case(model_fn=programs.with_constraints, make=_unsearched("as annotated")),
    "h100-1x8": Case(
        model_fn=workloads.mlp,
        make=lambda model_fn, folder: _searched(model_fn, folder, mesh="h100:1x8"),
        is_here=False,
    ),
    "v5e-2x4": Case(
        model_fn=workloads.mlp,
        make=lambda model_fn, folder: _searched(model_fn, folder, mesh="v5e:2x4"),
        is_here=False,
    ),
}


def input_shardings(plan: Plan) -> dict[str, object]:
    """Mesh axes of each dimension of each input, by pytree path; and the mesh."""
    paths = [leaf.path for leaf in plan.program.inputs]
    specs = [[list(axes) for axes in spec] for spec in plan.specs.inputs]
    return {"mesh": [[name, size] for name, size in plan.layout.mesh]} | dict(
        zip(paths, specs, strict=True)
    )


def main(folder: pathlib.Path) -> None:
    plans = folder / "plans-0.1"
    plans.mkdir(parents=True, exist_ok=True)
    expected = {}
    for name, case in CASES.items():
        plan = case.make(case.model_fn, folder)
        plan.save(str(plans / f"{name}.json"))
        expected[name] = input_shardings(plan)
    for path in (plans / "plain.json", folder / "journal-0.1.jsonl"):  # they name traces' folders
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"{folder}/", "runs/"), encoding="utf-8")
    (folder / "plans-0.1.shardings.json").write_text(
        json.dumps(expected, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(pathlib.Path(sys.argv[1]).absolute())
