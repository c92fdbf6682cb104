"""The train steps that layouts by hand are put on: of Flax NNX, Flax Linen, and plain JAX."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.constrain import Constrain, unconstrained

State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
Forward = Callable[[Any, Any, Any], tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]]
"""(params, extra, batch) -> (scalar, (new extra, metrics))."""
Gradients = Callable[[Any, Any, Any], Any]
"""The same -> ((scalar, (new extra, metrics)), gradients by the parameters)."""
Spread = Callable[[Gradients], Gradients]


class Trained(Protocol):
    """What a train step needs of a case; `experiments.zoo.case` explains its fields.

    The hook `constrain` is an argument of the loss; in Linen it is one of `make_model`.
    """

    # Properties, so that the fields of a frozen dataclass fit.
    @property
    def kind(self) -> str: ...
    @property
    def make_model(self) -> Callable[..., Any]: ...
    @property
    def loss(self) -> Callable[..., Any]: ...
    @property
    def optimizer(self) -> optax.GradientTransformation: ...
    @property
    def sample(self) -> Callable[[int], Any]: ...
    @property
    def inputs(self) -> Callable[[Any], tuple[Any, ...]] | None: ...


def train_step(
    case: Trained,
    constrain: Constrain = unconstrained,
    spread: Spread = lambda gradients: gradients,
) -> tuple[Step, Callable[[], State]]:
    """(step, init) of a state {"step", "params", "extra", "opt_state"} of plain arrays.

    "extra" is what the model changes besides its parameters: batch statistics, random keys and
    their counts.

    Args:
      constrain: is called with the model's activations.
      spread: computes what it is given on the devices in another way.
    """
    parts = {"nnx": _nnx, "linen": _linen, "plain": _plain}[case.kind]
    make, forward = parts(case, constrain)
    optimizer = case.optimizer

    def init() -> State:
        params, extra = make()
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "extra": extra,
            "opt_state": optimizer.init(params),
        }

    with_gradients = spread(jax.value_and_grad(forward, has_aux=True))

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        (value, (extra, metrics)), gradients = with_gradients(
            state["params"], state["extra"], batch
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


_Parts = tuple[Callable[[], tuple[Any, Any]], Forward]
"""(() -> (params, extra), the forward pass)."""


def _nnx(case: Trained, constrain: Constrain) -> _Parts:
    graphdef, abstract_params, abstract_extra = _split(nnx.eval_shape(case.make_model))

    def make() -> tuple[Any, Any]:
        _, params, extra = _split(case.make_model())
        return nnx.to_pure_dict(params), nnx.to_pure_dict(extra)

    def forward(params: Any, extra: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, _boxed(abstract_params, params), _boxed(abstract_extra, extra))
        value, metrics = case.loss(model, batch, constrain=constrain)
        # The rest of a module is the same as at first: no loss adds variables.
        _, _, after = _split(model)
        return value, (nnx.to_pure_dict(after), metrics)

    return make, forward


def _linen(case: Trained, constrain: Constrain) -> _Parts:
    module, inputs = case.make_model(constrain=constrain), case.inputs
    assert inputs is not None

    def make() -> tuple[Any, Any]:
        batch = jax.tree.map(jnp.asarray, case.sample(0))
        variables = module.init(jax.random.key(0), *inputs(batch))
        return variables["params"], {k: v for k, v in variables.items() if k != "params"}

    def forward(params: Any, extra: Any, batch: Any) -> Any:
        after = dict(extra)

        def apply(*args: Any, **kwargs: Any) -> Any:
            output, changed = module.apply(
                {"params": params, **after}, *args, mutable=list(after), **kwargs
            )
            after.update(changed)
            return output

        value, metrics = case.loss(apply, batch)
        return value, (after, metrics)

    return make, forward


def _plain(case: Trained, constrain: Constrain) -> _Parts:
    def forward(params: Any, extra: Any, batch: Any) -> Any:
        return case.loss(params, batch, constrain=constrain), (extra, {})

    return lambda: (case.make_model(), {}), forward


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """(graphdef, State of the parameters, State of all other variables)."""
    graphdef, params, *rest = nnx.split(module, nnx.Param, ...)
    return graphdef, params, rest[0]


def _boxed(abstract: Any, arrays: Any) -> Any:
    """The nnx.State `abstract` with `arrays`, a pure dict of the same paths, in its Variables."""
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(arrays))
