"""The vision transformer in Linen: the NNX module's parameters, and its function of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models import vit
from models.linen_vit import ViT, loss, sample
from models.vit import VIT_B16, ViTConfig
from tests.compiled import compiled
from tests.models.descent import made, parameter_count

SMALL = {"image": 16, "patch": 8, "d_model": 16, "mlp_dim": 32, "layers": 2}


def parameters(config, seed=0):
    image_BHWC = jnp.zeros((1, config.image, config.image, config.channels))
    return compiled(lambda: ViT(config).init(jax.random.key(seed), image_BHWC)["params"])()


@pytest.mark.slow
def test_training_lowers_the_loss():
    config, optimizer = ViTConfig(), optax.adam(3e-3)
    module, params = ViT(config), parameters(config)

    def step(params, opt_state, batch):
        def run(params):
            return loss(lambda image_BHWC: module.apply({"params": params}, image_BHWC), batch)[0]

        value, gradients = jax.value_and_grad(run)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    opt_state, losses = optimizer.init(params), []
    step = compiled(step, params, opt_state, sample(0, 64, config))
    for seed in range(40):
        value, params, opt_state = step(params, opt_state, sample(seed, 64, config))
        losses.append(float(value))
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("embedding_norm", [False, True])
def test_the_parameters_of_nnx_give_the_logits_of_nnx(embedding_norm):
    config = ViTConfig(**SMALL, embedding_norm=embedding_norm)
    graphdef, state = nnx.split(made(vit.ViT, config))
    # No parameter may have a value that hides another: norms start as the identity, biases at zero.
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(0)
    noisy = [x + 0.1 * rng.standard_normal(x.shape, np.float32) for x in leaves]
    params = jax.tree.unflatten(tree, noisy)
    assert jax.tree.map(jnp.shape, parameters(config)) == jax.tree.map(jnp.shape, params)
    image_BHWC = sample(0, 4, config)["image_BHWC"]
    nnx.replace_by_pure_dict(state, params)
    expected_BY = compiled(lambda s: nnx.merge(graphdef, s)(image_BHWC), state)(state)
    logits_BY = compiled(lambda p: ViT(config).apply({"params": p}, image_BHWC), params)(params)
    np.testing.assert_allclose(logits_BY, expected_BY, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.slow
def test_scanned_equals_unrolled(remat):
    scanned, unrolled = (ViTConfig(**SMALL, scanned=x, remat=remat) for x in (True, False))
    stacked = parameters(scanned)
    encoder = dict(stacked["encoder"])
    layers = encoder.pop("layers")
    for i in range(2):
        encoder[f"layers_{i}"] = jax.tree.map(lambda x, i=i: x[i], layers)
    batch = sample(0, 4, scanned)

    def gradient(config, params):
        def value(params):
            return loss(lambda x: ViT(config).apply({"params": params}, x), batch)[0]

        return compiled(jax.grad(value), params)(params)

    expected = gradient(scanned, stacked)["encoder"]
    found = gradient(unrolled, {**stacked, "encoder": encoder})["encoder"]
    both = [found.pop(f"layers_{i}") for i in range(2)]
    found["layers"] = jax.tree.map(lambda a, b: jnp.stack([a, b]), *both)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found, expected
    )


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    config = ViTConfig(**SMALL, scanned=False)
    image_BHWC = jnp.zeros((1, 16, 16, 1))
    jax.eval_shape(ViT(config, record).init, jax.random.key(0), image_BHWC)
    assert seen.count(("batch", None, "heads", None)) == 2 * 4
    assert seen.count(("batch", None, "mlp")) == 2
    assert seen[-1] == ("batch", "classes")


def test_published_size_is_that_of_nnx():
    image_BHWC = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    abstract = jax.eval_shape(ViT(VIT_B16).init, jax.random.key(0), image_BHWC)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract["params"]))
    assert count == parameter_count(lambda: vit.ViT(VIT_B16))
