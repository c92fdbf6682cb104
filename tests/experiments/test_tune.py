"""The first command of a newcomer, in small."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import autoshard
from autoshard.records.trial import Measurement
from experiments import sizes, tasks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_what_is_tuned_is_trained_and_kept(
    calibration: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(calibration, tmp_path / ".cache" / "autoshard")
    run = tmp_path / "run"
    small = ["--candidates=4", "--compiles=1", "--profiles=1", "--steps=3", "--checkpoint"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.tune", "--model=mlp", f"--run={run}", *small],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "The winner" in done.stdout and "validation loss" in done.stdout
    steps = [json.loads(line)["step"] for line in (run / "training.jsonl").read_text().splitlines()]
    assert steps[0] == 1 and steps[-1] == 3
    assert (run / "journal.jsonl").exists() and list(run.glob("**/000003"))
    model_fn = tasks.mlp_task(sizes.MLP).model_fn
    plan = autoshard.load_plan(run / "plan.json", model_fn, jax.devices()[:8])
    kept = json.loads((run / "plan.json").read_text())["candidate"]
    assert plan.candidate.to_json() == kept
    assert any(isinstance(trial.profiled, Measurement) for trial in plan.evidence.trials)
