"""The encoder-decoder: who sees whom, spans that can be put back, published sizes, learning."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    bucket_of,
    loss,
    sample,
)
from models.spans import BYTES
from models.text import batches
from tests.compiled import compiled, split

SMALL = EncoderDecoderConfig(
    d_model=16, heads=2, head_dim=8, mlp_dim=24, window=36, spans=2, span_length=3
)


@functools.cache
def params_of_small():
    return split(EncoderDecoder, SMALL)[1]


def graphdef_of(**changes):
    config = dataclasses.replace(SMALL, **changes)
    return nnx.split(nnx.eval_shape(lambda: EncoderDecoder(config)))[0]


@functools.cache
def logits_of_small():
    graphdef, params, batch = graphdef_of(), params_of_small(), sample(0, 2, SMALL)
    run = compiled(
        lambda p, s, t: nnx.merge(graphdef, p)(s, t),
        *(params, batch["source_BS"], batch["target_BT"]),
    )
    return lambda source_BS, so_far_BT: np.asarray(run(params, source_BS, so_far_BT))


@functools.cache
def value_and_gradient(remat="none"):
    return _value_and_gradient(graphdef_of(remat=remat), params_of_small())


def _value_and_gradient(graphdef, params):
    batch = sample(0, 2, SMALL)
    function = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), batch)[0])
    return compiled(function, params)(params)


def test_the_decoder_sees_its_past_and_the_whole_source():
    run, batch = logits_of_small(), sample(0, 2, SMALL)
    source_BS, so_far_BT = batch["source_BS"], batch["target_BT"]
    before = run(source_BS, so_far_BT)
    later_BT = so_far_BT.copy()
    later_BT[:, 5] += 1
    changed_T = np.abs(run(source_BS, later_BT) - before).max(axis=(0, 2))
    assert (changed_T[:5] == 0).all()
    assert (changed_T[5:] > 0).all()
    for s in (0, SMALL.source - 1):
        other_BS = source_BS.copy()
        other_BS[:, s] += 1
        assert (np.abs(run(other_BS, so_far_BT) - before).max(axis=2) > 0).all()


def test_order_matters_to_the_encoder():
    # Cross attention is blind to the order of its memory: only the encoder's bias tells.
    run, batch = logits_of_small(), sample(0, 2, SMALL)
    reversed_BS = batch["source_BS"][:, ::-1]
    before, after = (run(s, batch["target_BT"]) for s in (batch["source_BS"], reversed_BS))
    assert np.abs(before - after).max() > 1e-3


def test_the_loss_asks_for_the_next_token():
    value, _ = value_and_gradient()
    batch = sample(0, 2, SMALL)
    target_BT = batch["target_BT"]
    so_far_BT = np.concatenate([np.zeros((2, 1), np.int32), target_BT[:, :-1]], axis=1)
    logits_BTV = logits_of_small()(batch["source_BS"], so_far_BT)
    odds_BTV = np.exp(logits_BTV - logits_BTV.max(axis=-1, keepdims=True))
    chance_BTV = odds_BTV / odds_BTV.sum(axis=-1, keepdims=True)
    chance_BT = np.take_along_axis(chance_BTV, target_BT[..., None], axis=-1)
    np.testing.assert_allclose(value, -np.log(chance_BT).mean(), rtol=1e-5)


def test_the_spans_put_back_give_the_text():
    batch = sample(3, 8, SMALL)
    assert batch["source_BS"].shape == (8, SMALL.source)
    assert batch["target_BT"].shape == (8, SMALL.target)
    lengths = set()
    for source_S, target_T, window_W in zip(
        batch["source_BS"], batch["target_BT"], next(batches(3, 8, SMALL.window - 1)), strict=True
    ):
        sentinels = np.flatnonzero(target_T >= BYTES)
        np.testing.assert_array_equal(target_T[sentinels], source_S[source_S >= BYTES])
        assert target_T[0] == SMALL.vocab_size - 1
        spans = np.split(target_T, sentinels[1:])
        lengths.update(map(len, spans))
        whole = []
        for token in source_S:
            whole += [token] if token < BYTES else list(spans.pop(0)[1:])
        np.testing.assert_array_equal(whole, window_W)
    assert min(lengths) >= 2 and len(lengths) > 2


def test_distances_fall_into_buckets():
    distance = np.arange(-300, 301)
    causal = np.asarray(bucket_of(distance, 32, 128, causal=True))
    assert (causal[300:] == 0).all(), "the future shares the bucket of here"
    np.testing.assert_array_equal(causal[300 - 15 : 301], np.arange(16)[::-1])
    assert (np.diff(causal[:301]) <= 0).all()
    assert (causal[: 300 - 127] == 31).all()
    both = np.asarray(bucket_of(distance, 32, 128, causal=False))
    np.testing.assert_array_equal(both[301:], both[:300][::-1] + 16)
    np.testing.assert_array_equal(both[300 - 7 : 301], np.arange(8)[::-1])
