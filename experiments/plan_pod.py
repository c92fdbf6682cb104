"""Plan a large model for a pod that is not here, and compare the plan with hand layouts.

Question: what layout does the search find for a Llama-3-8B-class model, or a Mixtral-class mixture
  of experts, on hardware that this machine does not have; what does the search cost; is the plan
  at least as fast as what people write by hand, as the target's own compiler sees it?
Command: python -m experiments.plan_pod --model=llama3-8b --target=h100:8x8
         (needs pip install -e '.[train,cuda]', for TPUs '.[train,tpu]'; --target=v5p:4x4x4 or
         v5e:16x16)
Cost: half a minute to two for GPUs on 2 cores (docs/pods.md has what each search took), the hand
  layouts as much again; for TPUs libtpu takes about 80 CPU-seconds a program (0.5 s of 44 s are
  passes over HLO, the rest makes machine code, which nothing here needs: a compiler that stopped
  before it would do in a tenth of the time), so --compiles=6 four minutes on an idle machine, and
  the hand layouts seven.
Expected: the ranked table; the plan over every hand layout at most 1 (they are told to be equal
  where they differ by less than 0.01 %).

Writes results/plan_pod/<model>-<target>.json, the plan and the journal beside the run; the names of
a run with another --batch or --layers than the full size's say so. A run folder with a journal is
gone on from, and its times are then marked as too short: give a new --run.
"""

import dataclasses
import json
import pathlib
import platform
import time
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard.compat.xla.compilers import compiler_version
from autoshard.records.trial import Estimate, Failure
from autoshard.records.words import mebibytes, seconds
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.host import machine
from autoshard.target.target import find_target
from experiments import hand_judge, pod_sizes, pod_tasks
from experiments.handwritten_pod.baselines import baselines
from experiments.since_start import since_start_s

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

EQUAL = 1e-4
"""Two programs are equal whose times differ by less: a few launches of kernels in seconds."""


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
    elapsed_s = since_start_s()
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Planned in {elapsed_s:.1f} s since the process was started"
        f"{', with answers of an earlier run' if resumed else ''}.",
        highlight=False,
    )
    plan.save(str(run / "plan.json"))
    figures = {**_figures(plan, size, overrides, elapsed_s), "resumed": resumed}
    if _BY_HAND.value:
        hand_size = size.replace(**plan.knobs)
        begun = time.perf_counter()
        by_hand = hand_judge.judged(
            baselines(target.device_count, hand_size),
            hand_size,
            target,
            cost_model(target),
            run / "by_hand",
        )
        figures["by_hand"] = [_row(plan, n, outcome) for n, outcome in by_hand.items()]
        figures["by_hand_s"] = time.perf_counter() - begun
        console.print(_table(figures["by_hand"]))
    if _OUT.value:
        folder = pathlib.Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        console.print(
            f"Figures in {path}, plan and journal in {run}.", markup=False, highlight=False
        )


def _figures(
    plan: autoshard.Plan, size: pod_sizes.PodSize, overrides: dict[str, int], elapsed_s: float
) -> dict[str, Any]:
    """What the search found and cost, without the trials: those are in the plan file."""
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
        "elapsed_s": {**plan.evidence.elapsed_s, "with_imports": elapsed_s},
        "false_rejections": plan.evidence.false_rejections,
        "finalists": [
            {
                "baseline": trials[i].baseline,
                "layout": trials[i].candidate.layout.to_json(),
                "knobs": dict(trials[i].candidate.knobs),
                **{
                    rung: {
                        k: getattr(estimate, k)
                        for k in ("time_s", "compute_s", "communication_s", "peak_memory_bytes")
                    }
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


def _row(plan: autoshard.Plan, name: str, outcome: Estimate | Failure) -> dict[str, Any]:
    """One hand layout beside the plan."""
    assert plan.trial is not None and isinstance(plan.trial.compiled, Estimate)
    if isinstance(outcome, Failure):
        return {"name": name, "verdict": outcome.kind, "message": outcome.message[:300]}
    fits = outcome.peak_memory_bytes <= plan.evidence.memory_limit_bytes
    ratio = plan.trial.compiled.time_s / outcome.time_s
    verdict = "equal" if abs(ratio - 1) <= EQUAL else "met" if ratio < 1 else "missed"
    return {
        "name": name,
        "verdict": verdict if fits else "does not fit",
        "ratio": ratio,
        **{
            k: v
            for k, v in dataclasses.asdict(outcome).items()
            if k in ("time_s", "compute_s", "communication_s", "peak_memory_bytes")
        },
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="the plan over hand layouts, by the target's own compiler")
    for head in ("hand layout", "step", "memory", "plan / hand", "verdict"):
        table.add_column(head)
    for row in rows:
        table.add_row(
            row["name"],
            seconds(row.get("time_s")),
            mebibytes(row.get("peak_memory_bytes")),
            f"{row['ratio']:.3f}" if "ratio" in row else "-",
            str(row["verdict"]),
        )
    return table


if __name__ == "__main__":
    app.run(main)
