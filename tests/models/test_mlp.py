"""The equal-width MLP: what it computes and the data it learns."""

import jax
from flax import nnx

from models.mlp import MLP, MLPConfig


def test_every_matrix_has_one_shape():
    params = jax.tree.leaves(nnx.state(MLP(MLPConfig(width=16, layers=3))))
    assert sorted(x.shape for x in params) == [(16,)] * 3 + [(16, 16)] * 3
