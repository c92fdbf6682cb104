"""The hand-written train step: float32 parameters and adamw's moments, gradient accumulation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.handwritten_pod.rules import Rules
from experiments.pod_sizes import PodSize
from models.precision import FLOAT32

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandStep:
    """A baseline, nothing allocated: `hand.jit().lower(*hand.args)`.

    Attributes:
      step: (state, tokens_BS) -> (state, metrics).
      in_shardings, out_shardings: of its arguments and results, as `jax.jit` takes them.
      donate_argnums: the state.
      args: abstract arguments.
      init: () -> state.
    """

    step: Step
    in_shardings: Any
    out_shardings: Any
    donate_argnums: tuple[int, ...]
    args: tuple[Any, ...]
    init: Callable[[], Any]

    def jit(self) -> Any:
        """The jitted step, with its shardings and its donation."""
        return jax.jit(
            self.step,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donate_argnums,
        )


def hand_step(rules: Rules, size: PodSize) -> HandStep:
    """The train step of `size`, sharded by `rules`."""
    step, init, optimizer = train_step(size, rules)
    state = jax.eval_shape(init)
    tokens_BS = jax.ShapeDtypeStruct((size.batch_size, size.model.sequence + 1), jnp.int32)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: rules.param(jax.tree_util.keystr(path), x.shape), state["params"]
    )
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state["opt_state"],
        params,
        transform_non_params=lambda _: rules.replicated(),
    )
    shardings = {"step": rules.replicated(), "params": params, "opt_state": moments}
    return HandStep(
        step=step,
        in_shardings=(shardings, rules.batch(tokens_BS.shape, size.accumulate)),
        out_shardings=(shardings, rules.replicated()),
        donate_argnums=(0,),
        args=(state, tokens_BS),
        init=init,
    )


def train_step(
    size: PodSize, rules: Rules | None
) -> tuple[Step, Callable[[], Any], optax.GradientTransformation]:
    """(step, init, optimizer); without rules nothing is constrained."""
    make_model, loss = size.build()
    if rules is not None:
        loss = functools.partial(loss, constrain=rules.constrain)
    optimizer = optax.adamw(size.learning_rate)
    graphdef, abstract = nnx.split(nnx.eval_shape(make_model))

    def init() -> dict[str, Any]:
        params = nnx.to_pure_dict(nnx.state(make_model()))
        zero = jnp.zeros((), jnp.int32)
        return {"step": zero, "params": params, "opt_state": optimizer.init(params)}

    def gradient(params: Any, tokens_BS: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        def run(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            boxed = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(params))
            value, metrics = loss(nnx.merge(graphdef, boxed), tokens_BS)
            return value, {"loss": value, **metrics}

        return jax.grad(run, has_aux=True)(params)

    def step(state: Any, tokens_BS: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        once = None if rules is None or rules.gathered is None else rules
        params = state["params"] if once is None else _gathered(once, state["params"], size)
        if size.accumulate == 1:
            gradients, metrics = gradient(params, tokens_BS)
        else:
            gradients, metrics = _accumulated(gradient, size.accumulate, params, tokens_BS)
        if once is not None:
            gradients = _reduced(once, gradients)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        new_state = {
            "step": state["step"] + 1,
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }
        return new_state, metrics

    return step, init, optimizer


def _gathered(rules: Rules, params: Any, size: PodSize) -> Any:
    """The parameters as the model casts them, gathered before the first layer needs one."""

    def gather(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        kept = any(name.endswith(f"['{word}']") for word in FLOAT32)
        cast = x if kept else x.astype(size.model.dtype)
        # The cast is divided as the parameter is: what travels is narrow.
        cast = jax.lax.with_sharding_constraint(cast, rules.param(name, x.shape))
        return jax.lax.with_sharding_constraint(cast, rules.used(name, x.shape))

    return jax.tree_util.tree_map_with_path(gather, params)


def _reduced(rules: Rules, gradients: Any) -> Any:
    """Gradients in float32, each device's part of the sum over devices."""

    def reduce(path: Any, x: jax.Array) -> jax.Array:
        sharding = rules.param(jax.tree_util.keystr(path), x.shape)
        return jax.lax.with_sharding_constraint(x, sharding).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(reduce, gradients)


def _accumulated(
    gradient: Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]],
    accumulate: int,
    params: Any,
    tokens_BS: jax.Array,
) -> tuple[Any, dict[str, jax.Array]]:
    """Mean gradients and metrics of the batch's parts, added up in float32."""
    # Every accumulate-th sequence forms a part: each device holds its share of every part.
    parts = jnp.moveaxis(tokens_BS.reshape(-1, accumulate, tokens_BS.shape[1]), 1, 0)

    def body(total: Any, part_BS: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        gradients, metrics = gradient(params, part_BS)
        return jax.tree.map(jnp.add, total, gradients), metrics

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    total, metrics = jax.lax.scan(body, zeros, parts)
    return jax.tree.map(lambda x: x / accumulate, total), jax.tree.map(jnp.mean, metrics)
