"""The recurrent model: its equations, causality, memory, published sizes, learning."""

import jax
import numpy as np
from flax import nnx

from models.constrain import unconstrained
from models.recurrent import (
    GRU,
    Recurrent,
    RecurrentConfig,
    loss,
    sample,
)
from tests.compiled import compiled, split
from tests.models.made import made

SMALL = RecurrentConfig(width=16, layers=2, sequence=12)


def test_a_layer_follows_its_equations():
    graphdef, params = split(lambda config: GRU(config, rngs=nnx.Rngs(0)), SMALL)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)
    x_BTW = rng.standard_normal((2, 5, 16)).astype(np.float32)
    found_BTW = compiled(lambda p: nnx.merge(graphdef, p)(x_BTW, unconstrained), params)(params)

    w = jax.device_get(nnx.to_pure_dict(params))
    state_BW = np.zeros((2, 16))
    for t in range(5):
        x_B3W = np.einsum("bw,wgu->bgu", x_BTW[:, t], w["input"]) + w["input_bias"]
        old_B3W = np.einsum("bw,wgu->bgu", state_BW, w["recurrent"])
        reset_BW, update_BW = (1 / (1 + np.exp(-x_B3W[:, i] - old_B3W[:, i])) for i in (0, 1))
        new_BW = np.tanh(x_B3W[:, 2] + reset_BW * (old_B3W[:, 2] + w["candidate_bias"]))
        state_BW = (1 - update_BW) * new_BW + update_BW * state_BW
        np.testing.assert_allclose(found_BTW[:, t], state_BW, rtol=1e-4, atol=1e-5)


def test_the_loss_asks_for_the_next_byte():
    model, tokens_BS = made(Recurrent, SMALL), sample(0, 2, SMALL)
    odds_BTV = np.exp(model(tokens_BS[:, :-1]))
    chance_BTV = odds_BTV / odds_BTV.sum(axis=-1, keepdims=True)
    chance_BT = np.take_along_axis(chance_BTV, tokens_BS[:, 1:, None], axis=-1)
    value, metrics = loss(model, tokens_BS)
    np.testing.assert_allclose(value, -np.log(chance_BT).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["bits_per_byte"], -np.log2(chance_BT).mean(), rtol=1e-5)
