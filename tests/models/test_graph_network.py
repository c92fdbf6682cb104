"""The graph network: messages, symmetry, padding, batch statistics, published size, learning."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from models.constrain import unconstrained
from models.graph_network import (
    GraphNetwork,
    GraphNetworkConfig,
    Layer,
    loss,
    sample,
)
from models.syntax_trees import MASKED, PADDING
from tests.compiled import compiled
from tests.models.made import made

SMALL = GraphNetworkConfig(width=8, layers=2, largest=32)
NODES = 64


@functools.cache
def batch_of(seed=0):
    return sample(seed, NODES, SMALL)


def logits(model, batch):
    graphdef, state = nnx.split(model)
    return np.asarray(compiled(lambda s, b: nnx.merge(graphdef, s)(b), state, batch)(state, batch))


def test_a_node_receives_the_sum_of_its_messages():
    layer = made(lambda config: Layer(config, rngs=nnx.Rngs(0)), SMALL)
    layer.own[...] = np.float32(0.5)
    layer.eval()
    x_ND = np.random.default_rng(0).standard_normal((NODES, 8)).astype(np.float32)
    batch = batch_of()
    found_ND = layer(x_ND, batch, unconstrained)

    received_ND = 1.5 * x_ND
    edge_ED = batch["feature_EF"] @ np.asarray(layer.edge.kernel[...])
    for e, (source, destination) in enumerate(
        zip(batch["source_E"], batch["destination_E"], strict=True)
    ):
        received_ND[destination] += np.maximum(0, x_ND[source] + edge_ED[e])
    hidden_NM = np.maximum(0, received_ND @ np.asarray(layer.up.kernel[...]) / np.sqrt(1 + 1e-5))
    expected_ND = hidden_NM @ np.asarray(layer.down.kernel[...]) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(found_ND, expected_ND, rtol=1e-3, atol=1e-4)


def test_the_order_of_nodes_and_edges_means_nothing():
    batch, rng = batch_of(), np.random.default_rng(0)
    nodes, edges = rng.permutation(NODES), rng.permutation(len(batch["source_E"]))
    place = np.argsort(nodes).astype(np.int32)
    shuffled = {name: x[nodes] for name, x in batch.items() if name.endswith("_N")} | {
        "source_E": place[batch["source_E"][edges]],
        "destination_E": place[batch["destination_E"][edges]],
        "feature_EF": batch["feature_EF"][edges],
    }
    a_NY, b_NY = (logits(made(GraphNetwork, SMALL), b) for b in (batch, shuffled))
    np.testing.assert_allclose(a_NY[nodes], b_NY, rtol=1e-3, atol=1e-4)


def test_padding_changes_nothing():
    batch = batch_of()
    more, last = 40, np.full(100, NODES + 39, np.int32)
    padded = {
        name: np.concatenate([x, np.zeros(more, x.dtype)])
        for name, x in batch.items()
        if name.endswith("_N")
    } | {
        "source_E": np.concatenate([batch["source_E"], last]),
        "destination_E": np.concatenate([batch["destination_E"], last]),
        "feature_EF": np.concatenate([batch["feature_EF"], np.zeros((100, 2), np.float32)]),
    }
    model = made(GraphNetwork, SMALL)
    real = batch["type_N"] != PADDING
    a_NY, b_NY = logits(model, batch), logits(model, padded)
    np.testing.assert_allclose(a_NY[real], b_NY[:NODES][real], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_statistics_move_in_training_and_serve_in_evaluation():
    def statistics(model):
        return nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    model = made(GraphNetwork, SMALL)
    before = jax.device_get(statistics(model))
    model(batch_of())
    after = jax.device_get(statistics(model))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert jax.tree.all(moved)
    model.eval()
    one, other = (np.asarray(model(batch_of())) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, statistics(model)))
    assert np.abs(one - logits(made(GraphNetwork, SMALL), batch_of())).max() > 1e-3


def test_what_is_masked_is_hidden():
    batch = batch_of()
    masked_N, real_N = batch["masked_N"] > 0, batch["target_N"] != PADDING
    np.testing.assert_array_equal(batch["type_N"] == MASKED, masked_N)
    np.testing.assert_array_equal(batch["type_N"][~masked_N], batch["target_N"][~masked_N])
    assert (batch["target_N"][masked_N] > MASKED).all()
    assert masked_N.sum() == round(0.15 * real_N.sum())


def test_only_masked_nodes_count():
    model, batch = made(GraphNetwork, SMALL), batch_of()
    other_N = np.where(batch["masked_N"] > 0, batch["target_N"], 5).astype(np.int32)
    a, b = (loss(model, batch | {"target_N": x})[0] for x in (batch["target_N"], other_N))
    assert a == b > 0
