"""The state space model: its scan is the recurrence, causality, published sizes, learning."""

import functools

import jax
import numpy as np
from flax import nnx

from models.constrain import unconstrained
from models.state_space import (
    Mixer,
    StateSpace,
    StateSpaceConfig,
    convolve,
    inverse_softplus,
    linear_recurrence,
)
from tests.compiled import compiled, split

SMALL = StateSpaceConfig(d_model=16, state=4, step_rank=2, layers=2, sequence=12)


@functools.cache
def params_of_small():
    return split(StateSpace, SMALL)[1]


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


def test_steps_start_between_their_bounds():
    steps = np.array([1e-3, 0.03, 0.1], np.float32)
    np.testing.assert_allclose(jax.nn.softplus(inverse_softplus(steps)), steps, rtol=1e-4)
    bias_LM = nnx.to_pure_dict(params_of_small())["layers"]["mixer"]["step_bias"]
    steps_LM = np.asarray(jax.nn.softplus(bias_LM))
    assert 0.9e-3 < steps_LM.min() < 0.003 < 0.03 < steps_LM.max() < 0.11
