"""A train step under a layout by hand: jit with shardings, float32 parameters, a donated state.

Nothing is allocated before the first call, and the mesh may be abstract.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from experiments.handwritten.apart import Gradients, apart
from experiments.handwritten.cases import HandCase
from experiments.handwritten.layouts import AnyMesh, HandLayout, Names, Rules
from experiments.handwritten.parameters import names_of
from models.constrain import unconstrained
from models.precision import FLOAT32

State = dict[str, Any]
"""{"step", "params", "opt_state"} of plain arrays."""
Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A train step; nothing is compiled or allocated yet.

    Attributes:
      step: jitted; (state, batch) -> (state, metrics), which donates the state.
      init: jitted; () -> state, born sharded.
      state, batch: a sharding for each leaf.
      args: the state and the batch as `jax.ShapeDtypeStruct`s.
    """

    step: jax.stages.Wrapped
    init: jax.stages.Wrapped
    state: Any
    batch: Any
    args: tuple[Any, Any]


def prepare(case: HandCase, layout: HandLayout, mesh: AnyMesh) -> Prepared:
    """The train step of a case under a layout.

    Raises:
      ValueError: the devices that share the batch do not divide it.
    """
    rules = Rules(layout, mesh)
    step, init = train_step(case, rules)
    abstract = jax.eval_shape(init)
    state = _shardings(case, rules, abstract)
    batch = jax.tree.map(lambda x: rules.batch(x.shape, case.accumulate), case.batch)
    return Prepared(
        step=jax.jit(
            step,
            in_shardings=(state, batch),
            out_shardings=(state, rules.replicated()),
            donate_argnums=0,
        ),
        init=jax.jit(init, out_shardings=state),
        state=state,
        batch=batch,
        args=(abstract, case.batch),
    )


def train_step(case: HandCase, rules: Rules | None) -> tuple[Step, Callable[[], State]]:
    """(step, init); without rules nothing is constrained."""
    layout = rules.layout if rules else None
    optimizer = case.optimizer
    # Inside `shard_map` nothing is left to constrain.
    constrain = rules.constrain if rules and not rules.layout.gradients_apart else unconstrained
    graphdef, boxes = nnx.split(nnx.eval_shape(case.make_model))

    def init() -> State:
        params = nnx.to_pure_dict(nnx.state(case.make_model()))
        zero = jnp.zeros((), jnp.int32)
        return {"step": zero, "params": params, "opt_state": optimizer.init(params)}

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        boxed = jax.tree.unflatten(jax.tree.structure(boxes), jax.tree.leaves(params))
        value, metrics = case.loss(nnx.merge(graphdef, boxed), batch, constrain=constrain)
        return value, {"loss": value, **metrics}

    gradients_of: Gradients = jax.grad(loss, has_aux=True)
    if rules and rules.layout.gradients_apart:
        gradients_of = apart(gradients_of, rules)
    if case.accumulate > 1:
        gradients_of = _accumulated(gradients_of, case.accumulate)

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        params = state["params"]
        if rules and layout and layout.gathered is not None:
            gradients, metrics = gradients_of(_gathered(case, rules, params), batch)
            gradients = _reduced(case, rules, gradients)
        else:
            gradients, metrics = gradients_of(params, batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], params)
        new_state = {
            "step": state["step"] + 1,
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
        }
        return new_state, metrics

    return step, init


def _shardings(case: HandCase, rules: Rules, state: State) -> State:
    """A sharding for each leaf of an abstract state; counts are replicated."""

    def of_params(rule: Callable[[Names, tuple[int, ...]], NamedSharding]) -> Any:
        return _by_names(case, lambda names, x: rule(names, x.shape), state["params"])

    moments = optax.tree_map_params(
        case.optimizer,
        lambda _, sharding: sharding,
        state["opt_state"],
        of_params(rules.moment),
        transform_non_params=lambda _: rules.replicated(),
    )
    params = of_params(rules.param)
    return {"step": rules.replicated(), "params": params, "opt_state": moments}


def _by_names(case: HandCase, function: Callable[[Names, Any], Any], params: Any) -> Any:
    """Maps over parameters, or over arrays of their shapes, with the names of each."""

    def mapped(path: Any, x: Any) -> Any:
        return function(names_of(case.family, jax.tree_util.keystr(path)), x)

    return jax.tree_util.tree_map_with_path(mapped, params)


def _gathered(case: HandCase, rules: Rules, params: Any) -> Any:
    """The parameters as the model casts them, gathered before the first layer."""

    def gather(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        names = names_of(case.family, name)
        kept = any(name.endswith(f"['{word}']") for word in FLOAT32)
        cast = x if kept else x.astype(case.config.dtype)
        # The cast is divided as the parameter is: the narrow type travels.
        cast = jax.lax.with_sharding_constraint(cast, rules.param(names, x.shape))
        return jax.lax.with_sharding_constraint(cast, rules.used(names, x.shape))

    return jax.tree_util.tree_map_with_path(gather, params)


def _reduced(case: HandCase, rules: Rules, gradients: Any) -> Any:
    """Gradients in float32, each device's part of the sum over devices."""

    def reduce(names: Names, x: jax.Array) -> jax.Array:
        sharding = rules.param(names, x.shape)
        return jax.lax.with_sharding_constraint(x, sharding).astype(jnp.float32)

    return _by_names(case, reduce, gradients)


def _accumulated(gradients_of: Gradients, accumulate: int) -> Gradients:
    """Mean gradients and metrics of the batch's parts, added up in float32."""

    def of_parts(params: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        # Every accumulate-th example forms a part: each device holds its share of every part.
        parts = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0), batch
        )

        def body(total: Any, part: Any) -> tuple[Any, dict[str, jax.Array]]:
            gradients, metrics = gradients_of(params, part)
            return jax.tree.map(jnp.add, total, gradients), metrics

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        total, metrics = jax.lax.scan(body, zeros, parts)
        return jax.tree.map(lambda x: x / accumulate, total), jax.tree.map(jnp.mean, metrics)

    return of_parts
