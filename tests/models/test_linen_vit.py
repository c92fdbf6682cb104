"""The vision transformer in Linen: the NNX module's parameters, and its function of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import vit
from models.linen_vit import ViT, loss, sample
from models.vit import ViTConfig
from tests.compiled import compiled
from tests.models.made import made

SMALL = {"image": 16, "patch": 8, "d_model": 16, "mlp_dim": 32, "layers": 2}


def parameters(config, seed=0):
    image_BHWC = jnp.zeros((1, config.image, config.image, config.channels))
    return compiled(lambda: ViT(config).init(jax.random.key(seed), image_BHWC)["params"])()


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
