"""The objective of language models that give logits of every position at once."""

import math

import jax
import jax.numpy as jnp
import optax


def cross_entropy(
    logits_BTV: jax.Array, tokens_BS: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the tokens behind the first, in nats; the metrics hold it in bits.

    Args:
      logits_BTV: of what follows each of the first T tokens.
      tokens_BS: int32 tokens, T + 1 of them in a row.
    """
    surprise_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:])
    mean = jnp.mean(surprise_BT)
    return mean, {"bits_per_byte": mean / math.log(2)}
