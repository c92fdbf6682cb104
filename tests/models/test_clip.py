"""CLIP: learns to pair digits and captions, contrasts the whole batch, the published size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import captions
from models.clip import (
    CLIP,
    LARGEST_SCALE,
    CLIPConfig,
    TextConfig,
    TextEncoder,
    capped,
    contrast,
    sample,
)
from tests.compiled import compiled
from tests.models.made import made


def test_contrast_is_with_every_pair_of_the_batch():
    scale = 5.0
    whole, half = (contrast(scale * jnp.eye(size)) for size in (8, 4))
    assert whole == pytest.approx(np.log(1 + 7 * np.exp(-scale)), rel=1e-4)
    assert half == pytest.approx(np.log(1 + 3 * np.exp(-scale)), rel=1e-4)


def test_contrast_treats_images_and_texts_alike():
    similarity_BA = jax.random.normal(jax.random.key(0), (6, 6))
    order = jnp.array([3, 1, 5, 0, 2, 4])
    expected = pytest.approx(float(contrast(similarity_BA)), rel=1e-5)
    assert contrast(similarity_BA.T) == expected
    assert contrast(similarity_BA[order][:, order]) == expected
    assert contrast(similarity_BA[order]) != expected


def test_a_text_is_read_at_its_end_and_not_beyond():
    config = TextConfig(d_model=16, mlp_dim=32, context=16)
    graphdef, params = nnx.split(made(lambda config: TextEncoder(config, rngs=nnx.Rngs(0)), config))
    tokens_AT = captions.tokens(0, np.array([7, 7]), 32)[:, :16] * 0 + ord("x")
    tokens_AT[:, 9] = captions.END
    encode = compiled(lambda p, t: nnx.merge(graphdef, p)(t), params, tokens_AT)
    beyond_AT, within_AT = tokens_AT.copy(), tokens_AT.copy()
    beyond_AT[:, 10] += 1
    within_AT[:, 2] += 1
    np.testing.assert_array_equal(encode(params, beyond_AT), encode(params, tokens_AT))
    assert np.abs(encode(params, within_AT) - encode(params, tokens_AT)).max() > 1e-4


def test_similarities_are_cosines_over_the_temperature():
    config = CLIPConfig()
    graphdef, params = nnx.split(made(CLIP, config))
    batch = sample(0, 8, config)
    similarity = compiled(
        lambda p: nnx.merge(graphdef, p)(batch["image_BHWC"], batch["tokens_BT"]), params
    )
    assert np.abs(similarity(params)).max() <= 1.001 / config.temperature
    hot = similarity(params)
    params["log_scale"][...] = jnp.array(1e3)
    np.testing.assert_allclose(
        similarity(params), hot * config.temperature * LARGEST_SCALE, rtol=1e-3, atol=1e-3
    )


def test_a_temperature_beyond_its_cap_is_pulled_back():
    for x, found in ((4.0, 4.0), (4.7, 4.6), (1e3, 4.6)):
        value, slope = jax.value_and_grad(capped)(x, 4.6)
        np.testing.assert_allclose([value, slope], [found, 1.0], rtol=1e-6)
