"""Click prediction from numbers and categories: DLRM (Naumov et al. 2019).

A category is looked up in the table of its feature, the numbers go through an MLP to a vector of
the same width, and the dot products of all pairs of these vectors go through another MLP to one
logit. The tables hold nearly all parameters and share neither rows nor sizes.

Dimensions in array names: B batch, N dense features, F tables, V = F + 1 vectors of an example,
D dim, P = V (V - 1) / 2 pairs, W the width of an MLP's layer.

Not modelled: sparse gradients (that of a table is as large as the table), several values of one
feature, tables split further by the quotient trick.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.constrain import Constrain, unconstrained


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecommenderConfig:
    """Sizes of a `Recommender`; two equal configs build two equal models."""

    dense: int = 13  # numeric features N
    table_rows: tuple[int, ...] = (4096, 1024, 512, 64, 16, 10, 3)  # of each table
    row_multiple: int = 1  # rows are rounded up to a multiple of it, so that devices can share them
    dim: int = 16  # of every vector D, from a table or from the bottom MLP
    bottom: tuple[int, ...] = (64, 32, 16)  # widths of the dense features' MLP; the last is dim
    top: tuple[int, ...] = (64, 32)  # widths of the pairs' MLP, before its one logit
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.bottom[-1] != self.dim:
            raise ValueError(f"bottom={self.bottom} must end in dim={self.dim}")
        if min(self.table_rows) < 1:
            raise ValueError(f"table_rows={self.table_rows}: expected at least 1 each")
        if self.row_multiple < 1:
            raise ValueError(f"row_multiple={self.row_multiple}: expected at least 1")


CRITEO_KAGGLE = RecommenderConfig(
    # Naumov et al. 2019, section 5.1 and the authors' dlrm_s_criteo_kaggle.sh; a table has a row
    # for each value of its feature in the seven days of the Criteo display challenge.
    table_rows=(
        *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
        *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
    ),
    dim=16,
    bottom=(512, 256, 64, 16),
    top=(512, 256),
)

CRITEO_TERABYTE = RecommenderConfig(
    # MLPerf's DLRM on Criteo's click logs of 24 days: the authors' bench/run_and_time.sh, with at
    # most 40,000,000 rows in a table.
    table_rows=(
        *(39_884_406, 39_043, 17_289, 7420, 20_263, 3, 7120, 1543, 63, 38_532_951, 2_953_546),
        *(403_346, 10, 2208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984),
        *(585_935, 12_972, 108, 36),
    ),
    dim=128,
    bottom=(512, 256, 128),
    top=(1024, 1024, 512, 256),
)


class Tower(nnx.Module):
    """Linear maps of given widths with a ReLU after each."""

    def __init__(self, width: int, widths: tuple[int, ...], *, rngs: nnx.Rngs):
        pairs = zip((width, *widths), widths, strict=False)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x_BW: jax.Array, constrain: Constrain) -> jax.Array:
        for layer in self.layers:
            x_BW = constrain(jax.nn.relu(layer(x_BW)), ("batch", "mlp"))
        return x_BW


class Recommender(nnx.Module):
    """Numbers and categories in, logits of a click out."""

    def __init__(self, config: RecommenderConfig):
        rngs = nnx.Rngs(config.seed)
        D, V = config.dim, len(config.table_rows) + 1
        multiple = config.row_multiple
        rows_F = [-(-rows // multiple) * multiple for rows in config.table_rows]
        self.config = config
        self.tables = nnx.List([uniform(rngs, (rows, D)) for rows in rows_F])
        self.bottom = Tower(config.dense, config.bottom, rngs=rngs)
        self.top = Tower(D + V * (V - 1) // 2, config.top, rngs=rngs)
        self.head = nnx.Linear(config.top[-1], 1, rngs=rngs)

    def __call__(
        self, dense_BN: jax.Array, value_BF: jax.Array, constrain: Constrain = unconstrained
    ) -> jax.Array:
        """Returns logits_B."""
        dense_BD = self.bottom(dense_BN, constrain)
        looked_up = [
            constrain(table[...][value_BF[:, f]], ("batch", "embed"))
            for f, table in enumerate(self.tables)
        ]
        x_BVD = constrain(jnp.stack([dense_BD, *looked_up], axis=1), ("batch", None, "embed"))
        pairs_BP = interact(x_BVD)
        x_BW = constrain(jnp.concatenate([dense_BD, pairs_BP], axis=1), ("batch", None))
        return self.head(self.top(x_BW, constrain))[:, 0]


def interact(x_BVD: jax.Array) -> jax.Array:
    """Dot products of each two different vectors of an example, each pair once: pairs_BP."""
    dots_BVV = jnp.einsum("BVD,BUD->BVU", x_BVD, x_BVD)
    rows_P, columns_P = np.tril_indices(x_BVD.shape[1], k=-1)
    return dots_BVV[:, rows_P, columns_P]


def uniform(rngs: nnx.Rngs, shape: tuple[int, int]) -> nnx.Param:
    """Weights of a table, as the authors draw them: the fewer rows, the larger."""
    bound = shape[0] ** -0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))


def loss(
    model: Recommender, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean binary cross-entropy of `batch["click_B"]` (float32, 0 or 1), in nats."""
    logits_B = model(batch["dense_BN"], batch["value_BF"], constrain)
    right_B = (logits_B > 0) == (batch["click_B"] > 0)
    surprise_B = optax.sigmoid_binary_cross_entropy(logits_B, batch["click_B"])
    return jnp.mean(surprise_B), {"accuracy": jnp.mean(right_B)}


def sample(seed: int, batch_size: int, config: RecommenderConfig) -> dict[str, np.ndarray]:
    """Synthetic clicks with a rule to learn. Same seed, same batch.

    The k-th value of a feature, k from 1, comes up with probability log(1 + 1 / k) / log(1 + rows),
    about in proportion to 1 / k, as popular items do; the
    dense features are logarithms of counts with a power law. Even values make a click likelier and
    odd ones less so, and whether a large first dense feature is good depends on the first category.
    """
    rng = np.random.default_rng(seed)
    rows_F = np.array(config.table_rows)
    power_BF = (rows_F + 1) ** rng.random((batch_size, len(rows_F)))
    value_BF = np.minimum(power_BF, rows_F).astype(np.int32) - 1  # it may be rounded up
    dense_BN = rng.exponential(size=(batch_size, config.dense)).astype(np.float32)
    sign_BF = 1 - 2 * (value_BF % 2)
    score_B = sign_BF.sum(axis=1) + sign_BF[:, 0] * (2 * dense_BN[:, 0] - 1)
    click_B = rng.random(batch_size) < 1 / (1 + np.exp(-score_B))
    return {"dense_BN": dense_BN, "value_BF": value_BF, "click_B": click_B.astype(np.float32)}
