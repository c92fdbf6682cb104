"""The training loop on a stand-in for a plan: plain jit on one device."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def test_a_second_run_in_the_same_folder_keeps_what_the_first_left(tmp_path):
    """Orbax refuses a destination that is there; it used to be asked after the last step."""
    lines, states = [], []
    for seed in (0, 1):
        state, _ = training.train(
            fake_plan(),
            batches(seed),
            2,
            units_per_step=8,
            log=lines.append,
            figures=tmp_path / "training.jsonl",
            checkpoint_folder=tmp_path / "checkpoints",
        )
        states.append(state)
    said = [line for line in lines if line.startswith("checkpoint: ")]
    first, second = tmp_path / "checkpoints" / "000002", tmp_path / "checkpoints" / "000002-2"
    assert said == [f"checkpoint: {first}", f"checkpoint: {second}"]
    abstract = jax.eval_shape(workload().init)
    here = jax.tree.map(lambda _: jax.devices()[0], abstract)
    shardings = jax.tree.map(jax.sharding.SingleDeviceSharding, here)
    for path, state in zip((first, second), states, strict=True):
        jax.tree.map(
            np.testing.assert_array_equal, checkpoints.restore(path, abstract, shardings), state
        )
    kept = [(tmp_path / name).read_text() for name in ("training.jsonl", "training-2.jsonl")]
    assert kept[0] != kept[1]
    assert [json.loads(line)["step"] for line in kept[1].splitlines()] == [1, 2]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError])
def test_what_ends_the_loop_early_costs_no_trained_state(tmp_path, ending):
    def until_it_breaks():
        yield from itertools.islice(batches(0), 3)
        raise ending("the disk of the data is gone")

    figures = tmp_path / "training.jsonl"
    with pytest.raises(ending):
        training.train(
            fake_plan(),
            until_it_breaks(),
            10,
            units_per_step=8,
            log=lambda _: None,
            figures=figures,
            checkpoint_folder=tmp_path / "checkpoints",
        )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000003"]
    abstract = jax.eval_shape(workload().init)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, abstract)
    restored = checkpoints.restore(tmp_path / "checkpoints" / "000003", abstract, shardings)
    assert int(restored.step) == 3 and figures.read_text().count("loss") >= 1


def test_a_step_that_fails_has_donated_its_state(tmp_path):
    step = fake_plan().step

    def failing(state, batch):
        new, metrics = step(state, batch)
        if int(new.step) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return new, metrics

    plan = dataclasses.replace(fake_plan(), step=failing)
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        training.train(
            plan,
            batches(0),
            10,
            units_per_step=8,
            log=lambda _: None,
            figures=tmp_path / "training.jsonl",
            checkpoint_folder=tmp_path / "checkpoints",
        )
    assert not (tmp_path / "checkpoints").exists()
    (line,) = (tmp_path / "training.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1, "the log is not gone with the state"


def test_a_checkpoint_is_named_by_all_steps_that_its_state_has_behind_it(tmp_path):
    plan = fake_plan()
    state, _ = training.train(plan, batches(0), 3, units_per_step=8, log=lambda _: None)
    _, history = training.train(
        plan,
        batches(1),
        2,
        units_per_step=8,
        log=lambda _: None,
        state=state,
        done=3,
        checkpoint_folder=tmp_path,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["000005"]
    assert [line.step for line in history] == [4, 5]


def test_the_figures_are_written_before_the_checkpoint(tmp_path, monkeypatch):
    def full(path, state):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "save", full)
    figures = tmp_path / "training.jsonl"
    with pytest.raises(OSError, match="no space"):
        training.train(
            fake_plan(),
            batches(0),
            2,
            units_per_step=8,
            log=lambda _: None,
            figures=figures,
            checkpoint_folder=tmp_path,
        )
    assert len(figures.read_text().splitlines()) == 2


def test_figures_that_cannot_be_written_cost_no_state(tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    options = {"units_per_step": 8, "log": lambda _: None, "checkpoint_folder": tmp_path / "saved"}
    with pytest.raises(OSError):
        training.train(fake_plan(), batches(0), 2, figures=tmp_path / "file" / "f.jsonl", **options)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["000002"]
    made = tmp_path / "new" / "folder" / "f.jsonl"
    training.train(fake_plan(), batches(0), 2, figures=made, **options)
    assert made.exists()


def test_batches_that_end_early_are_told_and_the_checkpoint_says_how_many(tmp_path):
    told = []
    evaluation = training.Evaluation(metrics=evaluate, batches=(next(batches(9)),), every=100)
    _, history = training.train(
        fake_plan(),
        itertools.islice(batches(0), 3),
        100,
        units_per_step=8,
        log=told.append,
        evaluation=evaluation,
        checkpoint_folder=tmp_path,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]
    assert "the batches ended after 3 of 100 steps" in told
    assert history[-1].step == 3 and history[-1].validation_loss is not None
