"""The mixture of experts: places and weights of tokens, causality, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.constrain import unconstrained
from models.moe import Experts, Mixture, MixtureConfig, loss, route
from tests.compiled import compiled, split

SMALL = MixtureConfig(
    d_model=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    layers=2,
    sequence=16,
    experts=4,
    group=8,
)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 17)).astype(np.int32)
LOGITS = np.random.default_rng(1).standard_normal((2, 3, 16, 4), np.float32)


def routed(logits_BNSE, experts_per_token, capacity):
    choose = functools.partial(route, experts_per_token=experts_per_token, capacity=capacity)
    return compiled(choose, logits_BNSE)(logits_BNSE)


@functools.cache
def params_of_small():
    return split(Mixture, SMALL)[1]


def graphdef_of(**changes):
    config = dataclasses.replace(SMALL, **changes)
    return nnx.split(nnx.eval_shape(lambda: Mixture(config)))[0]


def run(graphdef, params):
    return compiled(lambda p: loss(nnx.merge(graphdef, p), TOKENS), params)(params)


def test_a_token_has_its_best_experts_weights_that_sum_to_one():
    combine_BNSEP, besides = routed(LOGITS, 2, 16)
    weight_BNSE = combine_BNSEP.sum(-1)
    np.testing.assert_allclose(weight_BNSE.sum(-1), 1, rtol=1e-6)
    best_BNS2 = np.sort(np.argsort(LOGITS, axis=-1)[..., 2:], axis=-1)
    np.testing.assert_array_equal(np.nonzero(weight_BNSE)[-1].reshape(2, 3, 16, 2), best_BNS2)
    assert besides["dropped"] == 0


def test_a_place_has_one_token_and_who_comes_late_finds_none():
    whole_BNSEP, _ = routed(LOGITS, 2, 16)
    combine_BNSEP, besides = routed(LOGITS, 2, 5)
    assert ((combine_BNSEP > 0).sum(axis=2) <= 1).all()
    kept_BNSE = combine_BNSEP.sum(-1) > 0
    wanted_BNSE = whole_BNSEP.sum(-1) > 0
    np.testing.assert_array_equal(kept_BNSE, wanted_BNSE & (np.cumsum(wanted_BNSE, axis=2) <= 5))
    np.testing.assert_allclose(besides["dropped"], 1 - kept_BNSE.sum() / (2 * 3 * 16 * 2))


def test_balance_is_one_if_even_and_grows_with_collapse():
    even = jnp.tile(jnp.eye(4) + jnp.roll(jnp.eye(4), 1, axis=1), (4, 1))[None, None]
    np.testing.assert_allclose(routed(50 * even, 2, 16)[1]["balance"], 1, rtol=1e-5)
    collapsed = jnp.broadcast_to(jnp.array([50.0, 50, 0, 0]), (1, 1, 16, 4))
    np.testing.assert_allclose(routed(collapsed, 2, 16)[1]["balance"], 2, rtol=1e-5)


def test_with_room_for_all_it_is_the_weighted_sum_of_the_best_experts():
    config = dataclasses.replace(SMALL, capacity_factor=4.0)
    graphdef, params = split(lambda c: Experts(c, rngs=nnx.Rngs(0)), config)
    x_BTD = np.random.default_rng(1).standard_normal((2, 16, 16), np.float32)
    y_BTD = compiled(lambda p: nnx.merge(graphdef, p)(x_BTD, unconstrained)[0], params)(params)

    w = jax.device_get(nnx.to_pure_dict(params))
    logits_BTE = x_BTD @ w["router"]
    for b, t in np.ndindex(2, 16):
        best_2 = np.argsort(logits_BTE[b, t])[2:]
        weight_2 = np.exp(logits_BTE[b, t, best_2])
        expected_D = np.zeros(16)
        for e, weight in zip(best_2, weight_2 / weight_2.sum(), strict=True):
            gate_M = x_BTD[b, t] @ w["gate"][e]
            hidden_M = gate_M / (1 + np.exp(-gate_M)) * (x_BTD[b, t] @ w["up"][e])
            expected_D += weight * (hidden_M @ w["down"][e])
        np.testing.assert_allclose(y_BTD[b, t], expected_D, rtol=1e-4, atol=1e-5)


def test_the_gradient_reaches_the_router_and_every_expert():
    # Three of four: an untrained router may leave an expert out. No other way to the router.
    graphdef, params = graphdef_of(experts_per_token=3, balance_weight=0.0), params_of_small()
    gradients = compiled(jax.grad(lambda p: loss(nnx.merge(graphdef, p), TOKENS)[0]), params)(
        params
    )
    experts = nnx.to_pure_dict(gradients)["layers"]["experts"]
    assert (jnp.abs(experts["router"]).max(axis=1) > 0).all()
    for name in ("gate", "up", "down"):
        assert (jnp.abs(experts[name]).max(axis=(2, 3)) > 0).all()


def test_the_balancing_loss_is_weighed():
    value, metrics = run(graphdef_of(balance_weight=0.5), params_of_small())
    expected = metrics["cross_entropy"] + 0.5 * metrics["balance"]
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_the_sizes_it_has_of_itself_go_together():
    assert MixtureConfig().capacity <= MixtureConfig().group
