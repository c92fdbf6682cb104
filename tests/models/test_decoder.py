"""The decoder: causal, scanned equals unrolled, remat changes nothing, seeds repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, DecoderConfig, loss, rotate
from tests.compiled import compiled, split
from tests.models.made import made

SMALL = {
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 48,
    "layers": 3,
    "sequence": 12,
}


def tokens(seed=0, batch=2):
    return np.random.default_rng(seed).integers(0, 256, (batch, 13)).astype(np.int32)


@pytest.mark.parametrize("scanned", [True, False])
def test_a_decoder_of_another_precision_is_called_as_its_loss_calls_it(scanned):
    graphdef, params = split(Decoder, DecoderConfig(**SMALL, scanned=scanned, dtype="bfloat16"))

    def both(params):
        model = nnx.merge(graphdef, params)
        return model(tokens()[:, :12]), loss(model, tokens())[0]

    logits, mean = compiled(both, params)(params)
    assert logits.dtype == jnp.bfloat16
    targets = jnp.take_along_axis(
        jax.nn.log_softmax(logits.astype(jnp.float32)), tokens()[:, 1:, None], axis=-1
    )
    np.testing.assert_allclose(-jnp.mean(targets), mean, rtol=1e-5)


def logits(model):
    graphdef, params = nnx.split(model)
    return compiled(lambda p: nnx.merge(graphdef, p)(tokens()[:, :12]), params)(params)


def test_tied_head_is_the_embedding():
    model = made(Decoder, DecoderConfig(**SMALL, tied=True))
    assert not hasattr(model, "head")
    assert logits(model).shape == (2, 12, 256)


def test_same_seed_same_model():
    a, b, c = (nnx.state(made(Decoder, DecoderConfig(**SMALL, seed=seed))) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert not jax.tree.all(jax.tree.map(np.array_equal, a, c))


def test_rotation_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 8))
    q_BTHK, k_BTHK = (rotate(jnp.broadcast_to(x, (1, 10, 1, 8)))[0, :, 0] for x in (q, k))
    np.testing.assert_allclose(q_BTHK[3] @ k_BTHK[1], q_BTHK[9] @ k_BTHK[7], rtol=1e-4)
