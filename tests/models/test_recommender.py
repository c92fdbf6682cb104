"""The recommender: its pairs, its tables, published sizes, and that it learns the planted rule."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from models.recommender import (
    CRITEO_KAGGLE,
    CRITEO_TERABYTE,
    Recommender,
    RecommenderConfig,
    interact,
    loss,
    sample,
)
from tests.compiled import compiled, split
from tests.models.descent import descend, made, parameter_count

SMALL = RecommenderConfig(table_rows=(64, 16, 3), dim=8, bottom=(16, 8), top=(16,))


def test_it_learns_the_planted_rule():
    model = made(Recommender, SMALL)
    losses = descend(model, loss, [sample(seed, 256, SMALL) for seed in range(40)], 0.02)
    unseen = sample(40, 2000, SMALL)
    graphdef, params = nnx.split(model)
    value, metrics = compiled(lambda p: loss(nnx.merge(graphdef, p), unseen), params)(params)
    clicks = unseen["click_B"].mean()
    blind = -clicks * np.log(clicks) - (1 - clicks) * np.log(1 - clicks)
    assert losses[0] > 0.9 * blind
    assert 0 < value < 0.8 * blind
    assert metrics["accuracy"] > 0.7


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


@pytest.mark.parametrize(
    ("config", "rows", "maps"),
    [
        (CRITEO_KAGGLE, 33_762_577, "13-512-256-64-16 367-512-256-1"),
        (CRITEO_TERABYTE, 187_767_399, "13-512-256-128 479-1024-1024-512-256-1"),
    ],
    ids=["Kaggle", "Terabyte"],
)
def test_published_sizes(config, rows, maps):
    # The scripts' notation; 367 and 479 are the pairs of 27 vectors and the dense one.
    widths = [[int(width) for width in tower.split("-")] for tower in maps.split()]
    mlps = sum((a + 1) * b for tower in widths for a, b in itertools.pairwise(tower))
    count = parameter_count(lambda: Recommender(config))
    assert count == rows * config.dim + mlps
    if config is CRITEO_KAGGLE:
        # The paper: "approximately 540M".
        assert count == pytest.approx(540e6, rel=2e-3)


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


def test_a_seed_fixes_the_batch():
    jax.tree.map(np.testing.assert_array_equal, sample(3, 4, SMALL), sample(3, 4, SMALL))
    assert not np.array_equal(sample(3, 4, SMALL)["dense_BN"], sample(4, 4, SMALL)["dense_BN"])


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"bottom=\(16, 8\) must end in dim=4"):
        RecommenderConfig(bottom=(16, 8), dim=4)
    with pytest.raises(ValueError, match="row_multiple=0: expected at least 1"):
        RecommenderConfig(row_multiple=0)


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    jax.eval_shape(lambda: loss(Recommender(SMALL), sample(0, 4, SMALL), record)[0])
    assert seen.count(("batch", "embed")) == 3
    assert seen.count(("batch", "mlp")) == 3
