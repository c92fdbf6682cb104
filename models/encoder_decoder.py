"""Encoder-decoder transformer: T5 (Raffel et al. 2020), in the form of its release 1.1.

The encoder reads text some spans of which a sentinel stands for, the decoder writes the spans
(span corruption, section 3.3.4). Positions enter through a bias on the scores that depends on the
distance in buckets; the first layer's table serves all layers of a stack. As in T5, scores are not
scaled, and nothing has a bias vector. The MLP is gated by GELU (Shazeer 2020), and the head is not
the embedding.

Dimensions in array names: B batch, W bytes of a window, S positions of the encoder, T of the
decoder (or of either), U key positions, D d_model, H heads, K head_dim, M mlp_dim, V vocab_size,
L layers.

Not modelled: dropout, an end-of-text token, padding (rows of a batch are equally long).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import spans, text
from models.constrain import Constrain, unconstrained
from models.decoder import REMAT_POLICIES, Remat, normal
from models.stacked import make_layers, run_layers

START = 0  # what the decoder sees before its first token; texts have it behind each file too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """Sizes and choices of an `EncoderDecoder`; two equal configs build two equal models."""

    vocab_size: int = 288  # bytes and sentinels
    d_model: int = 64  # width of the residual stream
    heads: int = 4  # of self and of cross attention
    head_dim: int = 16  # width of one head
    mlp_dim: int = 128  # width of the gate and of the up projection
    layers: int = 2  # blocks of the encoder, and of the decoder
    buckets: int = 32  # of distances between positions
    longest: int = 128  # distance from which on all share a bucket
    window: int = 72  # bytes W of text in an example
    spans: int = 4  # taken out of it
    span_length: int = 3  # mean bytes of one
    scanned: bool = True  # one scan over stacked layers, else a Python loop
    remat: Remat = "none"  # what a block recomputes in its backward pass
    norm_epsilon: float = 1e-6  # added to RMSNorm's mean square
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.vocab_size < spans.BYTES + self.spans:
            raise ValueError(
                f"vocab_size={self.vocab_size} has no room for {spans.BYTES} bytes and "
                f"spans={self.spans} sentinels"
            )
        if self.spans * (self.span_length + 1) > self.window:
            raise ValueError(
                f"spans={self.spans} of span_length={self.span_length}, with a byte before each, "
                f"do not fit into window={self.window}"
            )
        if self.buckets < 4 or self.longest <= self.buckets // 2:
            raise ValueError(
                f"buckets={self.buckets} must be at least 4, and longest={self.longest} more than "
                f"half of them: each short distance has a bucket of its own"
            )
        if self.remat != "none" and self.remat not in REMAT_POLICIES:
            known = ["none", *REMAT_POLICIES]
            raise ValueError(f"remat={self.remat!r}: expected one of {known}")

    @property
    def source(self) -> int:
        """Positions S of the encoder: the window, a sentinel in place of each span."""
        return self.window - self.spans * (self.span_length - 1)

    @property
    def target(self) -> int:
        """Positions T of the decoder: the spans, each behind its sentinel."""
        return self.spans * (self.span_length + 1)


T5_BASE = EncoderDecoderConfig(
    # "T5.1.1.Base" of the authors' released checkpoints (text-to-text-transfer-transformer).
    vocab_size=32_128,
    d_model=768,
    heads=12,
    head_dim=64,
    mlp_dim=2048,
    layers=12,
    # Raffel et al. 2020, sections 2.1 and 3.1.2: 512 tokens, 15 % of the text, spans of 3; so many
    # whole spans that the encoder's 512 positions are full.
    window=568,
    spans=28,
    span_length=3,
)

# "T5.1.1.XXL" of the same list, 11 billion parameters. remat is of our choosing.
T5_XXL = dataclasses.replace(
    T5_BASE, d_model=4096, heads=64, mlp_dim=10_240, layers=24, remat="full"
)


class Attention(nnx.Module):
    """Multi-head attention of one sequence to another or to itself (Vaswani et al. 2017)."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        D, H, K = config.d_model, config.heads, config.head_dim
        # The scale that the scores lack.
        self.query = normal(rngs, (D, H, K), fan_in=D * K)
        self.key = normal(rngs, (D, H, K), fan_in=D)
        self.value = normal(rngs, (D, H, K), fan_in=D)
        self.out = normal(rngs, (H, K, D), fan_in=H * K)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BUD: jax.Array,
        bias_HTU: jax.Array | None,
        constrain: Constrain,
    ) -> jax.Array:
        heads = ("batch", None, "heads", None)
        q_BTHK = constrain(jnp.einsum("BTD,DHK->BTHK", x_BTD, self.query[...]), heads)
        k_BUHK = constrain(jnp.einsum("BUD,DHK->BUHK", memory_BUD, self.key[...]), heads)
        v_BUHK = constrain(jnp.einsum("BUD,DHK->BUHK", memory_BUD, self.value[...]), heads)
        scores_BHTU = jnp.einsum("BTHK,BUHK->BHTU", q_BTHK, k_BUHK)
        if bias_HTU is not None:
            scores_BHTU = scores_BHTU + bias_HTU
        weights_BHTU = jax.nn.softmax(scores_BHTU, axis=-1)
        mixed_BTHK = constrain(jnp.einsum("BHTU,BUHK->BTHK", weights_BHTU, v_BUHK), heads)
        return jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, self.out[...])


class PositionBias(nnx.Module):
    """A number for each head and bucket of distances, added to scores (section 2.1)."""

    def __init__(self, config: EncoderDecoderConfig, *, causal: bool, rngs: nnx.Rngs):
        self.config, self.causal = config, causal
        self.table = normal(rngs, (config.buckets, config.heads), fan_in=config.d_model)

    def __call__(self, T: int) -> jax.Array:
        """Returns bias_HTT, row for query and column for key; what is hidden has -1e9."""
        position_T = jnp.arange(T)
        distance_TT = position_T[None, :] - position_T[:, None]
        bucket_TT = bucket_of(
            distance_TT, self.config.buckets, self.config.longest, causal=self.causal
        )
        bias_HTT = jnp.moveaxis(self.table[...][bucket_TT], -1, 0)
        return jnp.where(distance_TT <= 0, bias_HTT, -1e9) if self.causal else bias_HTT


def bucket_of(distance: jax.Array, buckets: int, longest: int, *, causal: bool) -> jax.Array:
    """The bucket of each distance: one for each short distance, then ever wider ones.

    Args:
      distance: int32, of a key behind its query; negative for the past.
      causal: all buckets are for the past, else half of them for each direction.
    """
    ahead: jax.Array | int = 0
    if not causal:
        buckets //= 2
        ahead = jnp.where(distance > 0, buckets, 0)
    length = -jnp.minimum(distance, 0) if causal else jnp.abs(distance)
    exact = buckets // 2
    growth = jnp.log(jnp.maximum(length, 1) / exact) / math.log(longest / exact)
    wide = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    return ahead + jnp.where(length < exact, length, wide)


class GatedMLP(nnx.Module):
    """MLP gated by GELU (Shazeer 2020)."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        D, M = config.d_model, config.mlp_dim
        self.gate = normal(rngs, (D, M), fan_in=D)
        self.up = normal(rngs, (D, M), fan_in=D)
        self.down = normal(rngs, (M, D), fan_in=M)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        hidden_BTM = jax.nn.gelu(x_BTD @ self.gate[...]) * (x_BTD @ self.up[...])
        return constrain(hidden_BTM, ("batch", None, "mlp")) @ self.down[...]


class Block(nnx.Module):
    """Pre-norm self attention, cross attention if in the decoder, MLP; each added to the stream."""

    def __init__(self, config: EncoderDecoderConfig, *, cross: bool, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        if cross:
            self.cross_norm = rms_norm(config, rngs)
            self.cross = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        bias_HTT: jax.Array,
        memory_BSD: jax.Array | None,
        constrain: Constrain,
    ) -> jax.Array:
        stream = ("batch", None, "embed")
        unit_BTD = self.attention_norm(x_BTD)
        x_BTD = constrain(x_BTD + self.attention(unit_BTD, unit_BTD, bias_HTT, constrain), stream)
        if memory_BSD is not None:
            mixed_BTD = self.cross(self.cross_norm(x_BTD), memory_BSD, None, constrain)
            x_BTD = constrain(x_BTD + mixed_BTD, stream)
        return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD), constrain), stream)


class Stack(nnx.Module):
    """Position bias, blocks and last norm of the encoder or of the decoder."""

    def __init__(self, config: EncoderDecoderConfig, *, decodes: bool, rngs: nnx.Rngs):
        self.remat = config.remat
        self.bias = PositionBias(config, causal=decodes, rngs=rngs)
        self.layers = make_layers(
            lambda rngs: Block(config, cross=decodes, rngs=rngs),
            config.layers,
            scanned=config.scanned,
            rngs=rngs,
        )
        self.norm = rms_norm(config, rngs)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array | None, constrain: Constrain
    ) -> jax.Array:
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        bias_HTT = constrain(self.bias(x_BTD.shape[1]), ("heads", None, None))
        x_BTD = run_layers(
            self.layers,
            x_BTD,
            lambda block, x_BTD: block(x_BTD, bias_HTT, memory_BSD, constrain),
            remat=self.remat,
        )
        return self.norm(x_BTD)


class EncoderDecoder(nnx.Module):
    """Corrupted text and the tokens so far in, logits of the next token out."""

    def __init__(self, config: EncoderDecoderConfig):
        rngs = nnx.Rngs(config.seed)
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.embedding = normal(rngs, (V, D), fan_in=1)
        self.encoder = Stack(config, decodes=False, rngs=rngs)
        self.decoder = Stack(config, decodes=True, rngs=rngs)
        self.head = normal(rngs, (D, V), fan_in=D)

    def __call__(
        self, source_BS: jax.Array, so_far_BT: jax.Array, constrain: Constrain = unconstrained
    ) -> jax.Array:
        """Returns logits_BTV of the token that follows each of `so_far_BT`."""
        embedding_VD = self.embedding[...]
        memory_BSD = self.encoder(embedding_VD[source_BS], None, constrain)
        x_BTD = self.decoder(embedding_VD[so_far_BT], memory_BSD, constrain)
        return constrain(x_BTD @ self.head[...], ("batch", None, "vocab"))


def rms_norm(config: EncoderDecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm (Zhang & Sennrich 2019) of the stream."""
    return nnx.RMSNorm(config.d_model, epsilon=config.norm_epsilon, rngs=rngs)


def loss(
    model: EncoderDecoder, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of `batch["target_BT"]` given `batch["source_BS"]`, in nats."""
    target_BT = batch["target_BT"]
    so_far_BT = jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    logits_BTV = model(batch["source_BS"], so_far_BT, constrain)
    surprise_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, target_BT)
    right_BT = jnp.argmax(logits_BTV, axis=-1) == target_BT
    return jnp.mean(surprise_BT), {"accuracy": jnp.mean(right_BT)}


def sample(seed: int, batch_size: int, config: EncoderDecoderConfig) -> dict[str, np.ndarray]:
    """Windows of the standard library's sources, spans taken out. Same seed, same batch."""
    window_BW = next(text.batches(seed, batch_size, config.window - 1))
    source_BS, target_BT = spans.corrupt(
        window_BW,
        np.random.default_rng(seed),
        spans=config.spans,
        span_length=config.span_length,
        vocab_size=config.vocab_size,
    )
    return {"source_BS": source_BS, "target_BT": target_BT}
