"""The recommender: its pairs, its tables, published sizes, and that it learns the planted rule."""

import jax
import numpy as np
from flax import nnx

from models.recommender import (
    Recommender,
    RecommenderConfig,
    interact,
    loss,
    sample,
)
from tests.compiled import compiled, split

SMALL = RecommenderConfig(table_rows=(64, 16, 3), dim=8, bottom=(16, 8), top=(16,))


def test_each_pair_of_vectors_meets_once():
    x_BVD = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    expected = [[x[i] @ x[j] for i in range(4) for j in range(i)] for x in x_BVD]
    np.testing.assert_allclose(interact(x_BVD), expected, rtol=1e-5)


def test_a_value_reaches_its_own_row_of_its_own_table():
    graphdef, params = split(Recommender, SMALL)
    batch = sample(0, 4, SMALL) | {"value_BF": np.array([[5, 7, 2]] * 4, np.int32)}
    gradients = compiled(jax.grad(lambda p: loss(nnx.merge(graphdef, p), batch)[0]), params)(params)
    for table, row in zip(nnx.to_pure_dict(gradients)["tables"].values(), (5, 7, 2), strict=True):
        np.testing.assert_array_equal(np.nonzero(np.abs(table).sum(axis=1))[0], [row])


def test_rows_are_rounded_up_for_devices_to_share():
    config = RecommenderConfig(table_rows=(64, 17, 3), row_multiple=8)
    model = nnx.eval_shape(lambda: Recommender(config))
    assert [table.shape[0] for table in model.tables] == [64, 24, 8]


def test_values_follow_a_power_law_within_their_tables():
    value_BF = sample(0, 20_000, SMALL)["value_BF"]
    assert (value_BF.min(axis=0) == 0).all()
    assert (value_BF.max(axis=0) == np.array(SMALL.table_rows) - 1).all()
    first, second, fourth = (np.mean(value_BF[:, 0] == k) for k in (0, 1, 3))
    assert first > 1.5 * second > 2 * fourth > 0
