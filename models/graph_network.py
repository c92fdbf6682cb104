"""Graph isomorphism network (Xu et al. 2019) that guesses masked nodes of syntax trees.

Attribute masking (Hu et al. 2020, "Strategies for Pre-training Graph Neural Networks"): some nodes'
kinds are hidden, and the network tells them from what is around. Messages go along edges by a
gather and a segment sum.

A batch is many graphs side by side as one, with fixed numbers of nodes and edges in all; what is
left over is padding nodes, and edges from the last of them to itself (as in GraphNets, Battaglia
et al. 2018, and Jraph). So no array has a dimension of graphs, and as edges name nodes by their
places, a part of a batch is no batch: gradients cannot be accumulated over parts.

Dimensions in array names: N nodes, E edges, F = 2 features of an edge, D width, Y types.

Not modelled: nodes' names and depths, a virtual node, dropout.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import syntax_trees
from models.constrain import Constrain, unconstrained
from models.decoder import normal
from models.syntax_trees import MASKED, PADDING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphNetworkConfig:
    """Sizes of a `GraphNetwork`; two equal configs build two equal models."""

    types: int = 160  # kinds of node Y, padding and masked included
    width: int = 32  # of a node's vector D; inside a layer's MLP it is twice that
    layers: int = 3  # rounds of messages
    masked_share: float = 0.15  # of the nodes whose kind is hidden
    edges_per_node: int = 3  # edges of a batch, relative to its nodes
    largest: int = 128  # nodes of the largest function that is used
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.types < 2 + len(syntax_trees.type_ids()):
            raise ValueError(
                f"types={self.types} has no room for padding, masked and the "
                f"{len(syntax_trees.type_ids())} kinds of node of this Python"
            )
        if not 0 < self.masked_share < 1:
            raise ValueError(f"masked_share={self.masked_share}: expected between 0 and 1")


GIN_CODE2 = GraphNetworkConfig(
    # The GIN of the "Open Graph Benchmark" (Hu et al. 2020) for ogbg-code2: appendix, and the
    # authors' examples/graphproppred/code2. 15 % masked: Hu et al. 2020 (pre-training), appendix.
    width=300,
    layers=5,
    masked_share=0.15,
    # Of our choosing: kinds of node for this and the next versions of Python, edges, sizes.
    types=160,
    edges_per_node=3,
    largest=512,
)


class Layer(nnx.Module):
    """A round of messages and an MLP at each node, with batch norm (Ioffe & Szegedy 2015)."""

    def __init__(self, config: GraphNetworkConfig, *, rngs: nnx.Rngs):
        D = config.width
        self.edge = nnx.Linear(2, D, rngs=rngs)
        self.own = nnx.Param(jnp.zeros(()))
        self.up = nnx.Linear(D, 2 * D, rngs=rngs)
        self.up_norm = nnx.BatchNorm(2 * D, momentum=0.9, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, rngs=rngs)
        self.down_norm = nnx.BatchNorm(D, momentum=0.9, rngs=rngs)

    def __call__(
        self, x_ND: jax.Array, batch: dict[str, jax.Array], constrain: Constrain
    ) -> jax.Array:
        # Padding has no part in the statistics.
        real_N1 = (batch["type_N"] != PADDING)[:, None]
        message_ED = jax.nn.relu(x_ND[batch["source_E"]] + self.edge(batch["feature_EF"]))
        message_ED = constrain(message_ED, ("edges", "embed"))
        received_ND = jax.ops.segment_sum(message_ED, batch["destination_E"], x_ND.shape[0])
        x_ND = constrain((1 + self.own[...]) * x_ND + received_ND, ("nodes", "embed"))
        hidden_NM = jax.nn.relu(self.up_norm(self.up(x_ND), mask=real_N1))
        x_ND = self.down(constrain(hidden_NM, ("nodes", "mlp")))
        return constrain(self.down_norm(x_ND, mask=real_N1), ("nodes", "embed"))


class GraphNetwork(nnx.Module):
    """Nodes and edges in, logits of each node's kind out."""

    def __init__(self, config: GraphNetworkConfig):
        rngs = nnx.Rngs(config.seed)
        D, Y = config.width, config.types
        self.embedding = normal(rngs, (Y, D), fan_in=1)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.layers)])
        self.head = nnx.Linear(D, Y, rngs=rngs)

    def __call__(
        self, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
    ) -> jax.Array:
        """Returns logits_NY; those of padding mean nothing. Updates the batch statistics."""
        x_ND = constrain(self.embedding[...][batch["type_N"]], ("nodes", "embed"))
        for i, layer in enumerate(self.layers):
            x_ND = layer(x_ND if i == 0 else jax.nn.relu(x_ND), batch, constrain)
        return constrain(self.head(x_ND), ("nodes", "vocab"))


def loss(
    model: GraphNetwork, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the masked nodes' kinds, in nats, and how many are guessed.

    Args:
      batch: of `sample`: type_N, where masked nodes are `MASKED`; target_N, their true kinds;
        masked_N, float32, 1 for a masked node; source_E, destination_E, feature_EF.
    """
    logits_NY, masked_N = model(batch, constrain), batch["masked_N"]
    surprise_N = optax.softmax_cross_entropy_with_integer_labels(logits_NY, batch["target_N"])
    right_N = jnp.argmax(logits_NY, axis=-1) == batch["target_N"]
    count = jnp.sum(masked_N)
    accuracy = jnp.sum(right_N * masked_N) / count
    return jnp.sum(surprise_N * masked_N) / count, {"accuracy": accuracy}


def sample(seed: int, batch_size: int, config: GraphNetworkConfig) -> dict[str, np.ndarray]:
    """Functions of the standard library with masked nodes. Same seed and Python, same batch.

    Args:
      batch_size: nodes N in all; there are `edges_per_node` times as many edges.
    """
    rng = np.random.default_rng(seed)
    edges = config.edges_per_node * batch_size
    graph = syntax_trees.packed(rng, batch_size, edges, config.largest)
    real = np.flatnonzero(graph.type_N != PADDING)
    hidden = rng.choice(real, max(1, round(config.masked_share * len(real))), replace=False)
    type_N, masked_N = graph.type_N.copy(), np.zeros(batch_size, np.float32)
    type_N[hidden], masked_N[hidden] = MASKED, 1
    return {
        "type_N": type_N,
        "target_N": graph.type_N,
        "masked_N": masked_N,
        "source_E": graph.source_E,
        "destination_E": graph.destination_E,
        "feature_EF": graph.feature_EF,
    }
