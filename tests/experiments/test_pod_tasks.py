"""The pods' workloads: full size is only traced, the miniatures are searched and run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.program.analysis import analyse
from autoshard.program.program import trace
from autoshard.records.trial import Estimate
from experiments.pod_tasks import task
from tests.compiled import compiled


@pytest.mark.parametrize(
    ("name", "params", "batch"),
    [("llama3-8b", 8_030_261_248, (128, 8193)), ("mixtral", 46_702_792_704, (256, 4097))],
)
def test_full_size_allocates_nothing(name, params, batch):
    model_fn, _ = task(name)
    workload = model_fn()
    state = jax.eval_shape(workload.init)
    after, metrics = jax.eval_shape(workload.step, state, workload.batch)
    assert workload.batch.shape == batch
    assert sum(x.size for x in jax.tree.leaves(state.params)) == params
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {
        jnp.dtype("float32")
    }
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after)
    assert jax.tree.all(same)
    assert metrics["loss"].shape == ()


def test_sizes_are_overridden_by_name():
    model_fn, knobs = task("llama3-tiny", layers=3, scanned=False, batch_size=8, accumulate=2)
    workload = model_fn(remat="dots")
    state = jax.eval_shape(workload.init)
    assert len(state.params["layers"]) == 3
    assert workload.batch.shape == (8, 65)
    assert knobs == {"remat": ("full", "dots", "none"), "accumulate": (2, 1, 4)}


def test_bad_names_and_sizes_are_refused():
    with pytest.raises(ValueError, match="unknown model 'llama'"):
        task("llama")
    with pytest.raises(ValueError, match=r"unknown sizes \['experts'\]"):
        task("llama3-tiny", experts=4)
    with pytest.raises(ValueError, match="accumulate=3 must divide batch_size=16"):
        task("llama3-tiny", accumulate=3)


def test_the_experts_are_one_logical_axis():
    model_fn, _ = task("mixtral-tiny")
    axes = analyse(trace(model_fn()), "cpu").axes.axes
    inside = "state.params['layers']['experts']"
    found = [axis for axis in axes if f"{inside}['down'][1]" in axis.where]
    assert [axis.size for axis in found] == [4]
    assert {f"{inside}['gate'][1]", f"{inside}['up'][1]", f"{inside}['router'][2]"} <= set(
        found[0].where
    )
    assert not found[0].is_loop


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3-tiny", "mixtral-tiny"])
def test_the_miniatures_are_searched(name, quick):
    model_fn, _ = task(name)
    plan = quick(model_fn, budget=autoshard.Budget(candidates=6, compiles=1, profiles=0))
    assert isinstance(plan.trial.compiled, Estimate)
    assert plan.trial.compiled.peak_memory_bytes <= plan.evidence.memory_limit_bytes


@pytest.mark.parametrize("name", ["llama3-tiny", "mixtral-tiny"])
def test_the_miniatures_learn(name):
    workload = task(name)[0]()
    state, batch = compiled(workload.init)(), workload.sample(jax.random.key(0))
    step, losses = compiled(workload.step, state, batch), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(jax.tree.leaves(jax.tree.map(np.sum, jax.device_get(state)))).all()
    assert losses[2] < losses[1] < losses[0]
