"""The hand-written train step: jit with shardings, state born sharded, donated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.handwritten.layouts import Names, Rules

State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
Loss = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]
"""(module, batch) -> (scalar, metrics); it may change the module's variables."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A baseline of which nothing is compiled or allocated yet.

    Attributes:
      step: jitted; (state, batch) -> (state, metrics), which donates the state.
      init: jitted; () -> state, born sharded.
      state, batch: a sharding for each leaf.
    """

    step: jax.stages.Wrapped
    init: jax.stages.Wrapped
    state: Any
    batch: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A baseline ready to run: `state, metrics = step(state, batch)`, which donates the state."""

    step: jax.stages.Wrapped
    state: State
    batch: Any


def prepare(
    rules: Rules,
    make_model: Callable[[], nnx.Module],
    loss: Loss,
    names_of: Callable[[str, int], Names],
    optimizer: optax.GradientTransformation,
    batch: Any,
) -> Prepared:
    """The step with its shardings.

    Args:
      loss: its activations constrained by `rules`.
      names_of: (path of a parameter, its rank) -> the names of its last dimensions.
      batch: the global batch, or its shapes.
    """
    step, init = train_step(make_model, loss, optimizer)
    state_shardings = shardings(rules, names_of, optimizer, jax.eval_shape(init))
    batch_shardings = jax.tree_util.tree_map_with_path(
        lambda path, x: rules.batch(_key(path), x.shape), batch
    )
    return Prepared(
        step=jax.jit(
            step,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, rules.replicated()),
            donate_argnums=0,
        ),
        init=jax.jit(init, out_shardings=state_shardings),
        state=state_shardings,
        batch=batch_shardings,
    )


def train_step(
    make_model: Callable[[], nnx.Module], loss: Loss, optimizer: optax.GradientTransformation
) -> tuple[Step, Callable[[], State]]:
    """(step, init) of a state {"step", "params", "extra", "opt_state"} of plain arrays.

    "extra" is what the model changes besides its parameters: batch statistics, random keys and
    their counts.
    """
    graphdef, abstract_params, abstract_extra = _split(nnx.eval_shape(make_model))

    def init() -> State:
        _, params, extra = _split(make_model())
        pure = nnx.to_pure_dict(params)
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": pure,
            "extra": nnx.to_pure_dict(extra),
            "opt_state": optimizer.init(pure),
        }

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        def run(params: Any) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
            model = nnx.merge(
                graphdef, _boxed(abstract_params, params), _boxed(abstract_extra, state["extra"])
            )
            value, metrics = loss(model, batch)
            # The rest of a module is the same as at first: no loss adds variables.
            _, _, extra = _split(model)
            return value, (nnx.to_pure_dict(extra), metrics)

        (value, (extra, metrics)), gradients = jax.value_and_grad(run, has_aux=True)(
            state["params"]
        )
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        new_state = {
            "step": state["step"] + 1,
            "params": optax.apply_updates(state["params"], updates),
            "extra": extra,
            "opt_state": opt_state,
        }
        return new_state, {"loss": value, **metrics}

    return step, init


def shardings(
    rules: Rules,
    names_of: Callable[[str, int], Names],
    optimizer: optax.GradientTransformation,
    state: State,
) -> State:
    """A sharding for each leaf of an abstract state.

    What the optimizer keeps in a parameter's shape lies as the parameter does. Everything else is
    replicated: counts, the rows and columns of factored moments, and "extra".
    """
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: rules.param(names_of(jax.tree_util.keystr(path), x.ndim), x.shape),
        state["params"],
    )
    moments = optax.tree_map_params(
        optimizer,
        lambda moment, x, sharding: sharding if moment.shape == x.shape else rules.replicated(),
        state["opt_state"],
        state["params"],
        params,
        transform_non_params=lambda _: rules.replicated(),
    )
    return {
        "step": rules.replicated(),
        "params": params,
        "extra": jax.tree.map(lambda _: rules.replicated(), state["extra"]),
        "opt_state": moments,
    }


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """(graphdef, State of the parameters, State of all other variables)."""
    graphdef, params, *rest = nnx.split(module, nnx.Param, ...)
    return graphdef, params, rest[0]


def _boxed(abstract: Any, arrays: Any) -> Any:
    """The nnx.State `abstract` with `arrays`, a pure dict of the same paths, in its Variables."""
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(arrays))


def _key(path: tuple[Any, ...]) -> str:
    """The last key of a batch leaf's path; "" for a batch that is one array."""
    return str(path[-1].key) if path else ""
