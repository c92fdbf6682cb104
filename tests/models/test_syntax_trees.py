"""Graphs of functions: their nodes and edges, and many packed as one."""

import ast

import numpy as np
import pytest

from models.syntax_trees import PADDING, functions, graph_of, packed, type_ids


def test_a_function_becomes_its_tree():
    graph = graph_of(ast.parse("def f(x):\n    return x + 1").body[0])
    names = {i: name for name, i in type_ids().items()}
    assert [names[i] for i in graph.type_N] == [
        *("FunctionDef", "arguments", "arg", "Return", "BinOp", "Name", "Add", "Constant")
    ]
    edges = {
        (int(a), int(b), *(int(x) for x in feature_F))
        for a, b, feature_F in zip(
            graph.source_E, graph.destination_E, graph.feature_EF, strict=True
        )
    }
    down = {(0, 1), (1, 2), (0, 3), (3, 4), (4, 5), (4, 6), (4, 7)}
    along = {(2, 5), (5, 6), (6, 7)}
    assert edges == (
        {(a, b, 0, 0) for a, b in down}
        | {(b, a, 0, 1) for a, b in down}
        | {(a, b, 1, 0) for a, b in along}
        | {(b, a, 1, 1) for a, b in along}
    )


@pytest.mark.parametrize(("nodes", "edges"), [(512, 4000), (512, 600)])
def test_packed_graphs_fill_their_room_and_stay_apart(nodes, edges):
    graph = packed(np.random.default_rng(0), nodes, edges, largest=64)
    assert graph.type_N.shape == (nodes,)
    assert graph.source_E.shape == graph.destination_E.shape == (edges,)
    assert graph.feature_EF.shape == (edges, 2)
    assert graph.type_N[-1] == PADDING
    padding_E = graph.type_N[graph.source_E] == PADDING
    np.testing.assert_array_equal(graph.source_E[padding_E], nodes - 1)
    np.testing.assert_array_equal(graph.destination_E[padding_E], nodes - 1)
    # Each function starts anew: no edge crosses into it.
    starts = np.flatnonzero(graph.type_N == type_ids()["FunctionDef"])
    real_E = ~padding_E
    low_E = np.minimum(graph.source_E, graph.destination_E)[real_E]
    high_E = np.maximum(graph.source_E, graph.destination_E)[real_E]
    apart = [s for s in starts if not ((low_E < s) & (high_E >= s)).any()]
    assert len(apart) >= 3
    # Whatever comes next was too large for what is left of nodes or of edges.
    spare_nodes = (graph.type_N == PADDING).sum()
    assert min(spare_nodes - 64, padding_E.sum() - 4 * 64) <= 0


def test_functions_that_are_too_large_are_left_out():
    sizes = [len(graph.type_N) for file in range(5) for graph in functions(file, 40)]
    assert sizes and max(sizes) <= 40


def test_too_little_room_is_refused():
    with pytest.raises(ValueError, match="nodes=64 and edges=500 may not hold"):
        packed(np.random.default_rng(0), 64, 500, largest=64)
