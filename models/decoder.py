"""Decoder-only transformer on bytes: rotary positions, grouped-query attention, SwiGLU, RMSNorm.

Dimensions in array names: B batch, S = T + 1 tokens of a document, T positions, D d_model,
H query heads, G key-value heads, R = H / G query heads sharing one, K head_dim, M mlp_dim,
V vocab_size, L layers.

Not modelled: dropout, a key-value cache, padding (every row of a batch is full).
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.constrain import Constrain, unconstrained

Remat = Literal["none", "dots", "full"]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of a `Decoder`; two equal configs build two equal models."""

    vocab_size: int = 256  # one token for each byte
    d_model: int = 256  # width of the residual stream
    heads: int = 8  # query heads
    kv_heads: int = 4  # key-value heads; each serves heads / kv_heads query heads
    head_dim: int = 32  # width of one head; even, because rotary turns pairs
    mlp_dim: int = 1024  # width of the gate and of the up projection
    layers: int = 4  # blocks
    sequence: int = 128  # positions T that a step predicts
    tied: bool = False  # the head is the embedding, transposed
    scanned: bool = True  # one scan over stacked layers, else a Python loop
    remat: Remat = "none"  # what a block recomputes in its backward pass
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.remat != "none" and self.remat not in REMAT_POLICIES:
            known = ["none", *REMAT_POLICIES]
            raise ValueError(f"remat={self.remat!r}: expected one of {known}")


class RMSNorm(nnx.Module):
    """Scales to unit root mean square over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,)))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
        return x_BTD * jax.lax.rsqrt(mean_square + 1e-6) * self.scale[...]


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, H, G, K = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.query = _normal(rngs, (D, H, K), fan_in=D)
        self.key = _normal(rngs, (D, G, K), fan_in=D)
        self.value = _normal(rngs, (D, G, K), fan_in=D)
        self.out = _normal(rngs, (H, K, D), fan_in=H * K)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        q_BTHK = rotate(jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...]))
        k_BTGK = rotate(jnp.einsum("BTD,DGK->BTGK", x_BTD, self.key[...]))
        v_BTGK = jnp.einsum("BTD,DGK->BTGK", x_BTD, self.value[...])
        q_BTHK = constrain(q_BTHK, ("batch", None, "heads", None))
        k_BTGK = constrain(k_BTGK, ("batch", None, "kv_heads", None))
        v_BTGK = constrain(v_BTGK, ("batch", None, "kv_heads", None))

        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
        scores_BGRTU = jnp.einsum("BTGRK,BUGK->BGRTU", q_BTGRK, k_BTGK) / math.sqrt(K)
        causal_TU = jnp.tril(jnp.ones((T, T), dtype=bool))
        weights_BGRTU = jax.nn.softmax(jnp.where(causal_TU, scores_BGRTU, -1e9), axis=-1)
        mixed_BTGRK = jnp.einsum("BGRTU,BUGK->BTGRK", weights_BGRTU, v_BTGK)
        mixed_BTHK = constrain(mixed_BTGRK.reshape(B, T, H, K), ("batch", None, "heads", None))
        return jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, self.out[...])


class SwiGLU(nnx.Module):
    """Gated MLP (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, M = config.d_model, config.mlp_dim
        self.gate = _normal(rngs, (D, M), fan_in=D)
        self.up = _normal(rngs, (D, M), fan_in=D)
        self.down = _normal(rngs, (M, D), fan_in=M)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        hidden_BTM = jax.nn.silu(x_BTD @ self.gate[...]) * (x_BTD @ self.up[...])
        return constrain(hidden_BTM, ("batch", None, "mlp")) @ self.down[...]


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), constrain)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), constrain)
        return constrain(x_BTD, ("batch", None, "embed"))


class Decoder(nnx.Module):
    """Bytes in, next-byte logits out. `layers` is one stacked Block if scanned, else a list."""

    def __init__(self, config: DecoderConfig):
        rngs = nnx.Rngs(config.seed)
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.layers: Block | nnx.List[Block]
        self.embedding = _normal(rngs, (V, D), fan_in=D)
        if config.scanned:
            stack = nnx.vmap(lambda rngs: Block(config, rngs=rngs))
            self.layers = nnx.split_rngs(splits=config.layers)(stack)(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(D)
        if not config.tied:
            self.head = _normal(rngs, (D, V), fan_in=D)

    def __call__(self, tokens_BT: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns logits_BTV."""
        x_BTD = constrain(self.embedding[...][tokens_BT], ("batch", None, "embed"))
        # One graphdef and pure parameters: scanning the module itself would carry the parameters
        # out of the loop again.
        blocks = [self.layers] if isinstance(self.layers, Block) else list(self.layers)
        graphdef, _ = nnx.split(blocks[0])

        def block(x_BTD: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, params)(x_BTD, constrain), None

        if self.config.remat != "none":
            # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
            block = jax.checkpoint(
                block,
                policy=REMAT_POLICIES[self.config.remat],
                prevent_cse=not self.config.scanned,
            )
        if self.config.scanned:
            x_BTD, _ = jax.lax.scan(block, x_BTD, nnx.state(self.layers))
        else:
            for layer in blocks:
                x_BTD, _ = block(x_BTD, nnx.state(layer))

        head_DV = self.embedding[...].T if self.config.tied else self.head[...]
        return constrain(self.norm(x_BTD) @ head_DV, ("batch", None, "vocab"))


def loss(
    model: Decoder, tokens_BS: jax.Array, constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte, in nats; the metrics hold it in bits.

    Args:
      tokens_BS: int32 bytes, T + 1 of them in a row; row t predicts row t + 1.
    """
    logits_BTV = model(tokens_BS[:, :-1], constrain)
    targets_BT = tokens_BS[:, 1:]
    log_total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    mean = jnp.mean(log_total_BT - target_BT)
    return mean, {"bits_per_byte": mean / math.log(2)}


def rotate(x_BTHK: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), halves paired as in GPT-NeoX, base 10,000."""
    T, K = x_BTHK.shape[1], x_BTHK.shape[3]
    frequency_k = 10_000.0 ** (-jnp.arange(0, K, 2) / K)
    angle_T1k = jnp.arange(T)[:, None, None] * frequency_k
    cos_T1k, sin_T1k = jnp.cos(angle_T1k), jnp.sin(angle_T1k)
    a_BTHk, b_BTHk = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate(
        [a_BTHk * cos_T1k - b_BTHk * sin_T1k, b_BTHk * cos_T1k + a_BTHk * sin_T1k], axis=-1
    )


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)
