"""The hand-written layouts of models of text compute what their workloads do."""

import jax
import numpy as np
import pytest

from experiments.handwritten import steps, train_steps
from experiments.handwritten.layouts import HandLayout
from experiments.zoo.cases import case
from tests.compiled import compiled
from tests.experiments import hand_layouts
from tests.experiments.hand_layouts import gathered, initial, of, sent, specs


@pytest.mark.parametrize(("name", "layout"), hand_layouts.every(hand_layouts.TEXT))
def test_a_layout_computes_what_the_workload_does(name, layout):
    hand_layouts.check(name, layout)


@pytest.mark.slow
def test_a_layout_trains_with_the_factored_moments_of_its_case():
    chosen = case("encoder_decoder", "small")
    step, init = train_steps.train_step(chosen)
    layout = steps.hand_steps(chosen, 8)["fsdp x tensor parallel 4x2"]
    prepared = steps.prepare(chosen, layout, jax.devices())
    params = initial("encoder_decoder")["params"]
    before = {**jax.eval_shape(init), "step": np.int32(0), "params": params}
    before["opt_state"] = chosen.optimizer.init(params)
    before = jax.tree.map(np.asarray, before)
    losses = []
    for run, state in (
        (jax.jit(step), before),
        (prepared.step, jax.device_put(before, prepared.state)),
    ):
        batch = chosen.sample(0)
        quick = compiled(run, state, batch)
        for _ in range(3):
            if run is prepared.step:
                batch = jax.device_put(batch, prepared.batch)
            state, metrics = quick(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)
    assert losses[2] < losses[0]


def test_gradients_that_are_apart_are_summed_behind_the_loops():
    """Of `jax.jit` alone the weights of time steps are summed over the devices at each step."""
    of_jit = sent("recurrent", "data parallel")
    apart = sent("recurrent", "data parallel, gradients apart")
    kinds = {kind for kind, _ in of_jit + apart}
    assert kinds == {"all_reduce"}
    assert max(n for _, n in of_jit) >= of("recurrent").config.sequence
    assert sum(n for _, n in apart) <= len(jax.tree.leaves(initial("recurrent")["params"])) + 2


def test_a_model_that_changes_more_than_its_parameters_has_no_gradients_apart():
    chosen = of("resnet50")
    layout = HandLayout(
        name="apart",
        axes=(("data", 8),),
        activations={"batch": ("data",)},
        gradients_apart=("data",),
    )
    prepared = steps.prepare(chosen, layout, jax.devices())
    with pytest.raises(ValueError, match="apart: expected a model that changes nothing but its"):
        jax.eval_shape(prepared.step, jax.eval_shape(prepared.init), chosen.batch())


@pytest.mark.parametrize("name", ["state_space", "recurrent"])
def test_tensor_parallelism_gathers_no_parameter(name):
    shapes = {shape for path, (shape, _, _) in specs(name, "tensor parallel").items()}
    # Nor one of a layer alone, in a loop over stacked ones.
    shapes |= {shape[1:] for shape in shapes}
    assert not {shape for shape in gathered(name, "tensor parallel") if len(shape) > 1} & shapes
