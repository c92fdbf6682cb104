"""The training loop on a stand-in for a plan: plain jit on one device."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.integrations.flax import nnx_model, nnx_workload
from experiments import checkpoints, training


@dataclasses.dataclass(frozen=True)
class FakePlan:
    init: Callable[[], Any]
    step: Callable[[Any, Any], Any]
    put: Callable[[Any], Any] = jax.device_put
    jit: Callable[[Any], Any] = jax.jit


def make_model():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def loss(model, x):
    return jnp.mean((model(x) - jnp.roll(x, 1, axis=1)) ** 2), {}


def workload():
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return nnx_workload(make_model, loss, optax.adam(3e-2), batch)


def fake_plan():
    return FakePlan(init=workload().init, step=jax.jit(workload().step, donate_argnums=0))


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.standard_normal((8, 4)).astype(np.float32)


def evaluate(state, batch):
    return {"loss": loss(nnx_model(state, make_model), batch)[0]}


def test_loss_falls_and_the_log_says_so():
    lines = []
    state, history = training.train(
        fake_plan(),
        batches(0),
        100,
        units_per_step=8,
        unit="examples",
        evaluation=training.Evaluation(
            metrics=evaluate, batches=tuple(itertools.islice(batches(1), 2)), every=50
        ),
        log=lines.append,
        log_every=20,
    )
    assert int(state.step) == 100
    assert [line.step for line in history] == [1, 20, 40, 50, 60, 80, 100]
    validation = [line.validation_loss for line in history if line.validation_loss is not None]
    assert len(validation) == 2
    assert validation[1] < validation[0]
    assert history[0].units_per_s is None  # the first step compiled
    assert all(line.units_per_s > 0 for line in history[1:])
    assert lines[3].startswith("step    50  loss ")
    assert "examples/s  validation loss" in lines[3]


def test_training_goes_on_from_a_state():
    plan = fake_plan()
    state, _ = training.train(plan, batches(0), 3, units_per_step=8, log=lambda _: None)
    state, _ = training.train(
        plan, batches(0), 2, units_per_step=8, log=lambda _: None, state=state
    )
    assert int(state.step) == 5


def test_a_checkpoint_comes_back_with_other_shardings(tmp_path):
    lines = []
    state, _ = training.train(
        fake_plan(),
        batches(0),
        2,
        units_per_step=8,
        log=lines.append,
        checkpoint_folder=tmp_path,
    )
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    abstract = jax.eval_shape(workload().init)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec("data") if x.shape else PartitionSpec()),
        abstract,
    )
    restored = checkpoints.restore(tmp_path / "000002", abstract, shardings)
    assert lines[-1] == f"checkpoint: {tmp_path / '000002'}"
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored):
        assert leaf.sharding.mesh.size == 4, path
    jax.tree.map(np.testing.assert_array_equal, restored, state)
