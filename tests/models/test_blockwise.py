"""The decoder in parts (attention by query blocks, the loss by positions) and in bfloat16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, DecoderConfig, loss, parts_of
from models.precision import cast
from tests.compiled import compiled, split

SMALL = DecoderConfig(
    d_model=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=48, layers=2, sequence=24
)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 25)).astype(np.int32)


@functools.cache
def params_of_small():
    return split(Decoder, SMALL)[1]


@functools.cache
def gradient(**changes):
    config, params = dataclasses.replace(SMALL, **changes), params_of_small()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    value_and_grad = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), TOKENS)[0])
    return compiled(value_and_grad, params)(params)


def jaxpr(**changes):
    config = dataclasses.replace(SMALL, **changes)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    return str(jax.make_jaxpr(jax.grad(lambda p: loss(nnx.merge(graphdef, p), TOKENS)[0]))(params))


def relative_errors(tree, expected):
    return jax.tree.leaves(
        jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), tree, expected)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "blockwise", "query_block": 8},
        {"loss_parts": 3},
        {"attention": "blockwise", "query_block": 4, "loss_parts": 2, "remat": "full"},
    ],
    ids=["attention", "loss", "both"],
)
def test_in_parts_is_the_same(changes):
    expected, expected_gradients = gradient()
    value, gradients = gradient(**changes)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert max(relative_errors(gradients, expected_gradients)) < 1e-5


def test_no_array_holds_all_scores_or_all_logits():
    assert "24,24]" in jaxpr() and "2,24,256]" in jaxpr()
    parts = jaxpr(attention="blockwise", query_block=8, loss_parts=3)
    assert "24,24]" not in parts and "2,24,256]" not in parts


def test_a_part_takes_every_nth_position():
    x_NBC = parts_of(jnp.arange(24).reshape(2, 12), 3)
    assert x_NBC.shape == (3, 2, 4)
    np.testing.assert_array_equal(x_NBC[1, 0], [1, 4, 7, 10])


def test_bfloat16_is_near_float32_and_hands_back_float32():
    expected, expected_gradients = gradient()
    value, gradients = gradient(
        dtype="bfloat16", attention="blockwise", query_block=8, loss_parts=3
    )
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert 0 < max(relative_errors(gradients, expected_gradients)) < 0.06


def test_every_matmul_is_bfloat16():
    text = jaxpr(dtype="bfloat16", attention="blockwise", query_block=8, loss_parts=3)
    lines = [line for line in text.splitlines() if "= dot_general[" in line]
    assert len(lines) > 10
    assert all(line.split(":")[1].startswith("bf16") for line in lines)


def test_the_embedding_alone_stays_float32():
    params = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(cast(Decoder(SMALL), "bfloat16"))))
    assert params.pop("embedding").dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
