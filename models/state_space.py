"""Selective state space model: Mamba (Gu & Dao 2023), a language model without attention.

Each channel of a block keeps N numbers of state. How fast they decay and what enters and leaves
them depends on the token; given that, the recurrence is linear, so that all positions are computed
at once by an associative scan.

Dimensions in array names: B batch, S = T + 1 tokens of a text, T positions, D d_model, M = expand *
D channels, N state, C convolution, R step_rank, V vocab_size, L layers.

Not modelled: the paper's fused kernel. Here the states of all positions are in memory, N times as
much as a block's activations, which `remat` keeps to one layer at a time.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import next_byte, text
from models.constrain import Constrain, unconstrained
from models.decoder import REMAT_POLICIES, Remat, normal
from models.stacked import make_layers, run_layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceConfig:
    """Sizes and choices of a `StateSpace`; two equal configs build two equal models."""

    vocab_size: int = 256  # one token for each byte
    d_model: int = 64  # width of the residual stream
    expand: int = 2  # channels of a block, relative to the stream
    state: int = 8  # numbers N that a channel keeps
    convolution: int = 4  # positions that a channel mixes before the recurrence
    step_rank: int = 4  # width through which the step sizes of all channels go
    layers: int = 2  # blocks
    sequence: int = 64  # positions T that a step predicts
    scanned: bool = True  # one scan over stacked layers, else a Python loop
    remat: Remat = "none"  # what a block recomputes in its backward pass
    norm_epsilon: float = 1e-5  # added to RMSNorm's mean square
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.convolution > self.sequence:
            raise ValueError(f"convolution={self.convolution} exceeds sequence={self.sequence}")
        if self.remat != "none" and self.remat not in REMAT_POLICIES:
            known = ["none", *REMAT_POLICIES]
            raise ValueError(f"remat={self.remat!r}: expected one of {known}")


MAMBA_130M = StateSpaceConfig(
    # "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (Gu & Dao 2023), section
    # 4.2, as its authors released it (state-spaces/mamba-130m, mamba-2.8b); the vocabulary is
    # GPT-NeoX's, padded to a multiple of 8.
    vocab_size=50_280,
    d_model=768,
    expand=2,
    state=16,
    convolution=4,
    step_rank=48,  # d_model / 16
    layers=24,
    sequence=2048,
    remat="full",  # of our choosing
)

MAMBA_2_8B = dataclasses.replace(MAMBA_130M, d_model=2560, step_rank=160, layers=64)


class Mixer(nnx.Module):
    """Gated convolution and selective recurrence along the sequence (Gu & Dao 2023, figure 3)."""

    def __init__(self, config: StateSpaceConfig, *, rngs: nnx.Rngs):
        D, N, C, R = config.d_model, config.state, config.convolution, config.step_rank
        M = config.expand * D
        self.signal = normal(rngs, (D, M), fan_in=D)
        self.gate = normal(rngs, (D, M), fan_in=D)
        self.convolution = normal(rngs, (C, M), fan_in=C)
        self.convolution_bias = nnx.Param(jnp.zeros((M,)))
        self.narrow = normal(rngs, (M, R), fan_in=M)
        self.step = normal(rngs, (R, M), fan_in=R)
        self.step_bias = nnx.Param(inverse_softplus(log_uniform(rngs, (M,), 1e-3, 1e-1)))
        self.enter = normal(rngs, (M, N), fan_in=M)
        self.leave = normal(rngs, (M, N), fan_in=M)
        rates_N = jnp.arange(1.0, N + 1)
        self.log_rate = nnx.Param(jnp.broadcast_to(jnp.log(rates_N), (M, N)))
        self.skip = nnx.Param(jnp.ones((M,)))
        self.out = normal(rngs, (M, D), fan_in=M)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        channels = ("batch", None, "mlp")
        signal_BTM = constrain(x_BTD @ self.signal[...], channels)
        gate_BTM = constrain(x_BTD @ self.gate[...], channels)
        signal_BTM = convolve(signal_BTM, self.convolution[...]) + self.convolution_bias[...]
        signal_BTM = constrain(jax.nn.silu(signal_BTM), channels)

        step_BTM = (signal_BTM @ self.narrow[...]) @ self.step[...] + self.step_bias[...]
        step_BTM = constrain(jax.nn.softplus(step_BTM), channels)
        enter_BTN, leave_BTN = (signal_BTM @ weight[...] for weight in (self.enter, self.leave))
        decay_BTMN = jnp.exp(-step_BTM[..., None] * jnp.exp(self.log_rate[...]))
        input_BTMN = (step_BTM * signal_BTM)[..., None] * enter_BTN[:, :, None]
        state_BTMN = linear_recurrence(
            constrain(decay_BTMN, (*channels, None)), constrain(input_BTMN, (*channels, None))
        )
        y_BTM = jnp.einsum("BTMN,BTN->BTM", state_BTMN, leave_BTN) + self.skip[...] * signal_BTM
        return constrain(y_BTM * jax.nn.silu(gate_BTM), channels) @ self.out[...]


def linear_recurrence(decay_BT: jax.Array, input_BT: jax.Array) -> jax.Array:
    """h[t] = decay[t] * h[t - 1] + input[t] along the second dimension, from zero; all of h."""

    def compose(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    return jax.lax.associative_scan(compose, (decay_BT, input_BT), axis=1)[1]


def convolve(x_BTM: jax.Array, kernel_CM: jax.Array) -> jax.Array:
    """Each channel with its own kernel, over a position and those before it."""
    C, T = kernel_CM.shape[0], x_BTM.shape[1]
    padded_BTM = jnp.pad(x_BTM, ((0, 0), (C - 1, 0), (0, 0)))
    shifted = [padded_BTM[:, c : c + T] * kernel_CM[c] for c in range(C)]
    return jnp.sum(jnp.stack(shifted), axis=0)


class Block(nnx.Module):
    """Pre-norm mixer, added to the residual stream; Mamba has no separate MLP."""

    def __init__(self, config: StateSpaceConfig, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.norm_epsilon, rngs=rngs)
        self.mixer = Mixer(config, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, constrain: Constrain) -> jax.Array:
        x_BTD = x_BTD + self.mixer(self.norm(x_BTD), constrain)
        return constrain(x_BTD, ("batch", None, "embed"))


class StateSpace(nnx.Module):
    """Tokens in, next-token logits out; the head is the embedding, transposed."""

    def __init__(self, config: StateSpaceConfig):
        rngs = nnx.Rngs(config.seed)
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.embedding = normal(rngs, (V, D), fan_in=D)
        self.layers = make_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, scanned=config.scanned, rngs=rngs
        )
        self.norm = nnx.RMSNorm(D, epsilon=config.norm_epsilon, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns logits_BTV."""
        x_BTD = constrain(self.embedding[...][tokens_BT], ("batch", None, "embed"))
        x_BTD = run_layers(
            self.layers,
            x_BTD,
            lambda block, x_BTD: block(x_BTD, constrain),
            remat=self.config.remat,
        )
        return constrain(self.norm(x_BTD) @ self.embedding[...].T, ("batch", None, "vocab"))


def log_uniform(rngs: nnx.Rngs, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
    """Numbers whose logarithms are uniform."""
    return jnp.exp(
        jax.random.uniform(rngs.params(), shape, minval=math.log(low), maxval=math.log(high))
    )


def inverse_softplus(x: jax.Array) -> jax.Array:
    """y such that softplus(y) = x."""
    return x + jnp.log(-jnp.expm1(-x))


def loss(
    model: StateSpace, tokens_BS: jax.Array, constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte, in nats; the metrics hold it in bits.

    Args:
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    return next_byte.cross_entropy(model(tokens_BS[:, :-1], constrain), tokens_BS)


def sample(seed: int, batch_size: int, config: StateSpaceConfig) -> np.ndarray:
    """Windows of the standard library's sources, T + 1 bytes each. Same seed, same batch."""
    return next(text.batches(seed, batch_size, config.sequence))
