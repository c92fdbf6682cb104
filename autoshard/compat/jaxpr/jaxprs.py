"""Jaxprs as data: walking, rebuilding, the equation of a constraint (jax.extend.core)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

ClosedJaxpr = core.ClosedJaxpr
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
# Atoms of a jaxpr are variables or literals; their avals have a shape and a dtype, which the public
# type does not say.
Var: TypeAlias = Any
Atom: TypeAlias = Any
as_function = core.jaxpr_as_fun
AnyMesh = Mesh | AbstractMesh

CALLS = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "scan",
        "while",
        "cond",
    ]
)
"""Primitives whose inner jaxprs are ordinary code: sites may be put inside. Kernels, manual regions
(shard_map) and the combiners of reduce, scatter and sort are left alone."""

_KERNELS = frozenset({"pallas_call"})

LOOPS = frozenset({"scan", "while"})

AGAIN = LOOPS | {"checkpoint", "remat", "remat2"}
"""Primitives whose inner jaxprs run several times in a step, if only once more backward."""


def inner_jaxprs(
    eqn: JaxprEqn, every: bool = False
) -> list[tuple[str, int | None, ClosedJaxpr | Jaxpr]]:
    """The jaxprs an equation of CALLS runs: (parameter name, index in a tuple or None, jaxpr).

    The condition of a while loop is left out: nothing in it is worth a site.

    Args:
      every: that too, and those of any other primitive (manual regions, linear solvers), but for
        kernels.
    """
    name = eqn.primitive.name
    if name in _KERNELS or not (every or name in CALLS):
        return []
    found: list[tuple[str, int | None, ClosedJaxpr | Jaxpr]] = []
    for name, value in eqn.params.items():
        if name == "cond_jaxpr" and not every:
            continue
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append((name, None, value))
        elif isinstance(value, (tuple, list)):
            found += [
                (name, i, x) for i, x in enumerate(value) if isinstance(x, (ClosedJaxpr, Jaxpr))
            ]
    return found


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def with_inner(
    eqn: JaxprEqn,
    rewrite: Callable[[Jaxpr], Jaxpr],
    memo: dict[int, ClosedJaxpr],
    every: bool = False,
) -> JaxprEqn:
    """`eqn` with each of its inner jaxprs rewritten.

    Args:
      memo: one dict for all equations of a step. A function called many times is lowered once only
        if every call holds the same ClosedJaxpr.
      every: as in `inner_jaxprs`.
    """
    params = dict(eqn.params)
    changed = False
    for name, index, inner in inner_jaxprs(eqn, every):
        new = rewrite(open_jaxpr(inner))
        if new is open_jaxpr(inner):
            continue
        changed = True
        closed: ClosedJaxpr | Jaxpr = new
        if isinstance(inner, ClosedJaxpr):
            closed = memo.setdefault(id(inner), ClosedJaxpr(new, inner.consts))
        if index is None:
            params[name] = closed
        else:
            items = list(params[name])
            items[index] = closed
            named = hasattr(type(params[name]), "_make")  # as the functions of a linear solver
            params[name] = type(params[name])._make(items) if named else tuple(items)
    return eqn.replace(params=params) if changed else eqn


def fresh(var: Var) -> Var:
    return core.Var(var.aval)


@functools.cache
def _unspecified() -> object:
    """JAX's marker for "no sharding given", which has no public name (0.10, 0.12)."""
    traced = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0)
    return traced.jaxpr.eqns[0].params["in_shardings"][0]


def without_shardings(eqn: JaxprEqn) -> JaxprEqn:
    """A nested jit without the shardings that its author gave it."""
    params = dict(eqn.params)
    for name in ("in_shardings", "out_shardings"):
        if name in params:
            params[name] = tuple(_unspecified() for _ in params[name])
    return eqn.replace(params=params)


def has_shardings(eqn: JaxprEqn) -> list[object]:
    """The shardings the author of a nested jit gave."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return [s for s in given if isinstance(s, jax.sharding.Sharding)]


def moved_shardings(eqn: JaxprEqn, move: Callable[[object], object]) -> JaxprEqn:
    """A nested jit with each sharding its author gave it replaced."""
    params = dict(eqn.params)
    for name in ("in_shardings", "out_shardings"):
        if name in params:
            params[name] = tuple(move(s) for s in params[name])
    return eqn.replace(params=params)


def equations(jaxpr: Jaxpr, every: bool = False) -> list[JaxprEqn]:
    """Every equation once, those of inner jaxprs included; a shared jaxpr is walked once.

    Args:
      every: as in `inner_jaxprs`.
    """
    seen: set[int] = set()
    found: list[JaxprEqn] = []

    def walk(jaxpr: Jaxpr) -> None:
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            found.append(eqn)
            for _, _, inner in inner_jaxprs(eqn, every):
                walk(open_jaxpr(inner))

    walk(jaxpr)
    return found


def on_host(atom: Atom) -> bool:
    """Whether a value lies in the host's memory beside an accelerator ("pinned_host")."""
    return getattr(getattr(atom.aval, "memory_space", None), "name", "Device") == "Host"


def is_placement(eqn: JaxprEqn) -> bool:
    """Whether an equation says where values lie on devices, and computes nothing."""
    if eqn.primitive.name == "sharding_constraint":
        return True
    return (
        eqn.primitive.name == "device_put"
        and any(isinstance(x, jax.sharding.Sharding | jax.Device) for x in eqn.params["devices"])
        and not any(map(on_host, (*eqn.invars, *eqn.outvars)))
    )


def placements(eqn: JaxprEqn) -> list[object]:
    """Of a placement what it says of each operand: a sharding, a device, None for nothing."""
    if eqn.primitive.name == "sharding_constraint":
        return [eqn.params["sharding"]]
    return list(eqn.params["devices"])


def constants(closed: ClosedJaxpr) -> list[object]:
    """The arrays a function closes over; those of functions jitted inside are with their jaxprs."""
    found = list(closed.consts)
    for eqn in equations(closed.jaxpr):
        for _, _, inner in inner_jaxprs(eqn):
            if isinstance(inner, ClosedJaxpr):
                found += inner.consts
    return found


@functools.lru_cache(maxsize=4096)
def _constraint(shape: tuple[int, ...], dtype: object, sharding: NamedSharding) -> JaxprEqn:
    # JAX makes the equation itself, so that no parameter of the primitive is spelled here.
    traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
        jax.ShapeDtypeStruct(shape, dtype)
    )
    return traced.jaxpr.eqns[0]


def constraint_equation(
    source: Var, target: Var, sharding: NamedSharding, tag: str, like: JaxprEqn
) -> JaxprEqn:
    """An equation `target = sharding_constraint(source)`.

    Args:
      tag: a name scope the lowered operation carries in its location.
      like: the equation whose source location the constraint takes, so that messages name the
        user's line.
    """
    eqn = _constraint(source.aval.shape, source.aval.dtype, sharding)
    info = like.source_info
    info = info.replace(name_stack=info.name_stack.extend(tag))
    return eqn.replace(invars=[source], outvars=[target], source_info=info)


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> AbstractMesh:
    """A mesh without devices whose axes are Auto (the default is Explicit from jax 0.12 on)."""
    names = tuple(name for name, _ in axes)
    sizes = tuple(size for _, size in axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def open_sharding(rank: int, mesh: Sequence[tuple[str, int]] | None = None) -> NamedSharding:
    """A sharding that leaves every dimension to the partitioner.

    Args:
      mesh: of the step's own constraints and manual regions, None for a stand-in.
    """
    return NamedSharding(
        abstract_mesh(mesh or [("_", 2)]), PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * rank)
    )


def on_mesh(closed: ClosedJaxpr, mesh: AnyMesh) -> ClosedJaxpr:
    """The step with every constraint and manual region of its own moved to `mesh`.

    Args:
      mesh: has the same axis names.
    """
    memo: dict[int, Jaxpr] = {}
    closed_memo: dict[int, ClosedJaxpr] = {}
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh

    def moved(sharding: object) -> object:
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names:
            return NamedSharding(mesh, sharding.spec)
        return sharding

    def moved_placement(eqn: JaxprEqn) -> list[JaxprEqn]:
        found = [moved(said) for said in placements(eqn)]
        if not any(isinstance(said, NamedSharding) for said in found):
            return [eqn]
        # A device, or nothing, is said of an operand by a `device_put` of its own.
        alone = {k: v[:1] if isinstance(v, tuple) else v for k, v in eqn.params.items()}
        return [
            constraint_equation(source, target, said, "as_annotated", eqn)
            if isinstance(said, NamedSharding)
            else eqn.replace(
                invars=[source], outvars=[target], params={**alone, "devices": (said,)}
            )
            for source, target, said in zip(eqn.invars, eqn.outvars, found, strict=True)
        ]

    def rewrite(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) in memo:
            return memo[id(jaxpr)]
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if is_placement(eqn):
                eqns += moved_placement(eqn)
                continue
            if eqn.primitive.name == "shard_map":
                own = eqn.params["mesh"]
                # The region's equations remember their mesh with the kind of its devices.
                kept = own if isinstance(own, AbstractMesh) else own.abstract_mesh
                same = kept.shape_tuple == abstract.shape_tuple
                eqn = eqn.replace(params={**eqn.params, "mesh": kept if same else abstract})
            else:
                eqn = with_inner(eqn, rewrite, closed_memo, every=True)
                if has_shardings(eqn):
                    eqn = moved_shardings(eqn, moved)
            eqns.append(eqn)
        memo[id(jaxpr)] = jaxpr.replace(eqns=eqns)
        return memo[id(jaxpr)]

    return ClosedJaxpr(rewrite(closed.jaxpr), closed.consts)


def source_line(eqn: JaxprEqn) -> str:
    """`file:line` of the user's code that made an equation, "" if unknown."""
    try:
        from jax._src import source_info_util  # no public name gives the frame (0.10, 0.12)

        frame = source_info_util.user_frame(eqn.source_info.traceback)
        return f"{frame.file_name}:{frame.start_line}" if frame else ""
    except (ImportError, AttributeError, TypeError):
        return ""


def scan_carries(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """(index among the results, index among the operands) of each carry of a scan.

    jax 0.10 and 0.11 count constants and carries; 0.12 keeps the structure, and may interleave.
    """
    params = eqn.params
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
        return [(k, consts + k) for k in range(carry)]
    _, carry_in, _ = params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
    carry_out, _ = params["ft_out"].update(list(range(len(eqn.outvars)))).unpack()
    return list(zip(list(carry_out), list(carry_in), strict=True))
