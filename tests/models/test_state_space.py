"""The state space model: its scan is the recurrence, causality, published sizes, learning."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from models.constrain import unconstrained
from models.state_space import (
    MAMBA_2_8B,
    MAMBA_130M,
    Mixer,
    StateSpace,
    StateSpaceConfig,
    convolve,
    inverse_softplus,
    linear_recurrence,
    loss,
    sample,
)
from tests.compiled import compiled, split
from tests.models.descent import descend, made, parameter_count

SMALL = StateSpaceConfig(d_model=16, state=4, step_rank=2, layers=2, sequence=12)


@functools.cache
def params_of_small():
    return split(StateSpace, SMALL)[1]


def value_and_gradient(params=None, **changes):
    config = dataclasses.replace(SMALL, **changes)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: StateSpace(config)))
    leaves = jax.tree.leaves(params_of_small() if params is None else params)
    params, tokens_BS = (
        jax.tree.unflatten(jax.tree.structure(abstract), leaves),
        sample(0, 2, SMALL),
    )
    function = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), tokens_BS)[0])
    return compiled(function, params)(params)


@pytest.mark.slow
def test_training_lowers_the_loss():
    model = made(StateSpace, SMALL)
    losses = descend(model, loss, [sample(seed, 64, SMALL) for seed in range(30)], 0.01)
    assert losses[0] > 0.9 * np.log(256)
    assert 0 < np.mean(losses[-5:]) < 0.65 * losses[0]


def test_the_scan_is_the_recurrence():
    rng = np.random.default_rng(0)
    decay_BTM, input_BTM = rng.uniform(0, 1, (2, 2, 13, 3)).astype(np.float32)
    found_BTM = compiled(linear_recurrence, decay_BTM, input_BTM)(decay_BTM, input_BTM)
    state_BM = np.zeros((2, 3))
    for t in range(13):
        state_BM = decay_BTM[:, t] * state_BM + input_BTM[:, t]
        np.testing.assert_allclose(found_BTM[:, t], state_BM, rtol=1e-5)


def test_a_mixer_follows_its_equations():
    graphdef, params = split(lambda config: Mixer(config, rngs=nnx.Rngs(0)), SMALL)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype(np.float32), params)
    x_BTD = rng.standard_normal((2, 6, 16)).astype(np.float32)
    found_BTD = compiled(lambda p: nnx.merge(graphdef, p)(x_BTD, unconstrained), params)(params)

    w = jax.device_get(nnx.to_pure_dict(params))
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    raw_BTM = np.pad(x_BTD @ w["signal"], ((0, 0), (3, 0), (0, 0)))
    state_BMN = np.zeros((2, 32, 4))
    for t in range(6):
        mixed_BM = np.einsum("bcm,cm->bm", raw_BTM[:, t : t + 4], w["convolution"])
        u_BM = silu(mixed_BM + w["convolution_bias"])
        step_BM = np.log1p(np.exp(u_BM @ w["narrow"] @ w["step"] + w["step_bias"]))
        decay_BMN = np.exp(step_BM[..., None] * -np.exp(w["log_rate"]))
        enter_BMN = np.einsum("bm,bn->bmn", step_BM * u_BM, u_BM @ w["enter"])
        state_BMN = decay_BMN * state_BMN + enter_BMN
        y_BM = np.einsum("bmn,bn->bm", state_BMN, u_BM @ w["leave"]) + w["skip"] * u_BM
        expected_BD = (y_BM * silu(x_BTD[:, t] @ w["gate"])) @ w["out"]
        np.testing.assert_allclose(found_BTD[:, t], expected_BD, rtol=1e-3, atol=1e-5)


def test_a_convolution_is_each_channels_own():
    x_BTM = np.zeros((1, 6, 2), np.float32)
    x_BTM[0, 2, 1] = 1
    kernel_CM = np.arange(8, dtype=np.float32).reshape(4, 2)
    found_TM = np.asarray(convolve(x_BTM, kernel_CM))[0]
    assert (found_TM[:, 0] == 0).all()
    np.testing.assert_array_equal(found_TM[:, 1], [0, 0, 7, 5, 3, 1])


def test_a_position_sees_all_of_its_past_and_nothing_else():
    graphdef = nnx.split(nnx.eval_shape(lambda: StateSpace(SMALL)))[0]
    before = sample(0, 2, SMALL)[:, :-1]
    run = compiled(lambda p, t: nnx.merge(graphdef, p)(t), params_of_small(), before)
    after = before.copy()
    after[:, 2] += 1
    a, b = (np.asarray(run(params_of_small(), tokens)) for tokens in (before, after))
    changed_T = np.abs(a - b).max(axis=(0, 2))
    assert (changed_T[:2] == 0).all()
    # Two layers' convolutions alone would reach up to position 8.
    assert (changed_T[2:] > 0).all()


@pytest.mark.slow
def test_scanned_equals_unrolled():
    values = nnx.to_pure_dict(params_of_small())
    layers = values["layers"]
    values["layers"] = {i: jax.tree.map(lambda x, i=i: x[i], layers) for i in range(2)}
    found, _ = value_and_gradient(values, scanned=False)
    expected, _ = value_and_gradient()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_remat_changes_no_gradient():
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        value_and_gradient(remat="full"),
        value_and_gradient(),
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [(MAMBA_130M, 129_135_360), (MAMBA_2_8B, 2_768_345_600)],
    ids=["130M", "2.8B"],
)
def test_published_sizes(config, expected):
    # Of the released checkpoints, to the last parameter.
    assert parameter_count(lambda: StateSpace(config)) == expected


def test_steps_start_between_their_bounds():
    steps = np.array([1e-3, 0.03, 0.1], np.float32)
    np.testing.assert_allclose(jax.nn.softplus(inverse_softplus(steps)), steps, rtol=1e-4)
    bias_LM = nnx.to_pure_dict(params_of_small())["layers"]["mixer"]["step_bias"]
    steps_LM = np.asarray(jax.nn.softplus(bias_LM))
    assert 0.9e-3 < steps_LM.min() < 0.003 < 0.03 < steps_LM.max() < 0.11


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    config = dataclasses.replace(SMALL, scanned=False)
    jax.eval_shape(lambda: loss(StateSpace(config), sample(0, 4, config), record)[0])
    assert seen.count(("batch", None, "mlp", None)) == 2 * 2
    assert seen.count(("batch", None, "embed")) == 2 + 1
    assert seen[-1] == ("batch", None, "vocab")


def test_a_seed_fixes_the_batch():
    np.testing.assert_array_equal(sample(3, 4, SMALL), sample(3, 4, SMALL))
    assert sample(3, 4, SMALL).shape == (4, 13)
    assert not np.array_equal(sample(3, 4, SMALL), sample(4, 4, SMALL))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="convolution=13 exceeds sequence=12"):
        dataclasses.replace(SMALL, convolution=13)
    with pytest.raises(ValueError, match="remat='some'"):
        dataclasses.replace(SMALL, remat="some")
