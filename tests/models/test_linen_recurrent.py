"""The recurrent model in Linen: the NNX module's function and size, and that it learns."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import recurrent
from models.linen_recurrent import Recurrent, loss, sample
from models.recurrent import ZAREMBA_LARGE, RecurrentConfig
from tests.compiled import compiled
from tests.models.descent import made, parameter_count

SMALL = RecurrentConfig(width=16, layers=2, sequence=12)


def applied(config, params):
    return lambda tokens_BT: Recurrent(config).apply({"params": params}, tokens_BT)


def test_training_lowers_the_loss():
    config, optimizer = RecurrentConfig(sequence=16), optax.adam(0.01)
    first = sample(0, 32, config)
    params = compiled(lambda: Recurrent(config).init(jax.random.key(0), first[:, :-1])["params"])()

    def step(params, opt_state, tokens_BS):
        value, gradients = jax.value_and_grad(lambda p: loss(applied(config, p), tokens_BS)[0])(
            params
        )
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    opt_state, losses = optimizer.init(params), []
    step = compiled(step, params, opt_state, first)
    for seed in range(30):
        value, params, opt_state = step(params, opt_state, sample(seed, 32, config))
        losses.append(float(value))
    assert losses[0] > 0.9 * np.log(256)
    assert 0 < np.mean(losses[-5:]) < 0.65 * losses[0]


def test_the_parameters_of_nnx_give_the_loss_of_nnx():
    graphdef, state = nnx.split(made(recurrent.Recurrent, SMALL))
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(0)
    noisy = [x + 0.1 * rng.standard_normal(x.shape, np.float32) for x in leaves]
    w = jax.tree.unflatten(tree, noisy)
    params = {"embedding": {"embedding": w["embedding"]}, "head": w["head"]}
    for i, layer in w["layers"].items():
        cell = {
            f"i{gate}": {"kernel": layer["input"][:, g], "bias": layer["input_bias"][g]}
            for g, gate in enumerate("rzn")
        } | {f"h{gate}": {"kernel": layer["recurrent"][:, g]} for g, gate in enumerate("rzn")}
        cell["hn"]["bias"] = layer["candidate_bias"]
        params[f"layers_{i}"] = {"cell": cell}

    tokens_BS = sample(0, 2, SMALL)
    nnx.replace_by_pure_dict(state, w)
    expected, _ = compiled(lambda s: recurrent.loss(nnx.merge(graphdef, s), tokens_BS), state)(
        state
    )
    found, _ = compiled(lambda p: loss(applied(SMALL, p), tokens_BS), params)(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_published_size_is_that_of_nnx():
    tokens_BT = jax.ShapeDtypeStruct((1, 35), jnp.int32)
    abstract = jax.eval_shape(Recurrent(ZAREMBA_LARGE).init, jax.random.key(0), tokens_BT)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract["params"]))
    assert count == parameter_count(lambda: recurrent.Recurrent(ZAREMBA_LARGE))


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    tokens_BT = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    jax.eval_shape(Recurrent(SMALL, record).init, jax.random.key(0), tokens_BT)
    assert ("batch", "hidden") in seen
    assert seen.count(("batch", None, "embed")) == 2 + 1
    assert seen[-1] == ("batch", None, "vocab")
