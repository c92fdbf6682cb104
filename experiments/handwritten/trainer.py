"""The hand-written train step: jit with shardings, state born sharded, donated; adamw."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.handwritten.layouts import Names, Rules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A baseline ready to run: `state, metrics = step(state, batch)`, which donates the state."""

    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    state: Any
    batch: Any


def build(
    rules: Rules,
    make_model: Callable[[], nnx.Module],
    loss: Callable[[nnx.Module, Any], tuple[jax.Array, dict[str, jax.Array]]],
    names_of: Callable[[str, int], Names],
    optimizer: optax.GradientTransformation,
    batch: Any,
) -> Built:
    """Compiles nothing yet; the first step does.

    Args:
      loss: (model, batch) -> (scalar, metrics), its activations constrained by `rules`.
      names_of: (path of a parameter, its rank) -> its axis names.
      batch: the global batch on the host; its first dimension is the batch.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(make_model))
    shapes = nnx.to_pure_dict(abstract)

    def init() -> dict[str, Any]:
        params = nnx.to_pure_dict(nnx.state(make_model()))
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "opt_state": optimizer.init(params),
        }

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def run(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            boxed = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(params))
            return loss(nnx.merge(graphdef, boxed), batch)

        (value, metrics), gradients = jax.value_and_grad(run, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        new_state = {
            "step": state["step"] + 1,
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }
        return new_state, {"loss": value, **metrics}

    params = jax.tree_util.tree_map_with_path(
        lambda path, x: rules.param(names_of(jax.tree_util.keystr(path), len(x.shape)), x.shape),
        shapes,
    )
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        params,
        transform_non_params=lambda _: rules.replicated(),
    )
    shardings = {"step": rules.replicated(), "params": params, "opt_state": moments}
    batch_shardings = jax.tree.map(
        lambda x: rules.activation(("batch",) + (None,) * (x.ndim - 1), x.shape), batch
    )
    return Built(
        step=jax.jit(
            step,
            in_shardings=(shardings, batch_shardings),
            out_shardings=(shardings, rules.replicated()),
            donate_argnums=0,
        ),
        state=jax.jit(init, out_shardings=shardings)(),
        batch=jax.device_put(batch, batch_shardings),
    )
