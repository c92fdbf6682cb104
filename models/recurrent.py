"""Recurrent language model: layers of gated recurrent units (Cho et al. 2014).

Each layer's maps of its input are one matmul over all positions; the recurrence itself is a scan
over time. The candidate is reset behind its matmul, not before it, so that a step is one matmul
(as in cuDNN and in the first version of Cho et al.; the third does the other).

Dimensions in array names: B batch, S = T + 1 tokens of a text, T positions, W width, V vocab_size.

Not modelled: dropout, a state carried from one batch to the next (each row starts at zero).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import next_byte, text
from models.constrain import Constrain, unconstrained
from models.decoder import normal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Sizes of a `Recurrent`; two equal configs build two equal models."""

    vocab_size: int = 256  # one token for each byte
    width: int = 64  # of the embedding and of every layer's state
    layers: int = 2  # one above the other
    sequence: int = 32  # positions T that a step predicts, and through which gradients go back
    seed: int = 0  # of the initial parameters


ZAREMBA_LARGE = RecurrentConfig(
    # "Recurrent Neural Network Regularization" (Zaremba et al. 2014), section 4.1, the large model;
    # its units are LSTMs, whose four maps make 66 million parameters of these 57.
    vocab_size=10_000,
    width=1500,
    layers=2,
    sequence=35,
)

JOZEFOWICZ_WIDE = RecurrentConfig(
    # "Exploring the Limits of Language Modeling" (Jozefowicz et al. 2016), the Big LSTM of table 1:
    # two layers of 8192, unrolled for 20 steps; its units are LSTMs projected to 1024. Of our
    # choosing: GRUs without projection, and bytes in place of its 793,471 words.
    vocab_size=256,
    width=8192,
    layers=2,
    sequence=20,
)


class GRU(nnx.Module):
    """One layer of gated recurrent units; its three maps are reset, update and candidate."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs):
        W = config.width
        self.input = normal(rngs, (W, 3, W), fan_in=W)
        self.input_bias = nnx.Param(jnp.zeros((3, W)))
        self.recurrent = normal(rngs, (W, 3, W), fan_in=W)
        self.candidate_bias = nnx.Param(jnp.zeros((W,)))

    def __call__(self, x_BTW: jax.Array, constrain: Constrain) -> jax.Array:
        """Returns the states behind each position, in the shape of x_BTW."""
        x_TB3W = jnp.einsum("BTW,WGU->TBGU", x_BTW, self.input[...]) + self.input_bias[...]
        x_TB3W = constrain(x_TB3W, (None, "batch", None, "hidden"))
        recurrent_W3W, candidate_bias_W = self.recurrent[...], self.candidate_bias[...]

        def step(state_BW: jax.Array, x_B3W: jax.Array) -> tuple[jax.Array, jax.Array]:
            state_B3W = jnp.einsum("BW,WGU->BGU", state_BW, recurrent_W3W)
            reset_BW, update_BW = (jax.nn.sigmoid(x_B3W[:, i] + state_B3W[:, i]) for i in (0, 1))
            proposed_BW = reset_BW * (state_B3W[:, 2] + candidate_bias_W)
            candidate_BW = jnp.tanh(x_B3W[:, 2] + proposed_BW)
            state_BW = (1 - update_BW) * candidate_BW + update_BW * state_BW
            state_BW = constrain(state_BW, ("batch", "hidden"))
            return state_BW, state_BW

        _, state_TBW = jax.lax.scan(step, jnp.zeros_like(x_TB3W[0, :, 0]), x_TB3W)
        return jnp.moveaxis(state_TBW, 0, 1)


class Recurrent(nnx.Module):
    """Tokens in, next-token logits out."""

    def __init__(self, config: RecurrentConfig):
        rngs = nnx.Rngs(config.seed)
        W, V = config.width, config.vocab_size
        self.embedding = normal(rngs, (V, W), fan_in=1)
        self.layers = nnx.List([GRU(config, rngs=rngs) for _ in range(config.layers)])
        self.head = nnx.Linear(W, V, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns logits_BTV."""
        x_BTW = self.embedding[...][tokens_BT]
        for layer in self.layers:
            x_BTW = layer(constrain(x_BTW, ("batch", None, "embed")), constrain)
        x_BTW = constrain(x_BTW, ("batch", None, "embed"))
        return constrain(self.head(x_BTW), ("batch", None, "vocab"))


def loss(
    model: Recurrent, tokens_BS: jax.Array, constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte, in nats; the metrics hold it in bits.

    Args:
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    return next_byte.cross_entropy(model(tokens_BS[:, :-1], constrain), tokens_BS)


def sample(seed: int, batch_size: int, config: RecurrentConfig) -> np.ndarray:
    """Windows of the standard library's sources, T + 1 bytes each. Same seed, same batch."""
    return next(text.batches(seed, batch_size, config.sequence))
