"""Is the plan as fast as what people write by hand?

Question: the step time of a saved plan, relative to each baseline written as plain JAX
  (`experiments/handwritten`) on the same fake CPU devices.
Command: python -m experiments.tune --model=mlp --steps=0 --run=runs/mlp
         python -m experiments.compare --model=mlp --plan=runs/mlp/plan.json
Cost: a fresh process for each baseline, each up to --limit seconds of pairs; seven of the decoder's
  took 18 minutes.
Expected: a ratio of at most 1.00 (to two decimals) in every row. "undecided" counts as missed.

Pairs of steps are interleaved until the 95 % interval of their ratio is within 2 %, in one process
for each baseline: what comes within a few per cent of 1 is not known better than that
(docs/decisions/0020). The baselines get the plan's remat policy; --remat gives them another. Where
the plan accumulates gradients over parts of the batch, they do not: then not layouts alone are
compared, and the results say so. Writes
results/compare/<model>/<baseline>.json with all samples, and summary.json.
"""

import dataclasses
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.table import Table

_MODEL = flags.DEFINE_enum("model", "decoder", ["decoder", "mlp"], "The model, at its stated size.")
_PLAN = flags.DEFINE_string("plan", None, "The plan.json to measure.", required=True)
_DEVICES = flags.DEFINE_integer("devices", 8, "Fake CPU devices; as many as the plan has.")
_LIMIT = flags.DEFINE_float("limit", 240.0, "Seconds of pairs for each baseline.")
_REMAT = flags.DEFINE_enum(
    "remat", "plan", ["plan", "none", "dots", "full"], "Of the baselines; by default the plan's."
)
_OUT = flags.DEFINE_string("out", "results/compare", "Folder of the results.")
_BASELINE = flags.DEFINE_string("baseline", "", "Measure this one here; else all, in processes.")


def main(argv: list[str]) -> None:
    del argv
    folder = pathlib.Path(_OUT.value) / _MODEL.value
    folder.mkdir(parents=True, exist_ok=True)
    if _BASELINE.value:
        result = _measure(_BASELINE.value)
        _file(folder, _BASELINE.value).write_text(json.dumps(result, indent=1))
        return
    rows = [_in_fresh_process(folder, name) for name in _baselines()]
    summary = [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    Console().print(_table(rows))


def _baselines() -> dict[str, Any]:
    from experiments import sizes
    from experiments.handwritten import rules

    size = sizes.DECODER if _MODEL.value == "decoder" else sizes.MLP
    whole = rules.replicated(_DEVICES.value)
    found = rules.hand_layouts(_MODEL.value, size.model, _DEVICES.value)
    return {whole.name: whole, **found}


def _in_fresh_process(folder: pathlib.Path, baseline: str) -> dict[str, Any]:
    """One process for each pair: neither sees what another left in memory or in caches."""
    file = _file(folder, baseline)
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.compare", *sys.argv[1:], f"--baseline={baseline}"]
    try:
        # Beside the pairs: two compilations, and the last pairs of a slow baseline.
        code = subprocess.run(command, timeout=2 * _LIMIT.value + 300).returncode
        reason = f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        reason = "its process took too long"
    if file.exists():
        return json.loads(file.read_text())
    return {"baseline": baseline, "verdict": "undecided", "ratio": None, "reason": reason}


def _measure(baseline: str) -> dict[str, Any]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)

    import autoshard
    from experiments import pairs, sizes, tasks
    from experiments.handwritten import cases
    from experiments.handwritten.step import prepare

    decodes = _MODEL.value == "decoder"
    task = tasks.decoder_task(sizes.DECODER) if decodes else tasks.mlp_task(sizes.MLP)
    plan = autoshard.load_plan(_PLAN.value, task.model_fn, jax.devices())
    remat: Any = plan.knobs.get("remat", "none") if _REMAT.value == "plan" else _REMAT.value
    if decodes:
        model = dataclasses.replace(sizes.DECODER.model, remat=remat)
        size = dataclasses.replace(sizes.DECODER, model=model)
        case = cases.decoder_case(size)
    else:
        case = cases.mlp_case(sizes.MLP)
    layout = _baselines()[baseline]
    prepared = prepare(case, layout, layout.mesh(jax.devices()))
    batch = jax.device_put(case.sample(0), prepared.batch)

    found = pairs.compare(
        pairs.stepper(plan.step, plan.init(), plan.put(next(task.batches("train", 0)))),
        pairs.stepper(prepared.step, prepared.init(), batch),
        limit_s=_LIMIT.value,
    )
    return {
        "baseline": baseline,
        "verdict": pairs.verdict(found.ratio, found.decided),
        "plan_is": plan.trial.baseline if plan.trial else "",
        "plan": plan.candidate.to_json(),
        "baseline_remat": remat,
        "accumulate": plan.knobs.get("accumulate", 1),
        **dataclasses.asdict(found),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _file(folder: pathlib.Path, baseline: str) -> pathlib.Path:
    return folder / (re.sub(r"\W+", "_", baseline) + ".json")


def _table(rows: list[dict[str, Any]]) -> Table:
    plan_is = next((row["plan_is"] for row in rows if row.get("plan_is")), "")
    title = f"{_MODEL.value}: plan / baseline, "
    title += f"the plan is itself {plan_is}" if plan_is else "the plan is none of the baselines"
    table = Table("baseline", "ratio", "95 % interval", "pairs", "verdict", title=title)
    for row in rows:
        if row["ratio"] is None:
            table.add_row(row["baseline"], "-", "-", "0", row["verdict"])
        else:
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            count = str(len(row["first_s"]))
            table.add_row(row["baseline"], f"{row['ratio']:.3f}", interval, count, row["verdict"])
    return table


if __name__ == "__main__":
    app.run(main)
