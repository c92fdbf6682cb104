"""On a real GPU, with `scripts/test -m gpu`: measuring, device planes of the trace, calibration."""

import jax
import numpy as np
import pytest

import autoshard
from autoshard.records.trial import Measurement
from autoshard.rungs.profile.calibration_files import calibrated
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.target import find_target
from tests import workloads

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> list[jax.Device]:
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        pytest.skip("this run is held to CPU devices: scripts/test -m gpu runs these tests")
    try:
        return jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX finds no GPU: {error}")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder for the calibration, which is made once for all tests here."""
    return tmp_path_factory.mktemp("calibration")


def test_a_search_measures_on_the_gpu_and_the_plan_runs(gpus, kept, tmp_path) -> None:
    plan = autoshard.search(
        workloads.mlp,
        gpus[:1],
        budget=autoshard.Budget(candidates=4, compiles=1, profiles=1, rounds=5),
        journal=tmp_path / "journal.jsonl",
        calibration=kept,
    )
    measured = plan.trial.profiled
    assert isinstance(measured, Measurement) and measured.numerics == "unsharded"
    assert measured.devices and measured.devices[0].compute_s > 0, "no device plane in the trace"
    assert plan.check().passed, "a step does not agree with itself"
    state, batch = plan.init(), plan.put(workloads.batch_of())
    losses = []
    for _ in range(5):
        state, metrics = plan.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]


def test_calibration_finds_rates_a_gpu_may_have(gpus, kept) -> None:
    chip = chip_of_kind(gpus[0].device_kind)
    if chip is None:
        pytest.skip(f"{gpus[0].device_kind} is not in the catalogue: nothing to compare with")
    constants = calibrated(find_target(gpus[:1]), kept)
    rates = dict(constants.contract_by_dtype)
    assert constants.contract_flops_per_s == rates["f32"]
    for dtype in ("bf16", "f32"):
        assert 0.2 < rates[dtype] / chip.flops[dtype].value < 1.1, dtype
    assert 0.2 < constants.bandwidth_bytes_per_s / chip.memory_bandwidth.value < 1.1
    # A mix of operations, of which some are many instructions.
    assert 0.005 < constants.element_flops_per_s / chip.element_flops.value < 1.1
    assert 1e-7 < constants.launch_s < 1e-4
