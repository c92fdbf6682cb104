"""GPT in plain JAX: causality, what it predicts, its published size, learning."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from models import text
from models.plain_gpt import GPT3_6_7B, PlainGPTConfig, init, logits, loss, shapes
from tests.compiled import compiled

SMALL = PlainGPTConfig(d_model=16, heads=2, sequence=12)


@functools.cache
def params_of_small():
    """With biases that are not zero, as after training."""
    params = jax.device_get(compiled(functools.partial(init, SMALL))())
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)


def tokens(batch=2):
    return next(text.batches(0, batch, SMALL.sequence))


def surprise_of_each(tokens_BS):
    """surprise_BT of each token behind the first."""
    run = compiled(functools.partial(logits, SMALL), params_of_small(), tokens_BS[:, :-1])
    logp_BTV = jax.nn.log_softmax(run(params_of_small(), tokens_BS[:, :-1]))
    return -np.take_along_axis(np.asarray(logp_BTV), tokens_BS[:, 1:, None], axis=2)[..., 0]


def test_a_later_token_changes_no_earlier_loss():
    before = tokens()
    after = before.copy()
    after[:, 7] = (after[:, 7] + 1) % 256
    a_BT, b_BT = surprise_of_each(before), surprise_of_each(after)
    # Loss t is that of token t + 1: the first to change is of the token itself.
    np.testing.assert_array_equal(a_BT[:, :6], b_BT[:, :6])
    assert (a_BT[:, 6:] != b_BT[:, 6:]).all()


def test_the_loss_is_the_mean_over_the_tokens_behind_the_first():
    found = compiled(functools.partial(loss, SMALL), params_of_small(), tokens())
    np.testing.assert_allclose(
        found(params_of_small(), tokens()), surprise_of_each(tokens()).mean(), rtol=1e-5
    )


def test_the_same_token_at_another_position_is_another():
    same_BT = np.full((1, SMALL.sequence), 65, np.int32)
    found_BTV = np.asarray(logits(SMALL, params_of_small(), same_BT))
    assert np.abs(found_BTV[0, 1:] - found_BTV[0, :1]).max(axis=1).min() > 0


def test_bfloat16_changes_the_loss_little():
    narrow = dataclasses.replace(SMALL, dtype="bfloat16")
    found, expected = (
        compiled(functools.partial(loss, config), params_of_small(), tokens())(
            params_of_small(), tokens()
        )
        for config in (narrow, SMALL)
    )
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_the_published_size():
    # Brown et al. 2020, table 2.1, calls it 6.7B.
    sizes = jax.tree.leaves(shapes(GPT3_6_7B), is_leaf=lambda x: isinstance(x, tuple))
    count = sum(map(math.prod, sizes))
    layer, padding = 12 * 4096**2 + 13 * 4096, 47 * 4096
    assert count - padding == 32 * layer + (50_257 + 2048 + 2) * 4096
    assert count == pytest.approx(6.7e9, rel=0.01)
