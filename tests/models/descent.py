"""What the tests of several models ask of each: that training lowers the loss, how large it is."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
from flax import nnx

from tests.compiled import compiled, split


def made(module_type: type[nnx.Module], config: Any) -> Any:
    """`module_type(config)`, but sooner."""
    return nnx.merge(*split(module_type, config))


def descend(
    model: nnx.Module, loss: Callable, batches: Iterable[Any], learning_rate: float = 1e-3
) -> list[float]:
    """The loss on each batch while Adam trains the model, which is changed."""
    optimizer = optax.adam(learning_rate)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, opt_state, batch):
        def run(params):
            # Variables made here: those of another trace cannot be changed.
            model = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
            value, _ = loss(model, batch)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = jax.value_and_grad(run, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), rest, opt_state

    opt_state, losses = optimizer.init(params), []
    batches = list(batches)
    step = compiled(step, params, rest, opt_state, batches[0])
    for batch in batches:
        value, params, rest, opt_state = step(params, rest, opt_state, batch)
        losses.append(float(value))
    nnx.update(model, params, rest)
    return losses


def parameter_count(make_model: Callable[[], nnx.Module]) -> int:
    """Numbers in the model's `nnx.Param`s; allocates none of them."""
    params = nnx.state(nnx.eval_shape(make_model), nnx.Param)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
