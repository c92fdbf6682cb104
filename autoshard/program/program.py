"""Program: a traced workload (jaxpr, avals, pytree paths). No devices, nothing allocated."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast  # the user's own pytrees have no narrower type than Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef, keystr, tree_flatten_with_path

from autoshard.compat.jaxpr import callbacks as process_bound
from autoshard.compat.jaxpr import discharge as refs
from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.jaxpr.contexts import explicit_axes, users_mesh
from autoshard.errors import WorkloadError
from autoshard.workload import Workload

_CLOSURE_LIMIT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf of the state, the batch or the metrics.

    Attributes:
      path: where it is, such as `state['params']['w']`.
      key: the same path without the leading word, as `jax.tree_util.keystr` writes it.
      shape: of the logical array; a PRNG key array has the shape of its keys.
      dtype: as JAX holds it, possibly an extended one (PRNG keys).
    """

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def is_key(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jax.dtypes.prng_key))

    @property
    def bytes(self) -> int:
        """Size of the whole array, bytes; a threefry key is two 32-bit words."""
        return math.prod(self.shape) * (8 if self.is_key else self.dtype.itemsize)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A traced workload.

    Attributes:
      workload: what was traced.
      step: flat jaxpr, (state leaves, batch leaves) -> (new state leaves, metric leaves), without
        the user's own sharding constraints unless they are kept.
      plain: the same without them in any case.
      annotated: the same with them, or None if there are none.
      init: flat jaxpr, () -> state leaves, as the author wrote it.
      plain_init: the same without the user's own sharding constraints.
      init_is_bound: whether only this process can run it: it may read a file, say.
      annotated_meshes: the meshes that the user's own constraints name.
      manual: source lines of manual regions (shard_map) inside the step.
      pinned_mesh: the mesh whose axes `step` itself names (manual regions, kept constraints): only
        layouts on that mesh can run it; else None.
      pins: source lines of what names it.
      state, batch, metrics: the leaves, in flat order.
      state_tree, batch_tree, metrics_tree: the pytrees of those leaves.
      knobs: the knob values it was made with.
      shows: source lines of what only shows values (jax.debug.print), which neither step nor init
        has any more.
      keeps_constraints: `step` still has the user's own constraints.
      returns_state: False for an evaluation function, whose results are all metrics.
    """

    workload: Workload
    step: jaxprs.ClosedJaxpr
    plain: jaxprs.ClosedJaxpr
    annotated: jaxprs.ClosedJaxpr | None
    init: jaxprs.ClosedJaxpr
    plain_init: jaxprs.ClosedJaxpr
    init_is_bound: bool
    annotated_meshes: tuple[tuple[tuple[str, int], ...], ...]
    manual: tuple[str, ...]
    pinned_mesh: tuple[tuple[str, int], ...] | None
    pins: tuple[str, ...]
    state: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]
    metrics: tuple[Leaf, ...]
    state_tree: PyTreeDef
    batch_tree: PyTreeDef
    metrics_tree: PyTreeDef
    knobs: tuple[tuple[str, str | int | float | bool | None], ...]
    shows: tuple[str, ...] = ()
    returns_state: bool = True
    keeps_constraints: bool = False

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        return self.state + self.batch

    @property
    def outputs(self) -> tuple[Leaf, ...]:
        return (self.state if self.returns_state else ()) + self.metrics

    @property
    def state_bytes(self) -> int:
        """Size of the whole state, bytes."""
        return sum(leaf.bytes for leaf in self.state)


def _leaves(word: str, tree: object) -> tuple[tuple[Leaf, ...], PyTreeDef]:
    flat, treedef = tree_flatten_with_path(tree)
    leaves = tuple(
        Leaf(path=word + keystr(path), key=keystr(path), shape=tuple(x.shape), dtype=x.dtype)
        for path, x in flat
    )
    return leaves, treedef


def trace(
    workload: Workload,
    knobs: tuple[tuple[str, str | int | float | bool | None], ...] = (),
    keep_constraints: bool = False,
) -> Program:
    """Traces a workload once.

    Args:
      keep_constraints: keep the user's own sharding constraints in `step`.

    Raises:
      WorkloadError: not a Workload; a state that changes structure, shape or dtype; axis names of
        what is no leaf, or not one for each dimension; rbg keys; a mesh of Explicit axes that is
        set; a step that only this process can run; state that is kept in the host's memory.
      Exception: whatever the user's own functions raise while traced, with their traceback.
    """
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"model_fn must return an autoshard.Workload, got {type(workload).__name__}"
            f" (knobs: {dict(knobs)}); wrap the step, the init and the batch shapes in one"
        )
    _check_context()
    with _note(f"while tracing init() with knobs {dict(knobs)}"):
        made, state_shapes = jax.make_jaxpr(workload.init, return_shape=True)()
    batch_shapes = jax.tree.map(_abstract, workload.batch)
    with _note(f"while tracing step(state, batch) with knobs {dict(knobs)}"):
        closed, out = jax.make_jaxpr(workload.step, return_shape=True)(state_shapes, batch_shapes)
    if not isinstance(out, tuple) or len(out) != 2:
        raise WorkloadError(
            f"step must return (new state, metrics), got {type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple) else "")
        )
    closed, shows = process_bound.without_prints(refs.written_out(closed))
    made, shown = process_bound.without_prints(refs.written_out(made))
    _check_process(closed)
    state, state_tree = _leaves("state", state_shapes)
    _check_memories(state, made, closed)
    batch, batch_tree = _leaves("batch", batch_shapes)
    metrics, metrics_tree = _leaves("metrics", out[1])
    _check_state(state, state_tree, out[0])
    _check_names(state, workload.axis_names)
    for traced in (made, closed):
        _check_keys(state + batch, traced)
    _warn_of_closures("init", made)
    _warn_of_closures("step", closed)
    stripped, shardings, manual = _strip(closed)
    meshes = _meshes(s.mesh for s in shardings if isinstance(s, NamedSharding))
    pinned_mesh, pins = _pinned(manual, meshes if keep_constraints else ())
    step = closed if keep_constraints else stripped
    if pinned_mesh is not None:
        step = jaxprs.on_mesh(step, jaxprs.abstract_mesh(pinned_mesh))
    return Program(
        workload=workload,
        step=step,
        plain=stripped,
        annotated=closed if shardings else None,
        init=made,
        plain_init=_strip(made)[0],
        init_is_bound=bool(process_bound.bound(made)),
        annotated_meshes=meshes,
        manual=_lines(manual),
        pinned_mesh=pinned_mesh,
        pins=pins,
        state=state,
        batch=batch,
        metrics=metrics,
        state_tree=state_tree,
        batch_tree=batch_tree,
        metrics_tree=metrics_tree,
        knobs=knobs,
        shows=(*shown, *shows),
        keeps_constraints=keep_constraints,
    )


def trace_function(
    function: Callable[[Any, Any], Any], state: Any, batch: Any, like: Program
) -> Program:
    """Traces an evaluation function (state, batch) -> anything as a program without new state.

    Args:
      state, batch: values or shapes; the state must be of `like`'s structure.
    """

    def flat_shapes(tree: Any) -> Any:
        def of(x: Any) -> jax.ShapeDtypeStruct:
            dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
            return jax.ShapeDtypeStruct(np.shape(x), held_dtype(dtype))

        return jax.tree.map(of, tree)

    _check_context()
    shapes = (flat_shapes(state), flat_shapes(batch))
    with _note("while tracing a function given to plan.jit"):
        closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    stripped, _, manual = _strip(refs.written_out(closed))
    pinned_mesh, pins = _pinned(manual, ())
    state_leaves, state_tree = _leaves("state", shapes[0])
    if state_tree != like.state_tree:
        raise WorkloadError(f"the state has structure {state_tree}, expected {like.state_tree}")
    batch_leaves, batch_tree = _leaves("batch", shapes[1])
    results, results_tree = _leaves("metrics", out)
    if pinned_mesh is not None:
        stripped = jaxprs.on_mesh(stripped, jaxprs.abstract_mesh(pinned_mesh))
    return dataclasses.replace(
        like,
        step=stripped,
        plain=stripped,
        annotated=None,
        annotated_meshes=(),
        manual=_lines(manual),
        pinned_mesh=pinned_mesh,
        pins=pins,
        returns_state=False,
        state=state_leaves,
        batch=batch_leaves,
        metrics=results,
        state_tree=state_tree,
        batch_tree=batch_tree,
        metrics_tree=results_tree,
    )


def _abstract(x: object) -> jax.ShapeDtypeStruct:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise WorkloadError(
            f"Workload.batch must be a pytree of jax.ShapeDtypeStruct, got a leaf {x!r}"
        )
    return jax.ShapeDtypeStruct(x.shape, held_dtype(x.dtype))


def held_dtype(dtype: Any) -> np.dtype:
    """What JAX holds values of a dtype as: without `jax_enable_x64` 64 bits become 32."""
    return cast(np.dtype, jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


class _note:
    """Adds one line to an exception of the user's own code and lets it through."""

    def __init__(self, text: str):
        self.text = text

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"autoshard: {self.text}")


def _check_context() -> None:
    if axes := explicit_axes():
        raise WorkloadError(
            f"a mesh is set (jax.set_mesh) whose axes {', '.join(map(repr, axes))} are Explicit:"
            " under it shardings are part of the types that a step is traced with, and nothing is"
            " left to search; leave it, or set one of Auto axes (axis_types of jax.make_mesh)"
        )


def _check_state(state: tuple[Leaf, ...], tree: PyTreeDef, new_shapes: object) -> None:
    new, new_tree = _leaves("state", new_shapes)
    if tree != new_tree:
        old_paths, new_paths = {x.path for x in state}, {x.path for x in new}
        gone, come = sorted(old_paths - new_paths), sorted(new_paths - old_paths)
        detail = "; ".join(
            f"{what}: {', '.join(paths[:5])}"
            for what, paths in (("missing", gone), ("unexpected", come))
            if paths
        )
        raise WorkloadError(
            "step must return a state of the structure init() made; "
            + (detail or f"got {new_tree}, expected {tree}")
        )
    for old, leaf in zip(state, new, strict=True):
        if old.shape != leaf.shape or old.dtype != leaf.dtype:
            raise WorkloadError(
                f"step changes {old.path}: got {leaf.dtype}{list(leaf.shape)}, expected"
                f" {old.dtype}{list(old.shape)} as init() made it; cast or reshape it in step"
            )


def _check_names(state: tuple[Leaf, ...], names: Mapping[str, Sequence[str | None]]) -> None:
    ranks = {leaf.key: len(leaf.shape) for leaf in state}
    for key, said in names.items():
        if key not in ranks:
            raise WorkloadError(
                f"axis_names has {key!r}, which is no leaf of the state; its leaves are"
                f" {', '.join(map(repr, list(ranks)[:5]))}{', ...' * (len(ranks) > 5)}"
            )
        if isinstance(said, str) or len(said) != ranks[key]:
            raise WorkloadError(
                f"axis_names of {key!r}: got {said!r}, expected a name or None for each of its"
                f" {ranks[key]} dimensions"
            )


def _check_process(step: jaxprs.ClosedJaxpr) -> None:
    if found := process_bound.bound(step):
        raise WorkloadError(
            "step cannot be compiled and measured by other processes, nor for hardware that is not"
            f" here: {'; '.join(found[:5])}. Leave that out of the step that is searched (a switch"
            " in model_fn), or take what JAX computes itself in its place"
        )


def _check_memories(
    state: tuple[Leaf, ...], made: jaxprs.ClosedJaxpr, closed: jaxprs.ClosedJaxpr
) -> None:
    outputs = closed.jaxpr.outvars[: len(state)]
    found = [
        leaf.path
        for leaf, *atoms in zip(state, made.jaxpr.outvars, outputs, strict=False)
        if any(map(jaxprs.on_host, atoms))
    ]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise WorkloadError(
            f"{', '.join(found[:5])}{more} of the state is kept in the host's memory (pinned_host),"
            " but every layout has the whole state on the devices: leave that out (device_put in"
            " init and step) and search; divided over the devices the state may fit"
        )


def _check_keys(leaves: tuple[Leaf, ...], closed: jaxprs.ClosedJaxpr) -> None:
    advice = (
        "its values depend on the sharding, so no two layouts would compute the same;"
        " use threefry2x32 (jax.config.update('jax_default_prng_impl', 'threefry2x32'))"
    )
    for leaf in leaves:
        if leaf.is_key and "fry" not in str(leaf.dtype):
            raise WorkloadError(
                f"{leaf.path} is a non-partitionable RNG key ({leaf.dtype}): {advice}"
            )
    for eqn in jaxprs.equations(closed.jaxpr):
        if eqn.primitive.name == "rng_bit_generator":
            raise WorkloadError(f"non-partitionable RNG at {jaxprs.source_line(eqn)}: {advice}")
        for var in eqn.invars:
            dtype = str(getattr(var.aval, "dtype", ""))
            if dtype.startswith("key<") and "fry" not in dtype:
                raise WorkloadError(
                    f"non-partitionable RNG key ({dtype}) at {jaxprs.source_line(eqn)}: {advice}"
                )


def _warn_of_closures(word: str, closed: jaxprs.ClosedJaxpr) -> None:
    consts = {id(c): c for c in jaxprs.constants(closed)}
    sizes = [
        (getattr(c, "nbytes", 0), f"{getattr(c, 'dtype', '?')}{list(getattr(c, 'shape', ()))}")
        for c in consts.values()
    ]
    total = sum(size for size, _ in sizes)
    if total > _CLOSURE_LIMIT_BYTES:
        largest = ", ".join(f"{what} ({size} bytes)" for size, what in sorted(sizes)[::-1][:5])
        warnings.warn(
            f"{word} closes over {total} bytes of arrays, which every device will hold whole:"
            f" {largest}; "
            + ("pass them in the state or the batch" if word == "step" else "make them in init"),
            stacklevel=4,
        )


def _meshes(meshes: Iterable[jaxprs.AnyMesh]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Shapes of meshes, each once; meshes without axes left out."""
    shapes = (tuple(zip(m.axis_names, m.axis_sizes, strict=True)) for m in meshes)
    return tuple(dict.fromkeys(s for s in shapes if s))


Regions = list[tuple[str, jaxprs.AnyMesh]]
"""Manual regions: source line and mesh of each."""


def _lines(manual: Regions) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for line, _ in manual))


def _pinned(
    manual: Regions, kept: tuple[tuple[tuple[str, int], ...], ...]
) -> tuple[tuple[tuple[str, int], ...] | None, tuple[str, ...]]:
    """The mesh that a step names itself, and where."""
    found = tuple(dict.fromkeys((*_meshes(mesh for _, mesh in manual), *kept)))
    pins = (*_lines(manual), *(("its sharding constraints",) if kept else ()))
    if len(found) > 1:
        raise WorkloadError(
            f"step names the axes of several meshes: {', '.join(str(dict(m)) for m in found)}, at"
            f" {', '.join(pins)}; one mesh must serve the whole step"
        )
    return (found[0] if found else None), pins


def _strip(
    closed: jaxprs.ClosedJaxpr,
) -> tuple[jaxprs.ClosedJaxpr, list[object], Regions]:
    """Takes out where the user puts values; returns what said so, and manual regions' meshes."""
    shardings: list[object] = []
    manual: Regions = []
    memo: dict[int, jaxprs.Jaxpr] = {}
    closed_memo: dict[int, jaxprs.ClosedJaxpr] = {}

    def rewrite(jaxpr: jaxprs.Jaxpr) -> jaxprs.Jaxpr:
        if id(jaxpr) in memo:
            return memo[id(jaxpr)]
        alias: dict[jaxprs.Var, jaxprs.Atom] = {}

        def read(v: jaxprs.Atom) -> jaxprs.Atom:
            return v if isinstance(v, jaxprs.Literal) else alias.get(v, v)

        eqns, changed = [], False
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if jaxprs.is_placement(eqn):
                shardings.extend(jaxprs.placements(eqn))
                for target, source in zip(eqn.outvars, eqn.invars, strict=True):
                    alias[target] = read(source)
                changed = True
                continue
            new = eqn
            if name == "shard_map":
                manual.append((jaxprs.source_line(eqn) or "shard_map", eqn.params["mesh"]))
            else:
                new = jaxprs.with_inner(eqn, rewrite, closed_memo, every=True)
            given = jaxprs.has_shardings(eqn)
            if given:
                shardings.extend(given)
                new = jaxprs.without_shardings(new)
            if alias:
                new = new.replace(invars=[read(v) for v in new.invars])
            changed |= new is not eqn
            eqns.append(new)
        out = jaxpr
        if changed:
            out = jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])
        memo[id(jaxpr)] = out
        return out

    new = rewrite(closed.jaxpr)
    stripped = closed if new is closed.jaxpr else jaxprs.ClosedJaxpr(new, closed.consts)
    return stripped, shardings, manual


def sample_batch(program: Program, seed: int) -> list[np.ndarray]:
    """Values for the batch, flat: the workload's own sample, or normals and 0/1 integers."""
    workload = program.workload
    if workload.sample is not None:
        with _note("while drawing a batch with sample(key)"), users_mesh():
            drawn = workload.sample(jax.random.key(seed))
        flat, tree = jax.tree.flatten(drawn)
        if tree != program.batch_tree:
            raise WorkloadError(f"sample(key) must have the structure of batch, got {tree}")
        for leaf, value in zip(program.batch, flat, strict=True):
            shape, dtype = np.shape(value), getattr(value, "dtype", None)
            if shape != leaf.shape or dtype is None or held_dtype(dtype) != leaf.dtype:
                raise WorkloadError(
                    f"sample(key) gives {leaf.path} as {dtype or type(value).__name__}"
                    f"{list(shape)}, expected {leaf.dtype}{list(leaf.shape)}"
                )
        return [physical(leaf, v) for leaf, v in zip(program.batch, flat, strict=True)]
    rng = np.random.default_rng(seed)
    values = []
    for leaf in program.batch:
        if leaf.is_key:
            values.append(rng.integers(0, 2**32, (*leaf.shape, 2), dtype=np.uint32))
        elif jnp.issubdtype(leaf.dtype, np.floating):
            values.append(rng.normal(size=leaf.shape).astype(leaf.dtype))
        else:
            values.append(rng.integers(0, 2, leaf.shape).astype(leaf.dtype))
    return values


def physical(leaf: Leaf, value: Any) -> np.ndarray:
    """A leaf's value as programs hold it: a key is its words."""
    return np.asarray(jax.random.key_data(value)) if leaf.is_key else np.asarray(value, leaf.dtype)
