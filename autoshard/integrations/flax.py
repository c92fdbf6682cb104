"""Workloads from Flax NNX modules and Flax Linen modules.

Both make a `TrainState` of plain arrays: boxes that carry metadata (NNX Variables, Linen's
`Partitioned`) come off for the step, and `nnx_model` and `linen_variables` put them on again.
Everything that a step changes is in the state: batch statistics, random keys and their counts.

Flax is imported when a function is called; the optimizer is any object with optax's `init` and
`update`, so optax is never imported.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol  # the user's own pytrees have no narrower type

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard.compat.jaxpr.tracers import origins_unsaid
from autoshard.errors import WorkloadError
from autoshard.workload import Workload

if TYPE_CHECKING:
    from flax import linen, nnx

Names = dict[str, tuple[str | None, ...]]
Gradients = tuple[Any, Any, dict[str, Any]]
Gradient = Callable[[Any, Any, Any], Gradients]
"""(params, extra, batch) -> (gradients, new extra, metrics with "loss")."""


class Optimizer(Protocol):
    """optax's GradientTransformation: a pair of pure functions over pytrees of parameters."""

    # Properties, not methods: optax's own class is a NamedTuple of two functions.
    @property
    def init(self) -> Callable[[Any], Any]: ...

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that one step hands to the next: arrays in nested dicts, no Flax objects.

    Attributes:
      step: int32 scalar, steps done.
      params: the trained arrays.
      extra: what the model changes besides: batch statistics, random keys and their counts.
      opt_state: what the optimizer keeps.
    """

    step: Any
    params: Any
    extra: Any
    opt_state: Any


class Apply(Protocol):
    """A Linen loss calls this in place of `module.apply`: variables and keys are filled in."""

    def __call__(
        self, *args: Any, method: Callable[..., Any] | str | None = None, **kwargs: Any
    ) -> Any: ...


def nnx_workload(
    make_model: Callable[[], "nnx.Module"],
    loss: Callable[[Any, Any], tuple[jax.Array, Mapping[str, Any]]],
    optimizer: Optimizer,
    batch: Any,
    *,
    sample: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
) -> Workload:
    """Makes the train step of an NNX module.

    Args:
      make_model: () -> module; traced, so it allocates nothing. `nnx.Param`s are trained, every
        other Variable and every plain array that Flax knows to be data is carried along. Variables
        that first appear inside `loss` (intermediates) are dropped.
      loss: (model, batch) -> (scalar to minimise, dict of further metrics). It may change the
        model's Variables, as dropout and batch norm do. A change of an `nnx.Param` holds for this
        call only; the next step gets the optimizer's value.
      optimizer: an optax GradientTransformation, or what looks like one.
      batch: pytree of `jax.ShapeDtypeStruct`, the global batch.
      sample: see `Workload`.
      accumulate: parts the batch is split into, one after the other. Loss, gradients and metrics
        are averaged over them, which is exact for a loss that is a mean over examples.

    Raises:
      WorkloadError: `accumulate` is below 1 or does not divide the batch; `make_model` returns no
        nnx.Module, or one with a plain array of JAX's in it.
    """
    from flax import nnx

    graphdef, abstract_params, abstract_extra = _split_nnx(make_model, abstract=True)

    def init() -> TrainState:
        _, params, extra = _split_nnx(make_model, abstract=False)
        return _initial(optimizer, nnx.to_pure_dict(params), nnx.to_pure_dict(extra))

    def gradient(params: Any, extra: Any, batch: Any) -> Gradients:
        def run(params: Any) -> tuple[jax.Array, tuple[Any, dict[str, Any]]]:
            model = nnx.merge(graphdef, _box(abstract_params, params), _box(abstract_extra, extra))
            with origins_unsaid():
                value, metrics = loss(model, batch)
            after = dict(nnx.to_flat_state(nnx.state(model)))
            kept = [(path, after[path]) for path, _ in nnx.to_flat_state(abstract_extra)]
            new_extra = nnx.to_pure_dict(nnx.from_flat_state(kept))
            return value, (new_extra, {"loss": value, **metrics})

        gradients, (new_extra, metrics) = jax.grad(run, has_aux=True)(params)
        return gradients, new_extra, metrics

    names = _nnx_names(".params", abstract_params) | _nnx_names(".extra", abstract_extra)
    return Workload(
        step=_step(gradient, optimizer, accumulate, batch),
        init=init,
        batch=batch,
        sample=sample,
        axis_names=_mirrored(names, jax.eval_shape(init)),
    )


def nnx_model(state: TrainState, make_model: Callable[[], "nnx.Module"]) -> Any:
    """Returns `make_model()`'s module with the arrays of `state` in its Variables, as boxed."""
    from flax import nnx

    graphdef, params, extra = _split_nnx(make_model, abstract=True)
    return nnx.merge(graphdef, _box(params, state.params), _box(extra, state.extra))


def linen_workload(
    module: "linen.Module",
    loss: Callable[[Apply, Any], tuple[jax.Array, Mapping[str, Any]]],
    optimizer: Optimizer,
    batch: Any,
    *,
    inputs: Callable[[Any], tuple[Any, ...]],
    rngs: Sequence[str] = (),
    seed: int = 0,
    sample: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    **init_kwargs: Any,
) -> Workload:
    """Makes the train step of a Linen module.

    Args:
      module: the "params" collection is trained; every other collection that `init` makes is
        carried along, and mutable in the loss, but for what `sow` makes longer with each call.
      loss: (apply, batch) -> (scalar to minimise, dict of further metrics). `apply` is
        `module.apply` with variables, keys and mutable collections filled in; each call sees
        what the one before it changed. With `mutable`, one or several names of collections, it
        returns (output, collections), as `module.apply` does, to read sown values.
      optimizer: an optax GradientTransformation, or what looks like one.
      batch: pytree of `jax.ShapeDtypeStruct`, the global batch.
      inputs: batch -> positional arguments of `module.init`.
      rngs: names of the random keys that `apply` needs, such as "dropout"; new for each step.
      seed: the seed of the parameters and the keys.
      sample: see `Workload`.
      accumulate: as in `nnx_workload`.
      **init_kwargs: keyword arguments of `module.init`, such as `train=False`.

    Raises:
      WorkloadError: `accumulate` is below 1 or does not divide the batch.
    """

    rngs = _several(rngs)

    def init() -> TrainState:
        variables = _unbox(_init_linen(module, batch, inputs, rngs, seed, init_kwargs))
        extra: dict[str, Any] = {
            "collections": {k: v for k, v in variables.items() if k not in ("params", *sown)}
        }
        if rngs:
            extra["rngs"] = {name: jax.random.key(seed + 1 + i) for i, name in enumerate(rngs)}
        return _initial(optimizer, variables["params"], extra)

    def gradient(params: Any, extra: Any, batch: Any) -> Gradients:
        def run(params: Any) -> tuple[jax.Array, tuple[Any, dict[str, Any]]]:
            current = dict(extra)

            def apply(
                *args: Any, mutable: str | Sequence[str] | bool | None = None, **kwargs: Any
            ) -> Any:
                if mutable is True or "rngs" in kwargs:
                    said = "mutable=True" if mutable is True else "rngs"
                    raise WorkloadError(
                        f"apply got {said}: name the collections that are to be read"
                        " (mutable=['intermediates']), and the random keys by"
                        " linen_workload(rngs=['dropout']), which makes new ones for each step"
                    )
                keys = {}
                if rngs:
                    split = {name: jax.random.split(key) for name, key in current["rngs"].items()}
                    current["rngs"] = {name: pair[0] for name, pair in split.items()}
                    keys = {name: pair[1] for name, pair in split.items()}
                collections = current["collections"]
                asked = _several(mutable or ())
                output, changed = module.apply(
                    {"params": params, **collections},
                    *args,
                    rngs=keys,
                    mutable=[*collections, *asked],
                    **kwargs,
                )
                changed = _unbox(changed)
                kept = {k: v for k, v in changed.items() if k in collections}
                current["collections"] = {**collections, **kept}
                if mutable is None or mutable is False:
                    return output
                return output, {k: v for k, v in changed.items() if k in asked}

            value, metrics = loss(apply, batch)
            return value, (current, {"loss": value, **metrics})

        gradients, (new_extra, metrics) = jax.grad(run, has_aux=True)(params)
        return gradients, new_extra, metrics

    boxed = jax.eval_shape(lambda: _init_linen(module, batch, inputs, rngs, seed, init_kwargs))
    sown = _sown(module, boxed, batch, inputs, rngs, init_kwargs)
    names = {k: v for k, v in boxed.items() if k not in sown}
    return Workload(
        step=_step(gradient, optimizer, accumulate, batch),
        init=init,
        batch=batch,
        sample=sample,
        axis_names=_mirrored(_linen_names(names), jax.eval_shape(init)),
    )


def linen_variables(
    state: TrainState,
    module: "linen.Module",
    batch: Any,
    *,
    inputs: Callable[[Any], tuple[Any, ...]],
    rngs: Sequence[str] = (),
    **init_kwargs: Any,
) -> dict[str, Any]:
    """Returns the variables of `state` for `module.apply`, in the boxes that `init` put them in."""
    from flax.core import meta

    rngs = _several(rngs)
    boxed = jax.eval_shape(lambda: _init_linen(module, batch, inputs, rngs, 0, init_kwargs))
    boxed = {k: v for k, v in boxed.items() if k in ("params", *state.extra["collections"])}
    return meta.replace_boxed(boxed, {"params": state.params, **state.extra["collections"]})


def _initial(optimizer: Optimizer, params: Any, extra: Any) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        extra=extra,
        opt_state=optimizer.init(params),
    )


def _step(
    gradient: Gradient, optimizer: Optimizer, accumulate: int, batch: Any
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """The train step: gradients, averaged over `accumulate` parts of the batch, then the update."""
    _check_accumulate(accumulate, batch)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        if accumulate == 1:
            gradients, extra, metrics = gradient(state.params, state.extra, batch)
        else:
            gradients, extra, metrics = _accumulated(gradient, accumulate, state, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), state.params, updates)
        return (
            TrainState(step=state.step + 1, params=params, extra=extra, opt_state=opt_state),
            metrics,
        )

    return step


def _accumulated(
    gradient: Gradient, accumulate: int, state: TrainState, batch: Any
) -> tuple[Any, Any, dict[str, Any]]:
    # Every accumulate-th example forms a part, so that the examples stay the major factor of the
    # dimension: a contiguous sharding of the batch is one of each part, and nothing is exchanged.
    parts = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1),
        batch,
    )

    def body(carry: tuple[Any, Any], part: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        total, extra = carry
        gradients, extra, metrics = gradient(state.params, extra, part)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)
        return (total, extra), metrics

    # In float32 at least: in bfloat16 a sum of many parts loses what each adds.
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _wide(p.dtype)), state.params)
    (total, extra), metrics = jax.lax.scan(body, (zeros, state.extra), parts)
    mean = jax.tree.map(lambda x, p: (x / accumulate).astype(p.dtype), total, state.params)
    return mean, extra, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)


def _wide(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype


def _check_accumulate(accumulate: int, batch: Any) -> None:
    if accumulate < 1:
        raise WorkloadError(f"accumulate must be at least 1, got {accumulate}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if accumulate > 1 and (not leaf.shape or leaf.shape[0] % accumulate):
            raise WorkloadError(
                f"accumulate={accumulate} must divide the first dimension of every batch leaf, "
                f"got shape {leaf.shape} at batch{jax.tree_util.keystr(path)}"
            )


def _split_nnx(make_model: Callable[[], Any], *, abstract: bool) -> tuple[Any, Any, Any]:
    """(graphdef, State of trained Variables, State of the others)."""
    from flax import nnx

    # Flax would shard annotated Variables at birth, by a mesh in context; the plan does it here.
    with nnx.use_eager_sharding(False), origins_unsaid():
        model = nnx.eval_shape(make_model) if abstract else make_model()
    if not isinstance(model, nnx.Module):
        raise WorkloadError(f"make_model must return an nnx.Module, got {type(model).__name__}")
    for path, module in nnx.iter_modules(model) if abstract else ():
        for name, value in vars(module).items():
            if isinstance(value, jax.Array):  # all that Flax knew to be data are shapes by now
                where = ".".join(map(str, (*path, name)))
                raise WorkloadError(
                    f"{where} of {type(model).__name__}: got a plain array that is made while the"
                    " module is traced, which Flax then takes for static; expected it in a Variable"
                    " (nnx.Variable(...)), as nnx.data(...), or an array of NumPy"
                )
    graphdef, params, *rest = nnx.split(model, nnx.Param, ...)
    return graphdef, params, rest[0]


def _box(abstract: Any, arrays: Any) -> Any:
    """The nnx.State `abstract` with `arrays`, a pure dict of the same paths, in its Variables."""
    # State and pure dict sort their keys alike, and a Variable is a node with one leaf.
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(arrays))


def _several(names: Sequence[str]) -> Sequence[str]:
    """Names, or one by itself."""
    return (names,) if isinstance(names, str) else names


def _init_linen(
    module: Any, batch: Any, inputs: Any, rngs: Sequence[str], seed: int, init_kwargs: Any
) -> Any:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    split = jax.random.split(jax.random.key(seed), 1 + len(rngs))
    keys = dict(zip(("params", *rngs), split, strict=True))
    return module.init(keys, *inputs(zeros), **init_kwargs)


def _sown(
    module: Any, boxed: Any, batch: Any, inputs: Any, rngs: Sequence[str], init_kwargs: Any
) -> frozenset[str]:
    """Collections that another call makes longer: `sow` adds to what it is given."""
    held = {
        name: collection
        for name, collection in _unbox(boxed).items()
        if name != "params" and _has_tuples(collection)
    }
    if not held:
        return frozenset()

    def again(variables: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        keys = {name: jax.random.key(0) for name in ("params", *rngs)}
        return module.apply(
            variables, *inputs(zeros), rngs=keys, mutable=list(boxed), **init_kwargs
        )[1]

    after = _unbox(jax.eval_shape(again, _unbox(boxed)))
    paths = {
        name: [path for path, _ in jax.tree_util.tree_leaves_with_path(after.get(name))]
        for name in held
    }
    return frozenset(
        name
        for name, collection in held.items()
        if paths[name] != [path for path, _ in jax.tree_util.tree_leaves_with_path(collection)]
    )


def _has_tuples(tree: Any) -> bool:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
    return any(isinstance(x, tuple) for x in nodes)


def _unbox(tree: Any) -> Any:
    from flax.core import meta

    return meta.unbox(tree)


def _nnx_names(field: str, abstract: Any) -> Names:
    """Logical names of the Variables that carry them: pytree path in the state -> names."""
    from flax import nnx

    return {
        field + "".join(f"[{key!r}]" for key in path): names
        for path, variable in nnx.to_flat_state(abstract)
        if hasattr(variable, "get_metadata")  # plain arrays of a module carry no names
        and (names := _names_of(variable.get_metadata().get("out_sharding")))
    }


def _names_of(said: Any) -> tuple[Any, ...]:
    """Names from what a Variable says of its sharding: names, a spec, a sharding or a format."""
    while hasattr(said, "sharding"):
        said = said.sharding
    said = getattr(said, "spec", said)
    return tuple(said) if isinstance(said, Sequence | PartitionSpec) else ()


def _linen_names(boxed: Any) -> Names:
    """As `_nnx_names`, from the boxes of `module.init`'s variables."""
    from flax.core import meta

    names: Names = {}
    for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=_is_box):
        if isinstance(box, meta.Partitioned):
            where = jax.tree_util.keystr(path)
            tail = where.removeprefix("['params']")
            names[(".params" if tail != where else ".extra['collections']") + tail] = box.names
    return names


def _is_box(x: Any) -> bool:
    from flax.core import meta

    return isinstance(x, meta.AxisMetadata)


def _mirrored(names: Names, state: TrainState) -> Names:
    """`names` of leaves that have as many dimensions, and the same for their optimizer's moments.

    Layers that are stacked (`nnx.vmap` without `PARTITION_NAME`) have one more than they have
    names, and which of them is the layer nothing says. A moment is a leaf whose path ends in its
    parameter's path and which has its shape.
    """
    keystr, leaves = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
    shapes = {keystr(path): leaf.shape for path, leaf in leaves(state.params)}
    ranks = {keystr(path): len(leaf.shape) for path, leaf in leaves(state)}
    found = {path: said for path, said in names.items() if len(said) == ranks.get(path)}
    for path, leaf in leaves(state.opt_state):
        tails = (keystr(path[start:]) for start in range(len(path)))
        # The longest tail first: `['kernel']` alone is another parameter than `['out']['kernel']`.
        tail = next((tail for tail in tails if tail in shapes), None)
        if tail is not None and shapes[tail] == leaf.shape and ".params" + tail in found:
            found[".opt_state" + keystr(path)] = found[".params" + tail]
    return found
