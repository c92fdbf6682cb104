"""Plan a large model for a pod that is not here, and compare the plan with hand layouts.

Question: what layout does the search find for a Llama-3-8B-class model, or a Mixtral-class mixture
  of experts, on hardware that this machine does not have; what does the search cost; is the plan
  at least as fast as what people write by hand, as the target's own compiler sees it?
Command: python -m experiments.plan_pod --model=llama3-8b --target=h100:8x8
         (needs pip install -e '.[train,cuda]', for TPUs '.[train,tpu]'; --target=v5p:4x4x4 or
         v5e:16x16)
Cost: half a minute to two for GPUs on 2 cores, the hand layouts as much again. libtpu takes about
  80 CPU-seconds a program: --compiles=6 four minutes on an idle machine, the hand layouts seven.
Expected: the ranked table; the plan over every hand layout at most 1 ("equal" if they differ by
  less than 0.01 %).

Writes results/plan_pod/<model>-<target>.json, and the plan and the journal into the run folder. A
run with another --batch or --layers than the full size's has them in its name. A run folder with a
journal is resumed: its times are too short and are marked so. Give a new --run to measure them.
"""

import json
import os
import pathlib
import platform
import time
from typing import Any

import jax
from absl import app, flags
from rich.console import Console

import autoshard
from autoshard.compat.xla.compilers import compiler_version
from autoshard.records.trial import Estimate
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.host import machine
from autoshard.target.target import find_target
from experiments import pod_by_hand, pod_sizes, pod_tasks
from experiments.handwritten.cases import pod_case
from experiments.handwritten.rules import pod_layouts

_MODEL = flags.DEFINE_enum("model", "llama3-8b", sorted(pod_sizes.POD_SIZES), "What to plan.")
_TARGET = flags.DEFINE_string("target", "h100:8x8", "Hardware; autoshard.targets() lists chips.")
_BATCH = flags.DEFINE_integer("batch", 0, "Sequences in the global batch; 0 for the full size's.")
_LAYERS = flags.DEFINE_integer("layers", 0, "Blocks; 0 for the full size's.")
_SCANNED = flags.DEFINE_bool("scanned", True, "One loop over the layers, or all of them unrolled.")
_REMAT = flags.DEFINE_list("remat", ["full"], "Remat policies to search: full, dots, none.")
_CANDIDATES = flags.DEFINE_integer("candidates", 150, "Layouts propagated.")
_COMPILES = flags.DEFINE_integer("compiles", 10, "Programs compiled.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the search.")
_BY_HAND = flags.DEFINE_bool("by_hand", True, "Judge the hand layouts too.")
_RUN = flags.DEFINE_string("run", "", "Run folder; by default runs/pod-<name of the figures>.")
_OUT = flags.DEFINE_string("out", "results/plan_pod", "Folder of the figures; empty for none.")


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    console = Console()
    target = find_target(_TARGET.value)
    full = pod_sizes.full_size(_MODEL.value, target.device_count)
    overrides = pod_sizes.differing(full, batch_size=_BATCH.value, layers=_LAYERS.value)
    size = full.replace(**overrides, scanned=_SCANNED.value)
    name = pod_sizes.run_name(_MODEL.value, _TARGET.value, overrides, _SCANNED.value)
    run = pathlib.Path(_RUN.value or f"runs/pod-{name}")
    run.mkdir(parents=True, exist_ok=True)
    journal = run / "journal.jsonl"
    resumed = journal.exists()
    model_fn, _ = pod_tasks.task(
        _MODEL.value,
        batch_size=size.batch_size,
        layers=size.model.layers,
        scanned=_SCANNED.value,
    )
    plan = autoshard.search(
        model_fn,
        _TARGET.value,
        knobs={"remat": tuple(_REMAT.value)},
        budget=autoshard.Budget(
            candidates=_CANDIDATES.value, compiles=_COMPILES.value, compile_seconds=600.0
        ),
        journal=journal,
        seed=_SEED.value,
    )
    cpu_s = sum(os.times()[:4])  # of this process and of the workers that ended
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Planned with {cpu_s:.1f} CPU seconds of all processes, imports included"
        f"{', and answers of an earlier run' if resumed else ''}.",
        highlight=False,
    )
    plan.save(str(run / "plan.json"))
    figures = {**_figures(plan, size, overrides, cpu_s), "resumed": resumed}
    if _BY_HAND.value:
        begun = time.perf_counter()
        layouts = pod_layouts(size.model, target.device_count)
        case = pod_case(size.replace(**plan.knobs))
        found = pod_by_hand.judged(case, layouts, target, cost_model(target))
        limit = plan.evidence.memory_limit_bytes
        figures["by_hand"] = pod_by_hand.rows(figures["predicted_s"], limit, found)
        figures["by_hand_s"] = time.perf_counter() - begun
        console.print(pod_by_hand.table(figures["by_hand"]))
    if _OUT.value:
        folder = pathlib.Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        console.print(
            f"Figures in {path}, plan and journal in {run}.", markup=False, highlight=False
        )


def _figures(
    plan: autoshard.Plan, size: pod_sizes.PodSize, overrides: dict[str, int], cpu_s: float
) -> dict[str, Any]:
    """The plan, its cost and the finalists; the plan file has the other trials."""
    trials = plan.evidence.trials
    winner = plan.trial
    assert winner is not None and isinstance(winner.compiled, Estimate)
    compiled = [t.compiled for t in trials if t.compiled is not None]
    counted = [
        c for c in compiled if isinstance(c, Estimate) or (c.stage == "compile" and c.elapsed_s)
    ]
    return {
        "model": _MODEL.value,
        "target": _TARGET.value,
        "scanned": _SCANNED.value,
        "remat": _REMAT.value,
        "batch_size": size.batch_size,
        "layers": size.model.layers,
        "overrides": overrides,
        "layout": plan.layout.to_json(),
        "knobs": dict(plan.knobs),
        "baseline": winner.baseline,
        "predicted_s": winner.compiled.time_s,
        "exposed_s": winner.compiled.exposed_s,
        "unmodelled": winner.compiled.unmodelled,
        "assumptions": winner.compiled.assumptions,
        "peak_bytes": winner.compiled.peak_memory_bytes,
        "limit_bytes": plan.evidence.memory_limit_bytes,
        "candidates": plan.evidence.candidates,
        "compiles": len(counted),
        "elapsed_s": plan.evidence.elapsed_s,
        "cpu_s": cpu_s,
        "false_rejections": plan.evidence.false_rejections,
        "finalists": [
            {
                "baseline": trials[i].baseline,
                "layout": trials[i].candidate.layout.to_json(),
                "knobs": dict(trials[i].candidate.knobs),
                **{
                    rung: pod_by_hand.times(estimate)
                    for rung, estimate in (
                        ("rung1", trials[i].propagated),
                        ("rung2", trials[i].compiled),
                    )
                    if isinstance(estimate, Estimate)
                },
            }
            for i in plan.evidence.ranking
        ],
        "compiler": compiler_version(plan.target.lowering_platform),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    app.run(main)
