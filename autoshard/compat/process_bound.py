"""What of a step exists only in the process that traced it (names of JAX's primitives).

A program goes as bytes to other processes, and to compilers of hardware that is not here. What it
calls in Python, or by the address of an object, does not go with it.
"""

from autoshard.compat.jaxprs import (
    CALLS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    open_jaxpr,
    source_line,
)

_PRINTS = frozenset({"debug_callback", "debug_print", "inspect_sharding"})
"""jax.debug.print, .callback, .visualize_array_sharding: nothing is computed from them."""

_BOUND = {
    "pure_callback": "calls a Python function",
    "io_callback": "calls a Python function",
    "buffer_callback": "calls a Python function",
    "custom_partitioning": "is divided by Python functions (custom_partitioning; cuDNN's attention"
    " in JAX is such)",
    "ffi_call": "calls a routine that this process registered (jax.ffi)",
}

_REGIONS = CALLS | {"shard_map"}


def bound(closed: ClosedJaxpr) -> list[str]:
    """What cannot go to another process: `file:line what it does`, each once."""
    found: dict[str, None] = {}

    def walk(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if what := _BOUND.get(eqn.primitive.name):
                found[f"{source_line(eqn) or eqn.primitive.name} {what}"] = None
            for _, _, inner in _inner(eqn):
                walk(open_jaxpr(inner))

    walk(closed.jaxpr)
    return list(found)


def without_prints(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[str, ...]]:
    """The step without what only shows values, and the source lines of that, each once."""
    lines: dict[str, None] = {}
    gone: set[object] = set()
    memo: dict[int, Jaxpr] = {}
    closed_memo: dict[int, ClosedJaxpr] = {}

    def find(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _PRINTS:
                lines[source_line(eqn) or eqn.primitive.name] = None
                gone.update(eqn.effects)
            for _, _, inner in _inner(eqn):
                find(open_jaxpr(inner))

    def rewrite(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in memo:
            eqns = [rewritten(eqn) for eqn in jaxpr.eqns if eqn.primitive.name not in _PRINTS]
            memo[id(jaxpr)] = jaxpr.replace(eqns=eqns, effects=jaxpr.effects - gone)
        return memo[id(jaxpr)]

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        params = dict(eqn.params)
        for name, index, inner in _inner(eqn):
            new: ClosedJaxpr | Jaxpr = rewrite(open_jaxpr(inner))
            if isinstance(inner, ClosedJaxpr):
                # One object for all calls of a function: it is lowered once then.
                made = ClosedJaxpr(open_jaxpr(new), inner.consts)
                new = closed_memo.setdefault(id(inner), made)
            if index is None:
                params[name] = new
            else:
                params[name] = (*params[name][:index], new, *params[name][index + 1 :])
        return eqn.replace(params=params, effects=eqn.effects - gone)

    find(closed.jaxpr)
    if not lines:
        return closed, ()
    return ClosedJaxpr(rewrite(closed.jaxpr), closed.consts), tuple(lines)


def _inner(eqn: JaxprEqn) -> list[tuple[str, int | None, ClosedJaxpr | Jaxpr]]:
    """Every jaxpr that an equation runs as ordinary code, conditions and manual regions too."""
    if eqn.primitive.name not in _REGIONS:
        return []
    found: list[tuple[str, int | None, ClosedJaxpr | Jaxpr]] = []
    for name, value in eqn.params.items():
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append((name, None, value))
        elif isinstance(value, tuple):
            found += [
                (name, i, x) for i, x in enumerate(value) if isinstance(x, (ClosedJaxpr, Jaxpr))
            ]
    return found
