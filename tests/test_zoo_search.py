"""Every kind of model goes through the search as it is, and what comes out trains."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import autoshard
from autoshard.integrations.flax import TrainState
from autoshard.records.trial import Measurement
from autoshard.rungs.profile import calibration_files
from autoshard.rungs.profile.calibration_files import calibrated
from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings
from autoshard.target.target import find_target
from experiments.zoo.cases import CASES, case
from tests.compiled import known_options

COMPILED = autoshard.Budget(candidates=8, compiles=1, profiles=0)
MEASURED = autoshard.Budget(candidates=8, compiles=3, profiles=2, rounds=2)
# One with tables, one with state besides its parameters, one in Linen with loops. Not CLIP:
# XLA's threads for CPU run out in some of its layouts, and its devices wait for each other.
MEASURED_CASES = ("recommender", "graph_network", "linen_recurrent")
# Those that are soon traced, judged and compiled; the others are marked slow.
QUICKLY = ("mlp", "plain_gpt")
STEPS = 4  # learning rates that warm up start at zero


@pytest.fixture(scope="module")
def hurried(calibration):
    """Every program here runs a few steps at most: compilers, here and in workers, hurry.

    A calibration by programs that were compiled in a hurry takes minutes: it is the others'.
    """
    constants = calibrated(find_target(jax.devices()), calibration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_files, "calibrated", lambda *_: constants)
        options = known_options()
        flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
        patch.setenv("XLA_FLAGS", flags)
        plain = jax.stages.Lowered.compile
        quickly = functools.partialmethod(plain, compiler_options=options)
        patch.setattr(jax.stages.Lowered, "compile", quickly)
        yield


@pytest.fixture(scope="module")
def compiler(hurried, tmp_path_factory):
    """In place of the session's, which was started without the flags."""
    folder = str(tmp_path_factory.mktemp("compiler"))
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=8, folder=folder))
    yield worker
    worker.close()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICKLY else pytest.mark.slow) for n in CASES]
)
def test_a_search_with_no_annotation_gives_a_plan_that_trains(quick, name):
    chosen = case(name, "small")
    measured = name in MEASURED_CASES
    plan = quick(chosen.workload, budget=MEASURED if measured else COMPILED)
    if measured:
        assert isinstance(plan.trial.profiled, Measurement)
        assert plan.trial.profiled.numerics == "exact"

    state, batch = plan.init(), plan.put(chosen.sample(0))
    losses = []
    for _ in range(STEPS):
        state, metrics = plan.step(state, batch)
        losses.append(float(metrics["loss"]))
    _, metrics = plan.step(with_params(plan.init(), state), batch)
    assert np.isfinite(losses).all()
    assert float(metrics["loss"]) < losses[0], losses


def with_params(state, trained):
    """`state` with the parameters of `trained`; all else, random keys too, as at first."""
    if not isinstance(state, TrainState):
        return trained
    return dataclasses.replace(state, params=trained.params)
