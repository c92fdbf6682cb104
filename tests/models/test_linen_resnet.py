"""The residual network in Linen: the NNX module's variables, and its function of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import resnet
from models.linen_resnet import ResNet, sample
from models.resnet import ResNetConfig
from tests.compiled import compiled
from tests.models.made import made

SMALL = ResNetConfig(image=16, width=4, blocks=(1, 2))


def variables(config):
    image_BHWC = jnp.zeros((1, config.image, config.image, config.channels))
    return compiled(lambda: ResNet(config).init(jax.random.key(0), image_BHWC))()


@pytest.mark.slow
def test_the_variables_of_nnx_give_the_logits_and_averages_of_nnx():
    graphdef, state = nnx.split(made(resnet.ResNet, SMALL))
    rng = np.random.default_rng(0)
    # No variable may have a value that hides another: norms start as the identity or at zero.
    state = jax.tree.map(lambda x: x + 0.2 * rng.random(x.shape, np.float32), state)
    given = in_linen(state)
    assert jax.tree.map(jnp.shape, variables(SMALL)) == jax.tree.map(jnp.shape, given)
    image_BHWC = sample(0, 8, SMALL)["image_BHWC"]

    def nnx_apply(state):
        model = nnx.merge(graphdef, state)
        return model(image_BHWC, train=True), model(image_BHWC), nnx.state(model)

    def linen_apply(variables):
        module = ResNet(SMALL)
        trained_BY, changed = module.apply(
            variables, image_BHWC, train=True, mutable=["batch_stats"]
        )
        after = {**variables, **changed}
        return trained_BY, module.apply(after, image_BHWC), after

    trained_BY, evaluated_BY, after = compiled(nnx_apply, state)(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        compiled(linen_apply, given)(given),
        (trained_BY, evaluated_BY, in_linen(after)),
    )


def in_linen(state):
    """The Variables by collection, a list's members named as Linen names them."""
    collections = {}
    for name, kind in (("params", nnx.Param), ("batch_stats", nnx.BatchStat)):
        pure = nnx.to_pure_dict(nnx.filter_state(state, kind))
        blocks = pure.pop("blocks")
        collections[name] = pure | {f"blocks_{i}": block for i, block in blocks.items()}
    return collections
