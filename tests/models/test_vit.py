"""The vision transformer: learns digits, scanned equals unrolled, the published sizes."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.vit import ViT, ViTConfig, sample
from tests.compiled import compiled
from tests.models.made import made

SMALL = {"image": 16, "patch": 8, "d_model": 16, "mlp_dim": 32, "layers": 2}


def logits(model, image_BHWC):
    graphdef, params = nnx.split(model)
    return compiled(lambda p, x: nnx.merge(graphdef, p)(x), params, image_BHWC)(params, image_BHWC)


def test_patches_are_a_set_but_for_their_positions():
    config = ViTConfig(**SMALL)
    model = made(ViT, config)
    image_BHWC = sample(0, 4, config)["image_BHWC"]
    swapped_BHWC = np.roll(image_BHWC, config.patch, axis=1)
    assert np.abs(logits(model, image_BHWC) - logits(model, swapped_BHWC)).max() > 1e-4
    model.encoder.positions[...] = jnp.zeros((config.positions, config.d_model))
    np.testing.assert_allclose(
        logits(model, image_BHWC), logits(model, swapped_BHWC), rtol=1e-4, atol=1e-5
    )
