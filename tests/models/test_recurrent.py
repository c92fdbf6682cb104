"""The recurrent model: its equations, causality, memory, published sizes, learning."""

import jax
import numpy as np
import pytest
from flax import nnx

from models.constrain import unconstrained
from models.recurrent import (
    GRU,
    JOZEFOWICZ_WIDE,
    ZAREMBA_LARGE,
    Recurrent,
    RecurrentConfig,
    loss,
    sample,
)
from tests.compiled import compiled, split
from tests.models.descent import descend, made, parameter_count

SMALL = RecurrentConfig(width=16, layers=2, sequence=12)


@pytest.mark.slow
def test_training_lowers_the_loss():
    config = RecurrentConfig()
    model = made(Recurrent, config)
    losses = descend(model, loss, [sample(seed, 32, config) for seed in range(30)], 0.01)
    assert losses[0] > 0.9 * np.log(256)
    assert 0 < np.mean(losses[-5:]) < 0.65 * losses[0]


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


def test_a_position_sees_all_of_its_past_and_nothing_else():
    graphdef, params = split(Recurrent, SMALL)
    before = sample(0, 2, SMALL)[:, :-1]
    run = compiled(lambda p, t: nnx.merge(graphdef, p)(t), params, before)
    after = before.copy()
    after[:, 4] += 1
    changed_T = np.abs(run(params, before) - run(params, after)).max(axis=(0, 2))
    assert (changed_T[:4] == 0).all()
    assert (changed_T[4:] > 0).all()


def test_the_loss_asks_for_the_next_byte():
    model, tokens_BS = made(Recurrent, SMALL), sample(0, 2, SMALL)
    odds_BTV = np.exp(model(tokens_BS[:, :-1]))
    chance_BTV = odds_BTV / odds_BTV.sum(axis=-1, keepdims=True)
    chance_BT = np.take_along_axis(chance_BTV, tokens_BS[:, 1:, None], axis=-1)
    value, metrics = loss(model, tokens_BS)
    np.testing.assert_allclose(value, -np.log(chance_BT).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["bits_per_byte"], -np.log2(chance_BT).mean(), rtol=1e-5)


def test_published_sizes():
    zaremba = parameter_count(lambda: Recurrent(ZAREMBA_LARGE))
    # An LSTM has a fourth map, of input and state; with it the paper's 66 million.
    fourth_maps = 2 * (2 * 1500 + 1) * 1500
    assert zaremba - 2 * 1500 + fourth_maps == pytest.approx(66e6, rel=1e-3)
    # 8 x 8192 x 8192 would be one LSTM layer; three of those four maps, twice, and bytes.
    jozefowicz = parameter_count(lambda: Recurrent(JOZEFOWICZ_WIDE))
    assert jozefowicz == pytest.approx(2 * 3 / 4 * 8 * 8192**2, rel=0.01)


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    jax.eval_shape(lambda: loss(Recurrent(SMALL), sample(0, 4, SMALL), record)[0])
    assert seen.count(("batch", "hidden")) == 2
    assert seen.count((None, "batch", None, "hidden")) == 2
    assert seen[-1] == ("batch", None, "vocab")


def test_a_seed_fixes_the_batch():
    np.testing.assert_array_equal(sample(3, 4, SMALL), sample(3, 4, SMALL))
    assert sample(3, 4, SMALL).shape == (4, 13)
    assert not np.array_equal(sample(3, 4, SMALL), sample(4, 4, SMALL))
