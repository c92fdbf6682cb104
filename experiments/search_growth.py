"""How does the cost of a search grow with devices and layers?

Question: CPU seconds until the best layout found is within 2 % of the predicted cost that ten
  times the budget finds, for 8 to 1024 devices and 4 to 96 unrolled layers.
Command: python -m experiments.search_growth --part=devices     (and --part=layers, --plot)
Cost: about 12 minutes on one core for the devices, an hour and more for the layers;
  no device, no compiler but this one's Shardy.
Expected: slower than linear in devices, no faster than linear in layers.

Rung 1 alone, for a model of the Llama class with unrolled layers, narrow enough that layouts of few
devices fit. CPU time: elapsed time would count other work on the machine. Results are added to
results/search_growth/<part>.json as they come; what is there is not run again. --plot draws them.
"""

import dataclasses
import json
import pathlib
import platform
import time
from typing import Any

import jax
from absl import app, flags

from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.host import machine
from autoshard.target.target import find_target
from autoshard.tuner.strategy import Beam
from experiments import pod_tasks
from experiments.rung1_search import climb

_PART = flags.DEFINE_enum("part", "devices", ["devices", "layers"], "What grows.")
_BUDGET = flags.DEFINE_integer(
    "budget", 40, "Candidates beside the baselines; ten times that rule."
)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Searches for each size.")
_PLOT = flags.DEFINE_bool("plot", False, "Only draw what was measured.")
_OUT = flags.DEFINE_string("out", "results/search_growth", "Folder of the figures.")

DEVICES = {
    "devices": (8, 16, 32, 64, 128, 256, 512, 1024),
    "layers": (64,),
}
LAYERS = {"devices": (4,), "layers": (4, 8, 16, 32, 64, 96)}
# A quarter of Llama-3-8B's width, one short sequence for each of 1024 devices.
SHAPE: dict[str, object] = {
    "d_model": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "mlp_dim": 4096,
    "vocab_size": 8192,
    "sequence": 512,
    "query_block": 512,
    "batch_size": 1024,
    "attention": "full",
    "scanned": False,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search: when it was how good.

    Attributes:
      curve: (CPU seconds since the first candidate, candidates judged, best predicted step) at each
        improvement.
      ready_s: tracing and analysis before the first candidate.
    """

    devices: int
    layers: int
    seed: int
    ready_s: float
    baselines: int
    judged: int
    total_s: float
    curve: tuple[tuple[float, int, float], ...]

    @property
    def within_s(self) -> float:
        """Seconds until within 2 % of the best of all, analysis included."""
        best = self.curve[-1][2]
        return self.ready_s + next(s for s, _, value in self.curve if value <= 1.02 * best)


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PART.value}.json"
    if _PLOT.value:
        plot(folder)
        return
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
    if data["runs"] and data.get("budget") != _BUDGET.value:
        raise app.UsageError(
            f"{path} has runs with --budget={data.get('budget')}, got {_BUDGET.value}: give another"
            " --out"
        )
    data |= {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "budget": _BUDGET.value,
    }
    done = {(r["devices"], r["layers"], r["seed"]) for r in data["runs"]}
    for layers in LAYERS[_PART.value]:
        for devices in DEVICES[_PART.value]:
            for seed in range(_SEEDS.value):
                if (devices, layers, seed) in done:
                    continue
                run = searched(devices, layers, seed, 10 * _BUDGET.value)
                data["runs"].append({**dataclasses.asdict(run), "within_s": run.within_s})
                path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
                print(
                    f"{devices:5} devices {layers:3} layers: ready {run.ready_s:.1f} s, within 2 %"
                    f" after {run.within_s:.1f} s of {run.ready_s + run.total_s:.1f}"
                    f" ({run.judged} candidates, {run.baselines} baselines)",
                    flush=True,
                )


def searched(devices: int, layers: int, seed: int, budget: int) -> Run:
    """Rung 1's part of a search, with the clock beside it."""
    start = time.process_time()
    target = find_target(f"h100:{devices // 8}x8")
    cost = cost_model(target)
    model_fn, _ = pod_tasks.task("llama3-8b", layers=layers, **SHAPE)
    subject = make_problem(trace(model_fn()), target, "free", None)
    ready_s = time.process_time() - start
    room = target.memory_bytes
    climbed = climb(subject, cost, room, Beam(room), budget, seed)
    return Run(
        devices=devices,
        layers=layers,
        seed=seed,
        ready_s=ready_s,
        baselines=climbed.baselines,
        judged=climbed.baselines + climbed.judged,
        total_s=climbed.cpu_s,
        curve=tuple((i.cpu_s, climbed.baselines + i.candidates, i.time_s) for i in climbed.curve),
    )


def plot(folder: pathlib.Path) -> None:
    """Draws the parts that are there."""
    from matplotlib import pyplot

    parts = [part for part in ("devices", "layers") if (folder / f"{part}.json").exists()]
    figure, panes = pyplot.subplots(1, len(parts), figsize=(5 * len(parts), 4), squeeze=False)
    for pane, part in zip(panes[0], parts, strict=True):
        runs = json.loads((folder / f"{part}.json").read_text())["runs"]
        sizes = [r[part] for r in runs]
        pane.loglog(sizes, [r["within_s"] for r in runs], "o-", label="within 2 %")
        pane.loglog(sizes, [r["total_s"] / r["judged"] for r in runs], "s--", label="a candidate")
        first = runs[0]["within_s"] / sizes[0]
        pane.loglog(sizes, [first * n for n in sizes], ":", color="grey", label="linear")
        pane.set_xlabel(part)
        pane.set_ylabel("seconds, one core")
        pane.legend()
    figure.tight_layout()
    figure.savefig(folder / "growth.png", dpi=120)


if __name__ == "__main__":
    app.run(main)
