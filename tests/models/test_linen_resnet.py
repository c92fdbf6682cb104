"""The residual network in Linen: the NNX module's variables, and its function of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import resnet
from models.linen_resnet import ResNet, loss, sample
from models.resnet import RESNET_50, ResNetConfig
from tests.compiled import compiled
from tests.models.descent import made, parameter_count

SMALL = ResNetConfig(image=16, width=4, blocks=(1, 2))


def variables(config):
    image_BHWC = jnp.zeros((1, config.image, config.image, config.channels))
    return compiled(lambda: ResNet(config).init(jax.random.key(0), image_BHWC))()


@pytest.mark.slow
def test_training_lowers_the_loss():
    config, optimizer = ResNetConfig(), optax.adam(3e-3)
    initial = variables(config)

    def step(params, averages, opt_state, batch):
        def run(params):
            changed = {}

            def apply(image_BHWC, *, train):
                logits_BY, after = ResNet(config).apply(
                    {"params": params, "batch_stats": averages},
                    image_BHWC,
                    train=train,
                    mutable=["batch_stats"],
                )
                changed.update(after)
                return logits_BY

            return loss(apply, batch)[0], changed["batch_stats"]

        (value, averages), gradients = jax.value_and_grad(run, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), averages, opt_state

    params, averages = initial["params"], initial["batch_stats"]
    opt_state, losses = optimizer.init(params), []
    step = compiled(step, params, averages, opt_state, sample(0, 64, config))
    for seed in range(30):
        value, params, averages, opt_state = step(
            params, averages, opt_state, sample(seed, 64, config)
        )
        losses.append(float(value))
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), averages, initial["batch_stats"])
    assert jax.tree.all(moved)


@pytest.mark.slow
def test_the_variables_of_nnx_give_the_logits_and_averages_of_nnx():
    graphdef, state = nnx.split(made(resnet.ResNet, SMALL))
    rng = np.random.default_rng(0)
    # No variable may have a value that hides another: norms start as the identity or at zero.
    state = jax.tree.map(lambda x: x + 0.2 * rng.random(x.shape, np.float32), state)
    given = in_linen(state)
    assert jax.tree.map(jnp.shape, variables(SMALL)) == jax.tree.map(jnp.shape, given)
    image_BHWC = sample(0, 8, SMALL)["image_BHWC"]

    def nnx_apply(state):
        model = nnx.merge(graphdef, state)
        return model(image_BHWC, train=True), model(image_BHWC), nnx.state(model)

    def linen_apply(variables):
        module = ResNet(SMALL)
        trained_BY, changed = module.apply(
            variables, image_BHWC, train=True, mutable=["batch_stats"]
        )
        after = {**variables, **changed}
        return trained_BY, module.apply(after, image_BHWC), after

    trained_BY, evaluated_BY, after = compiled(nnx_apply, state)(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        compiled(linen_apply, given)(given),
        (trained_BY, evaluated_BY, in_linen(after)),
    )


def in_linen(state):
    """The Variables by collection, a list's members named as Linen names them."""
    collections = {}
    for name, kind in (("params", nnx.Param), ("batch_stats", nnx.BatchStat)):
        pure = nnx.to_pure_dict(nnx.filter_state(state, kind))
        blocks = pure.pop("blocks")
        collections[name] = pure | {f"blocks_{i}": block for i, block in blocks.items()}
    return collections


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    image_BHWC = jnp.zeros((1, 16, 16, 1))
    jax.eval_shape(ResNet(SMALL, record).init, jax.random.key(0), image_BHWC)
    assert seen.count(("batch", None, None, "hidden")) == 2 * 3
    assert seen.count(("batch", None, None, "channels")) == 1 + 3
    assert seen[-1] == ("batch", "classes")


def test_published_size_is_that_of_nnx():
    image_BHWC = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    abstract = jax.eval_shape(ResNet(RESNET_50).init, jax.random.key(0), image_BHWC)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract["params"]))
    assert count == parameter_count(lambda: resnet.ResNet(RESNET_50))
