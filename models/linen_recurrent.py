"""The recurrent language model of `models.recurrent` in Flax Linen, of Linen's own cell.

It has as many parameters and computes the same function; but each map is a matrix of its own, and
those of the input are in the scan over time as well, as Linen's users have them.

Linen modules are called through `apply`: `loss` is given one with the variables filled in, and
the hook `constrain` is a field of the module.

Dimensions in array names: as in `models.recurrent`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from models import next_byte, recurrent
from models.constrain import Constrain, unconstrained
from models.recurrent import RecurrentConfig


class Step(nn.Module):
    """One position of a layer of gated recurrent units (Cho et al. 2014)."""

    config: RecurrentConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, state_BW: jax.Array, x_BW: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the state twice: to go on with, and to stack."""
        state_BW, _ = nn.GRUCell(self.config.width, name="cell")(state_BW, x_BW)
        state_BW = self.constrain(state_BW, ("batch", "hidden"))
        return state_BW, state_BW


class Recurrent(nn.Module):
    """Tokens in, next-token logits out."""

    config: RecurrentConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits_BTV."""
        W, V = self.config.width, self.config.vocab_size
        scanned = nn.scan(
            Step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        embed = nn.Embed(V, W, embedding_init=nn.initializers.normal(1.0), name="embedding")
        x_BTW = embed(tokens_BT)
        for i in range(self.config.layers):
            x_BTW = self.constrain(x_BTW, ("batch", None, "embed"))
            layer = scanned(self.config, self.constrain, name=f"layers_{i}")
            _, x_BTW = layer(jnp.zeros_like(x_BTW[:, 0]), x_BTW)
        x_BTW = self.constrain(x_BTW, ("batch", None, "embed"))
        return self.constrain(nn.Dense(V, name="head")(x_BTW), ("batch", None, "vocab"))


def loss(
    apply: Callable[..., jax.Array], tokens_BS: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next byte, in nats; the metrics hold it in bits.

    Args:
      apply: the module's `apply` with its variables filled in.
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    return next_byte.cross_entropy(apply(tokens_BS[:, :-1]), tokens_BS)


def sample(seed: int, batch_size: int, config: RecurrentConfig) -> np.ndarray:
    """That of `models.recurrent`."""
    return recurrent.sample(seed, batch_size, config)
