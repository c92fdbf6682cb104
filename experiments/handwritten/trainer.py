"""A train step under a layout by hand: jit with shardings, state born sharded, donated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from experiments.handwritten.layouts import Names, Rules
from experiments.handwritten.train_steps import State, Step


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
    step: Step,
    init: Callable[[], State],
    names_of: Callable[[str, int], Names],
    optimizer: optax.GradientTransformation,
    batch: Any,
) -> Prepared:
    """The step with its shardings.

    Args:
      step, init: of `train_steps`, its activations constrained by `rules`.
      names_of: (path of a parameter, its rank) -> the names of its last dimensions.
      batch: the global batch, or its shapes.
    """
    state_shardings = shardings(rules, names_of, optimizer, jax.eval_shape(init))
    batch_shardings = rules.batch_of(batch)
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


def shardings(
    rules: Rules,
    names_of: Callable[[str, int], Names],
    optimizer: optax.GradientTransformation,
    state: State,
) -> State:
    """A sharding for each leaf of an abstract state.

    What the optimizer keeps in a parameter's shape lies as `Rules.moment` says. Everything else is
    replicated: counts, the rows and columns of factored moments, and "extra".
    """

    def of_params(rule: Callable[[Names, tuple[int, ...]], NamedSharding]) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: rule(names_of(jax.tree_util.keystr(path), x.ndim), x.shape),
            state["params"],
        )

    moments = optax.tree_map_params(
        optimizer,
        lambda moment, x, sharding: sharding if moment.shape == x.shape else rules.replicated(),
        state["opt_state"],
        state["params"],
        of_params(rules.moment),
        transform_non_params=lambda _: rules.replicated(),
    )
    return {
        "step": rules.replicated(),
        "params": of_params(rules.param),
        "extra": jax.tree.map(lambda _: rules.replicated(), state["extra"]),
        "opt_state": moments,
    }
