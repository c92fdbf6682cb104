"""The equal-width MLP: what it computes and the data it learns."""

import jax
from flax import nnx

from models.mlp import MLP, MLPConfig, loss, sample


def test_every_matrix_has_one_shape():
    params = jax.tree.leaves(nnx.state(MLP(MLPConfig(width=16, layers=3))))
    assert sorted(x.shape for x in params) == [(16,)] * 3 + [(16, 16)] * 3


def test_gradient_descent_lowers_the_loss():
    graphdef, params = nnx.split(MLP(MLPConfig(width=16, layers=3)))
    batch = sample(0, 64, 16)
    step = jax.jit(jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), batch)[0]))
    first, _ = step(params)
    for _ in range(50):
        value, gradients = step(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients)
    assert value < 0.8 * first
