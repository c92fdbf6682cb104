"""Equal-width MLP regressor: every layer, the first and the last included, is width x width.

The hard case for naming axes: every matrix has two dimensions of one size, and layer i's output is
layer i+1's input. Dimensions in array names: B batch, W width.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.constrain import Constrain, unconstrained


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of an `MLP`; two equal configs build two equal models."""

    width: int = 1024  # of the input, of every hidden layer and of the output
    layers: int = 8  # matrices
    seed: int = 0  # of the initial parameters


class MLP(nnx.Module):
    """`layers` linear maps with GELU between them; no layer shares code with a loop."""

    def __init__(self, config: MLPConfig):
        rngs = nnx.Rngs(config.seed)
        W = config.width
        self.layers = nnx.List([nnx.Linear(W, W, rngs=rngs) for _ in range(config.layers)])

    def __call__(self, x_BW: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        for i, layer in enumerate(self.layers):
            x_BW = layer(x_BW if i == 0 else jax.nn.gelu(x_BW))
            x_BW = constrain(x_BW, ("batch", "hidden" if i % 2 == 0 else "embed"))
        return x_BW


def loss(
    model: MLP, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean squared error of `batch["y_BW"]` from `batch["x_BW"]`, both float32."""
    error_BW = model(batch["x_BW"], constrain) - batch["y_BW"]
    return jnp.mean(jnp.square(error_BW)), {"max_error": jnp.max(jnp.abs(error_BW))}


def sample(seed: int, batch_size: int, width: int) -> dict[str, np.ndarray]:
    """A batch to learn from: y is x reversed, through a tanh. Same seed, same batch."""
    x_BW = np.random.default_rng(seed).standard_normal((batch_size, width), dtype=np.float32)
    return {"x_BW": x_BW, "y_BW": np.tanh(x_BW[:, ::-1])}
