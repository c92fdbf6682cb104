"""The recurrent model in Linen: the NNX module's function and size, and that it learns."""

import jax
import numpy as np
from flax import nnx

from models import recurrent
from models.linen_recurrent import Recurrent, loss, sample
from models.recurrent import RecurrentConfig
from tests.compiled import compiled
from tests.models.made import made

SMALL = RecurrentConfig(width=16, layers=2, sequence=12)


def applied(config, params):
    return lambda tokens_BT: Recurrent(config).apply({"params": params}, tokens_BT)


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
