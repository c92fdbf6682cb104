"""Runs of pods: one of another size takes neither the files nor the journal of the full model."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import pod_sizes

ROOT = pathlib.Path(__file__).parents[2]

PLAN = """
import pathlib, sys
from absl import app
from experiments import plan_pod
def search(*_, journal, **__):
    pathlib.Path("place").write_text(str(journal.parent))
    sys.exit()
class Pod:
    device_count = 256
plan_pod.find_target = lambda _: Pod
plan_pod.autoshard.search = search
app.run(plan_pod.main)
"""


def place(cwd: pathlib.Path, *options: str) -> str:
    """Where a run with these options keeps its journal."""
    subprocess.run(
        [sys.executable, "-c", PLAN, "--target=v5e:16x16", *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    return (cwd / "place").read_text()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--batch=256",), "llama3-8b-v5e-16x16"),
        (
            ("--batch=512", "--layers=4", "--noscanned"),
            "llama3-8b-v5e-16x16-unrolled-batch_size-512-layers-4",
        ),
    ],
)
def test_a_plan_of_another_size_has_a_run_folder_of_its_own(
    tmp_path: pathlib.Path, options: tuple[str, ...], name: str
) -> None:
    assert place(tmp_path, *options) == f"runs/pod-{name}"


def test_the_recorded_plans_are_of_full_size_and_called_so() -> None:
    devices = {"h100:8x8": 64, "v5e:16x16": 256, "v5p:4x4x4": 64}
    paths = sorted((ROOT / "results" / "plan_pod").glob("*.json"))
    assert paths
    for path in paths:
        figures = json.loads(path.read_text(encoding="utf-8"))
        model, target = figures["model"], figures["target"]
        full = pod_sizes.full_size(model, devices[target])
        assert figures["batch_size"] == full.batch_size
        assert path.stem == pod_sizes.run_name(model, target, {}, scanned=figures["scanned"])
