"""The diffusion model: learns the noise, draws it from its own stream, the published size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.unet import DDPM_CIFAR10, Residual, UNet, UNetConfig, diffused, loss, sample, sinusoids
from tests.compiled import compiled
from tests.models.made import made

SMALL = {"image": 8, "attention": 4, "width": 8, "multipliers": (1, 2)}


def counts(model):
    return [int(count[...]) for count in jax.tree.leaves(nnx.state(model, nnx.RngCount))]


@pytest.mark.slow
def test_noise_repeats_with_the_count_and_with_nothing_else():
    graphdef, state = nnx.split(made(UNet, UNetConfig(**SMALL)))
    batch = sample(0, 4, UNetConfig(**SMALL))

    def twice(state):
        model = nnx.merge(graphdef, state)
        return [loss(model, batch)[1]["mean_time"] for _ in range(2)]

    function = compiled(twice, state)
    (first, second), (again, _) = function(state), function(state)
    assert first == again
    assert first != second


def test_diffusion_keeps_variance_one_and_ends_in_noise():
    config = UNetConfig()
    image, noise = (
        jax.random.normal(key, (1, 64, 64, 3)) for key in jax.random.split(jax.random.key(0))
    )
    for time in (0, 300, 999):
        noisy = diffused(image, noise, jnp.array([time]), config)
        assert noisy.var() == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(noisy, noise, atol=0.05)
    np.testing.assert_allclose(diffused(image, noise, jnp.array([0]), config), image, atol=0.1)


def test_the_net_sees_the_time():
    config = UNetConfig(**SMALL)
    block = made(lambda config: Residual(config, 8, 8, rngs=nnx.Rngs(0)), config)
    block.second.kernel[...] = jnp.ones_like(block.second.kernel[...])
    x_BHWC = np.random.default_rng(0).random((1, 4, 4, 8), dtype=np.float32)
    early, late = (
        block(x_BHWC, jnp.full((1, config.time_dim), value), lambda x, names: x)
        for value in (0.0, 1.0)
    )
    assert np.abs(early - late).max() > 1e-3
    embedded = sinusoids(jnp.arange(config.times), config.width)
    assert len(np.unique(embedded, axis=0)) == config.times


@pytest.mark.slow
def test_attention_is_at_one_resolution_and_in_the_middle():
    model = nnx.eval_shape(lambda: UNet(DDPM_CIFAR10))
    attends = [[layer.attends for layer in level] for level in model.down]
    assert attends == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]
    attends = [[layer.attends for layer in level] for level in model.up]
    assert attends == [[False] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert (model.middle_in.attends, model.middle_out.attends) == (True, False)
    nowhere = nnx.eval_shape(lambda: UNet(UNetConfig(attention=0)))
    assert (nowhere.middle_in.attends, nowhere.middle_out.attends) == (True, False)
