"""Pre-norm transformer blocks with LayerNorm and GELU, and a stack of them.

Dimensions in array names: B batch, T positions, D d_model, H heads, K = D / H, M mlp_dim.
"""

import dataclasses

import jax
from flax import nnx

from models.constrain import Constrain
from models.decoder import REMAT_POLICIES, Remat
from models.stacked import make_layers, run_layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of a stack of blocks."""

    d_model: int = 64  # width of the residual stream
    heads: int = 4  # each of d_model / heads
    mlp_dim: int = 128  # width between the MLP's two maps
    layers: int = 2  # blocks
    causal: bool = False  # a position sees itself and those before it, else all
    scanned: bool = True  # one scan over stacked layers, else a Python loop
    remat: Remat = "none"  # what a block recomputes in its backward pass
    norm_epsilon: float = 1e-6  # added to LayerNorm's variance

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of heads={self.heads}")
        if self.remat != "none" and self.remat not in REMAT_POLICIES:
            known = ["none", *REMAT_POLICIES]
            raise ValueError(f"remat={self.remat!r}: expected one of {known}")


class Attention(nnx.Module):
    """Multi-head attention with biases (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, H = config.d_model, config.heads
        self.causal = config.causal
        self.query = nnx.LinearGeneral(D, (H, D // H), rngs=rngs)
        self.key = nnx.LinearGeneral(D, (H, D // H), rngs=rngs)
        self.value = nnx.LinearGeneral(D, (H, D // H), rngs=rngs)
        self.out = nnx.LinearGeneral((H, D // H), D, axis=(-2, -1), rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        q_BTHK, k_BTHK, v_BTHK = (
            constrain(project(x_BTD), ("batch", None, "heads", None))
            for project in (self.query, self.key, self.value)
        )
        mixed_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=self.causal)
        return self.out(constrain(mixed_BTHK, ("batch", None, "heads", None)))


class MLP(nnx.Module):
    """Two maps with GELU (Hendrycks & Gimpel 2016) between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(config.d_model, config.mlp_dim, rngs=rngs)
        self.down = nnx.Linear(config.mlp_dim, config.d_model, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        return self.down(constrain(jax.nn.gelu(self.up(x_BTD)), ("batch", None, "mlp")))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, epsilon = config.d_model, config.norm_epsilon
        self.attention_norm = nnx.LayerNorm(D, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(D, epsilon=epsilon, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), constrain)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), constrain)
        return constrain(x_BTD, ("batch", None, "embed"))


def make_blocks(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    """`layers` blocks, stacked if scanned."""
    return make_layers(
        lambda rngs: Block(config, rngs=rngs), config.layers, scanned=config.scanned, rngs=rngs
    )


def run_blocks(
    blocks: nnx.Module, config: TransformerConfig, x_BTD: jax.Array, constrain: Constrain
) -> jax.Array:
    """x_BTD through all that `make_blocks` made."""
    return run_layers(
        blocks, x_BTD, lambda block, x_BTD: block(x_BTD, constrain), remat=config.remat
    )
