"""The decoder: causal, scanned equals unrolled, remat changes nothing, seeds repeat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, DecoderConfig, loss, rotate
from tests.compiled import compiled, split
from tests.models.descent import made

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


def test_a_position_sees_only_the_past():
    graphdef, params = split(Decoder, DecoderConfig(**SMALL))
    before = tokens()[:, :12]
    model = compiled(lambda params, tokens: nnx.merge(graphdef, params)(tokens), params, before)
    after = before.copy()
    after[:, 7] += 1
    changed = np.abs(model(params, before) - model(params, after)).max(axis=(0, 2))
    assert (changed[:7] == 0).all()
    assert (changed[7:] > 0).all()


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


def test_scanned_equals_unrolled():
    scanned = made(Decoder, DecoderConfig(**SMALL, scanned=True))
    unrolled = made(Decoder, DecoderConfig(**SMALL, scanned=False))
    unrolled.embedding, unrolled.head = scanned.embedding, scanned.head
    stacked = nnx.state(scanned.layers)
    for i, layer in enumerate(unrolled.layers):
        nnx.update(layer, jax.tree.map(lambda x, i=i: x[i], stacked))
    np.testing.assert_allclose(logits(scanned), logits(unrolled), rtol=1e-4, atol=1e-4)


def logits(model):
    graphdef, params = nnx.split(model)
    return compiled(lambda p: nnx.merge(graphdef, p)(tokens()[:, :12]), params)(params)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat, scanned):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradient("none", scanned),
        gradient(remat, scanned),
    )


@functools.cache
def gradient(remat, scanned):
    graphdef, params = split(Decoder, DecoderConfig(**SMALL, remat=remat, scanned=scanned))
    of_loss = jax.grad(lambda p: loss(nnx.merge(graphdef, p), tokens())[0])
    return compiled(of_loss, params)(params)


def test_tied_head_is_the_embedding():
    model = made(Decoder, DecoderConfig(**SMALL, tied=True))
    assert not hasattr(model, "head")
    assert logits(model).shape == (2, 12, 256)


def test_same_seed_same_model():
    a, b, c = (nnx.state(made(Decoder, DecoderConfig(**SMALL, seed=seed))) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert not jax.tree.all(jax.tree.map(np.array_equal, a, c))


def test_the_hook_leaves_no_trace_by_default():
    graphdef, params = nnx.split(Decoder(DecoderConfig(**SMALL)))
    jaxpr = jax.make_jaxpr(lambda p, t: loss(nnx.merge(graphdef, p), t))(params, tokens())
    assert "sharding_constraint" not in str(jaxpr)


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    graphdef, params = split(Decoder, DecoderConfig(**SMALL, scanned=False))
    jax.eval_shape(lambda p: loss(nnx.merge(graphdef, p), tokens(), record)[0], params)
    assert ("batch", None, "heads", None) in seen
    assert ("batch", None, "mlp") in seen


def test_rotation_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 8))
    q_BTHK, k_BTHK = (rotate(jnp.broadcast_to(x, (1, 10, 1, 8)))[0, :, 0] for x in (q, k))
    np.testing.assert_allclose(q_BTHK[3] @ k_BTHK[1], q_BTHK[9] @ k_BTHK[7], rtol=1e-4)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of kv_heads=3"):
        DecoderConfig(kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        DecoderConfig(head_dim=7)
    with pytest.raises(ValueError, match="remat='some'"):
        DecoderConfig(remat="some")
