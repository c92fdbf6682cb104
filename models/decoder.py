"""Decoder-only transformer: rotary positions, grouped-query attention, SwiGLU, RMSNorm.

Dimensions in array names: B batch, S = T + 1 tokens of a document, T positions, D d_model,
H query heads, G key-value heads, R = H / G query heads sharing one, K head_dim, M mlp_dim,
V vocab_size, L layers, U key positions (T of them), N blocks of queries or parts of the loss,
C = T / N positions in one.

In bfloat16 the parameters stay float32: `loss` casts them once (`models.precision`), matmuls and
the residual stream are bfloat16, norms, rotations, softmax and cross-entropy are computed in
float32. Every gradient is bfloat16 inside the backward pass and leaves it as float32; the
embedding alone is looked up in float32, since its gradient adds up thousands of tokens a row.
What a loop over blocks of queries or parts of the loss adds up (the gradients of keys, values and
head) is added in bfloat16.

Not modelled: dropout, a key-value cache, padding (every row of a batch is full), skipping the
blocks above the diagonal of attention (they are computed, then masked).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.constrain import Constrain, unconstrained
from models.precision import Dtype, cast

Remat = Literal["none", "dots", "full"]
AttentionKind = Literal["full", "blockwise"]

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
    attention: AttentionKind = "full"  # all scores at once, or those of a block of queries
    query_block: int = 512  # queries C in a block of blockwise attention
    loss_parts: int = 1  # parts of the sequence whose logits are made one after the other
    dtype: Dtype = "float32"  # of matmuls and activations; parameters are float32 in any case
    norm_epsilon: float = 1e-6  # added to RMSNorm's mean square
    rotary_base: float = 10_000.0  # longest wavelength of the rotary embedding, in 2 pi
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.remat != "none" and self.remat not in REMAT_POLICIES:
            known = ["none", *REMAT_POLICIES]
            raise ValueError(f"remat={self.remat!r}: expected one of {known}")
        if self.attention not in ("full", "blockwise"):
            raise ValueError(f"attention={self.attention!r}: expected 'full' or 'blockwise'")
        if self.attention == "blockwise" and self.sequence % self.query_block:
            raise ValueError(f"query_block={self.query_block} must divide sequence={self.sequence}")
        if self.sequence % self.loss_parts:
            raise ValueError(f"loss_parts={self.loss_parts} must divide sequence={self.sequence}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: expected 'float32' or 'bfloat16'")


LLAMA3_8B = DecoderConfig(
    # Llama 3 8B: "The Llama 3 Herd of Models" (Grattafiori et al. 2024), table 3; the vocabulary
    # as released (the table rounds it), the sequence of the first stage of its pre-training.
    vocab_size=128_256,
    d_model=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_dim=14_336,
    layers=32,
    sequence=8192,
    rotary_base=500_000.0,
    norm_epsilon=1e-5,
    # Of our choosing: 32 heads of 8192 x 8192 scores are 8 GiB a sequence, and its logits 4 GiB.
    remat="full",
    attention="blockwise",
    query_block=512,
    loss_parts=8,
    dtype="bfloat16",
)


class RMSNorm(nnx.Module):
    """Scales to unit root mean square over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, config: DecoderConfig):
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones((config.d_model,)))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide_BTD = x_BTD.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide_BTD), axis=-1, keepdims=True)
        unit_BTD = wide_BTD * jax.lax.rsqrt(mean_square + self.epsilon)
        return unit_BTD.astype(x_BTD.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, H, G, K = config.d_model, config.heads, config.kv_heads, config.head_dim
        self.config = config
        self.query = normal(rngs, (D, H, K), fan_in=D)
        self.key = normal(rngs, (D, G, K), fan_in=D)
        self.value = normal(rngs, (D, G, K), fan_in=D)
        self.out = normal(rngs, (H, K, D), fan_in=H * K)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        base = self.config.rotary_base
        q_BTHK = rotate(jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...]), base)
        k_BTGK = rotate(jnp.einsum("BTD,DGK->BTGK", x_BTD, self.key[...]), base)
        v_BTGK = jnp.einsum("BTD,DGK->BTGK", x_BTD, self.value[...])
        q_BTHK = constrain(q_BTHK, ("batch", None, "heads", None))
        k_BTGK = constrain(k_BTGK, ("batch", None, "kv_heads", None))
        v_BTGK = constrain(v_BTGK, ("batch", None, "kv_heads", None))

        B, T, H, K = q_BTHK.shape
        G = k_BTGK.shape[2]
        q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
        if self.config.attention == "full":
            mixed_BTGRK = attend(q_BTGRK, k_BTGK, v_BTGK)
        else:
            mixed_BTGRK = attend_blockwise(q_BTGRK, k_BTGK, v_BTGK, self.config.query_block)
        mixed_BTHK = constrain(mixed_BTGRK.reshape(B, T, H, K), ("batch", None, "heads", None))
        return jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, self.out[...])


def attend(
    q_BTGRK: jax.Array,
    k_BUGK: jax.Array,
    v_BUGK: jax.Array,
    position_T: jax.Array | None = None,
) -> jax.Array:
    """Causal softmax attention of all queries at once; returns mixed_BTGRK.

    Args:
      position_T: of each query among the keys; None where there are as many queries as keys.
    """
    scores_BGRTU = jnp.einsum("BTGRK,BUGK->BGRTU", q_BTGRK, k_BUGK)
    # The matmuls both ways stay in the inputs' dtype; the softmax alone is float32.
    scaled_BGRTU = scores_BGRTU.astype(jnp.float32) / math.sqrt(q_BTGRK.shape[-1])
    T, U = q_BTGRK.shape[1], k_BUGK.shape[1]
    if position_T is None:
        visible_TU = jnp.tril(jnp.ones((T, U), dtype=bool))
    else:
        visible_TU = position_T[:, None] >= jnp.arange(U)
    weights_BGRTU = jax.nn.softmax(jnp.where(visible_TU, scaled_BGRTU, -1e9), axis=-1)
    return jnp.einsum("BGRTU,BUGK->BTGRK", weights_BGRTU.astype(v_BUGK.dtype), v_BUGK)


def attend_blockwise(
    q_BTGRK: jax.Array, k_BUGK: jax.Array, v_BUGK: jax.Array, query_block: int
) -> jax.Array:
    """`attend`, one block of queries after the other; the backward pass makes scores anew.

    Args:
      query_block: queries C in a block; divides T. The largest array is scores_BGRCU.
    """
    q_NBCGRK = parts_of(q_BTGRK, q_BTGRK.shape[1] // query_block)
    N, B, C, *GRK = q_NBCGRK.shape

    @jax.checkpoint
    def block(q_BCGRK: jax.Array, n: jax.Array) -> jax.Array:
        return attend(q_BCGRK, k_BUGK, v_BUGK, jnp.arange(C) * N + n)

    _, mixed_NBCGRK = jax.lax.scan(
        lambda _, part: (None, block(*part)), None, (q_NBCGRK, jnp.arange(N))
    )
    return jnp.moveaxis(mixed_NBCGRK, 0, 2).reshape(B, C * N, *GRK)


def parts_of(x_BT: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] -> [count, B, T / count, ...]; part n holds every count-th position from n on.

    A contiguous block would lie on few devices where the sequence is sharded; of these parts each
    device holds its share.
    """
    B, T, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(B, T // count, count, *rest), 2, 0)


class SwiGLU(nnx.Module):
    """Gated MLP (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, M = config.d_model, config.mlp_dim
        self.gate = normal(rngs, (D, M), fan_in=D)
        self.up = normal(rngs, (D, M), fan_in=D)
        self.down = normal(rngs, (M, D), fan_in=M)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        hidden_BTM = jax.nn.silu(x_BTD @ self.gate[...]) * (x_BTD @ self.up[...])
        return constrain(hidden_BTM, ("batch", None, "mlp")) @ self.down[...]


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> tuple[jax.Array, None]:
        """Returns x_BTD, and nothing that the loss needs besides."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), constrain)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), constrain)
        return constrain(x_BTD, ("batch", None, "embed")), None


class Stack(nnx.Module):
    """Embedding, `layers` (one stacked block if scanned, else a list), last norm and head."""

    def __init__(self, config: DecoderConfig, make_block: Callable[[nnx.Rngs], nnx.Module]):
        rngs = nnx.Rngs(config.seed)
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.layers: nnx.Module | nnx.List[nnx.Module]
        self.embedding = normal(rngs, (V, D), fan_in=D)
        if config.scanned:
            self.layers = nnx.split_rngs(splits=config.layers)(nnx.vmap(make_block))(rngs)
        else:
            self.layers = nnx.List([make_block(rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config)
        if not config.tied:
            self.head = normal(rngs, (D, V), fan_in=D)

    def __call__(self, tokens_BT: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns logits_BTV."""
        model = cast(self, self.config.dtype)
        return model.logits(model.features(tokens_BT, constrain)[0], constrain)

    def features(self, tokens_BT: jax.Array, constrain: Constrain) -> tuple[jax.Array, Any]:
        """Returns x_BTD behind the last block, and what the blocks return besides, stacked [L]."""
        x_BTD = self.embedding[...][tokens_BT].astype(self.config.dtype)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        # One graphdef and pure parameters: scanning the module itself would carry the parameters
        # out of the loop again.
        layers: Any = self.layers
        blocks = list(layers) if isinstance(layers, nnx.List) else [layers]
        graphdef, _ = nnx.split(blocks[0])

        def block(x_BTD: jax.Array, params: nnx.State) -> tuple[jax.Array, Any]:
            return nnx.merge(graphdef, params)(x_BTD, constrain)

        if self.config.remat != "none":
            # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
            block = jax.checkpoint(
                block,
                policy=REMAT_POLICIES[self.config.remat],
                prevent_cse=not self.config.scanned,
            )
        if self.config.scanned:
            return jax.lax.scan(block, x_BTD, nnx.state(layers))
        besides = []
        for layer in blocks:
            x_BTD, beside = block(x_BTD, nnx.state(layer))
            besides.append(beside)
        return x_BTD, jax.tree.map(lambda *each: jnp.stack(each), *besides)

    def logits(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        """x_BTD -> logits_BTV, for all or for some of the positions."""
        if self.config.tied:
            head_DV = self.embedding[...].T.astype(self.config.dtype)
        else:
            head_DV = self.head[...]
        return constrain(self.norm(x_BTD) @ head_DV, ("batch", None, "vocab"))


class Decoder(Stack):
    """Tokens in, next-token logits out."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config, lambda rngs: Block(config, rngs=rngs))


def loss(
    model: Decoder, tokens_BS: jax.Array, constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte, in nats; the metrics hold it in bits.

    Args:
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    model = cast(model, model.config.dtype)
    x_BTD, _ = model.features(tokens_BS[:, :-1], constrain)
    mean = cross_entropy(model, x_BTD, tokens_BS, constrain)
    return mean, {"bits_per_byte": mean / math.log(2)}


def cross_entropy(
    model: Stack, x_BTD: jax.Array, tokens_BS: jax.Array, constrain: Constrain
) -> jax.Array:
    """Mean cross-entropy of the next tokens, in nats; makes logits in `loss_parts` parts."""
    parts = model.config.loss_parts
    if parts == 1:
        return jnp.mean(_surprise(model.logits(x_BTD, constrain), tokens_BS[:, 1:]))

    @jax.checkpoint
    def part(x_BCD: jax.Array, targets_BC: jax.Array) -> jax.Array:
        return jnp.sum(_surprise(model.logits(x_BCD, constrain), targets_BC))

    targets_BT = tokens_BS[:, 1:]
    total, _ = jax.lax.scan(
        lambda total, xs: (total + part(*xs), None),
        jnp.zeros((), jnp.float32),
        (parts_of(x_BTD, parts), parts_of(targets_BT, parts)),
    )
    return total / targets_BT.size


def _surprise(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    logits_BTV = logits_BTV.astype(jnp.float32)
    log_total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return log_total_BT - target_BT


def rotate(x_BTHK: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding (Su et al. 2021), halves paired as in GPT-NeoX."""
    T, K = x_BTHK.shape[1], x_BTHK.shape[3]
    frequency_k = base ** (-jnp.arange(0, K, 2) / K)
    angle_T1k = jnp.arange(T)[:, None, None] * frequency_k
    cos_T1k, sin_T1k = jnp.cos(angle_T1k), jnp.sin(angle_T1k)
    a_BTHk, b_BTHk = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned_BTHK = jnp.concatenate(
        [a_BTHk * cos_T1k - b_BTHk * sin_T1k, b_BTHk * cos_T1k + a_BTHk * sin_T1k], axis=-1
    )
    return turned_BTHK.astype(x_BTHK.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> nnx.Param:
    """Normal weights whose output has the variance of their input."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)
