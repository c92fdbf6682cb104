"""Graphs to train on that every machine has: syntax trees of the standard library's functions.

Dimensions in array names: N nodes, E edges, F = 2 features of an edge.
"""

import ast
import dataclasses
import functools
import itertools
import warnings

import numpy as np

from models import text

PADDING, MASKED = 0, 1  # kinds of node besides those of `ast`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and directed edges.

    Attributes:
      type_N: int32, the kind of each node.
      source_E, destination_E: int32, where each edge starts and ends, as places in `type_N`.
      feature_EF: float32; whether the edge links neighbours in the text (else parent and child),
        and whether it runs backwards (else downwards, or on in the text).
    """

    type_N: np.ndarray
    source_E: np.ndarray
    destination_E: np.ndarray
    feature_EF: np.ndarray


@functools.cache
def type_ids() -> dict[str, int]:
    """Kind of node -> its number from 2 on; differs between versions of Python, as `ast` does."""
    found: set[str] = set()
    classes: list[type[ast.AST]] = [ast.AST]
    while classes:
        below = classes.pop().__subclasses__()
        found.update(kind.__name__ for kind in below)
        classes += below
    return {name: i for i, name in enumerate(sorted(found), start=2)}


@functools.cache
def functions(file: int, largest: int) -> tuple[Graph, ...]:
    """Graphs of all functions of a file of the training split that have up to `largest` nodes."""
    with warnings.catch_warnings():
        # What the compiler thinks of the library's escape sequences is not of interest.
        warnings.simplefilter("ignore")
        module = ast.parse(files()[file])
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    graphs = (graph_of(node) for node in ast.walk(module) if isinstance(node, defined))
    return tuple(graph for graph in graphs if len(graph.type_N) <= largest)


@functools.cache
def files() -> tuple[bytes, ...]:
    """The sources of the training split."""
    return tuple(source for source in text.read("train").tobytes().split(b"\0") if source)


def graph_of(root: ast.AST) -> Graph:
    """The tree below `root` with both directions of each edge, and its leaves linked in order.

    As in ogbg-code2 (Hu et al. 2020, section 6.4), but without the names that nodes carry. Whether
    a name is read or written is left out.
    """
    types: list[int] = []
    links: list[tuple[int, int, int]] = []
    leaves: list[int] = []

    def visit(node: ast.AST) -> int:
        place = len(types)
        types.append(type_ids()[type(node).__name__])
        below = [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.expr_context)]
        links.extend([(place, visit(child), 0) for child in below])
        if not below:
            leaves.append(place)
        return place

    visit(root)
    links += [(a, b, 1) for a, b in itertools.pairwise(leaves)]
    link_L3 = np.array(links, np.int32).reshape(-1, 3)
    ends_2L = np.concatenate([link_L3[:, :2], link_L3[:, 1::-1]]).T
    backwards_E = np.repeat([0, 1], len(links))
    return Graph(
        type_N=np.array(types, np.int32),
        source_E=ends_2L[0],
        destination_E=ends_2L[1],
        feature_EF=np.stack([np.tile(link_L3[:, 2], 2), backwards_E], axis=1).astype(np.float32),
    )


def packed(rng: np.random.Generator, nodes: int, edges: int, largest: int) -> Graph:
    """Random functions side by side as one graph, filled up to `nodes` and `edges` in all.

    What is filled up is nodes of kind `PADDING`, the last one always, and edges from that to
    itself.

    Args:
      largest: nodes of the largest function that is taken.
    """
    if nodes <= largest or edges < 4 * largest:
        raise ValueError(
            f"nodes={nodes} and edges={edges} may not hold one function of largest={largest}: "
            f"expected more than {largest} and at least {4 * largest}"
        )
    graphs, places, room = [], 0, edges
    while True:
        choice = functions(int(rng.integers(len(files()))), largest)
        if not choice:
            continue
        graph = choice[rng.integers(len(choice))]
        if places + len(graph.type_N) >= nodes or len(graph.source_E) > room:
            break
        graphs.append((places, graph))
        places, room = places + len(graph.type_N), room - len(graph.source_E)
    loop_R = np.full(room, nodes - 1, np.int32)
    return Graph(
        type_N=np.concatenate(
            [graph.type_N for _, graph in graphs] + [np.full(nodes - places, PADDING, np.int32)]
        ),
        source_E=np.concatenate([at + graph.source_E for at, graph in graphs] + [loop_R]),
        destination_E=np.concatenate([at + graph.destination_E for at, graph in graphs] + [loop_R]),
        feature_EF=np.concatenate(
            [graph.feature_EF for _, graph in graphs] + [np.zeros((room, 2), np.float32)]
        ),
    )
