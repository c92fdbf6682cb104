"""Equal layers one after the other: one scan over stacked parameters, or a Python loop."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from models.decoder import REMAT_POLICIES, Remat


def make_layers(
    make_layer: Callable[[nnx.Rngs], nnx.Module], count: int, *, scanned: bool, rngs: nnx.Rngs
) -> nnx.Module:
    """`count` layers: if scanned one module with stacked parameters, else an `nnx.List`."""
    if scanned:
        return nnx.split_rngs(splits=count)(nnx.vmap(make_layer))(rngs)
    return nnx.List([make_layer(rngs) for _ in range(count)])


def run_layers(
    layers: Any,
    x: jax.Array,
    call: Callable[[Any, jax.Array], jax.Array],
    *,
    remat: Remat = "none",
) -> jax.Array:
    """x through each of the layers of `make_layers`.

    Args:
      call: (layer, x) -> x; what all layers see besides may be closed over.
      remat: what a layer recomputes in its backward pass.
    """
    scanned = not isinstance(layers, nnx.List)
    # One graphdef and pure parameters: scanning the module itself would carry the parameters
    # out of the loop again.
    graphdef, _ = nnx.split(layers if scanned else layers[0])

    def step(x: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
        return call(nnx.merge(graphdef, params), x), None

    if remat != "none":
        # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
        step = jax.checkpoint(step, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)
    if scanned:
        return jax.lax.scan(step, x, nnx.state(layers))[0]
    for layer in layers:
        x, _ = step(x, nnx.state(layer))
    return x
