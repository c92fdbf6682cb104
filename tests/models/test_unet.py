"""The diffusion model: learns the noise, draws it from its own stream, the published size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.unet import DDPM_CIFAR10, Residual, UNet, UNetConfig, diffused, loss, sample, sinusoids
from tests.compiled import compiled
from tests.models.descent import descend, made, parameter_count

SMALL = {"image": 8, "attention": 4, "width": 8, "multipliers": (1, 2)}


def counts(model):
    return [int(count[...]) for count in jax.tree.leaves(nnx.state(model, nnx.RngCount))]


@pytest.mark.slow
def test_training_lowers_the_loss_and_advances_the_noise():
    config = UNetConfig(width=8)
    model = made(UNet, config)
    batch = sample(0, 32, config)
    losses = descend(model, loss, [batch] * 40, 3e-3)
    # The last convolution starts at zero, so the first loss is the noise's own variance.
    assert losses[0] == pytest.approx(1, abs=0.05)
    assert np.mean(losses[-5:]) < 0.6
    assert counts(model) == [2 * 40], "a time and a noise in each step"


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


def test_published_size():
    count = parameter_count(lambda: UNet(DDPM_CIFAR10))
    # The paper says 35.7 million (appendix B); its weights, as others released them, are exact.
    assert count == 35_746_307


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append((x.shape, names))
        return x

    config = UNetConfig(**SMALL)
    jax.eval_shape(lambda: loss(UNet(config), sample(0, 4, config), record)[0])
    assert seen[0] == ((4, config.time_dim), ("batch", "embed"))
    assert seen[-1] == ((4, 8, 8, 8), ("batch", None, None, "channels"))
    assert ((4, 16, 16), ("batch", None, "hidden")) in seen


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"width=18 must be even, .* a multiple of groups=4"):
        UNetConfig(width=18)
    with pytest.raises(ValueError, match=r"width=2 must be even, at least 4"):
        UNetConfig(width=2, groups=2)  # one frequency, of nothing
    with pytest.raises(ValueError, match=r"image=9 must be a multiple of 2"):
        UNetConfig(image=9)
