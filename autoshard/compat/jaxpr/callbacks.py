"""What of a step exists only in the process that traced it (names of JAX's primitives).

A program goes as bytes to other processes, and to compilers of hardware that is not here. What it
calls in Python, or by the address of an object, does not go with it.
"""

from autoshard.compat.jaxpr.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    equations,
    source_line,
    with_inner,
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


def bound(closed: ClosedJaxpr) -> list[str]:
    """What cannot go to another process: `file:line what it does`, each once."""
    found = {
        f"{source_line(eqn) or eqn.primitive.name} {what}": None
        for eqn in equations(closed.jaxpr, every=True)
        if (what := _BOUND.get(eqn.primitive.name))
    }
    return list(found)


def without_prints(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[str, ...]]:
    """The step without what only shows values, and the source lines of that, each once."""
    prints = [e for e in equations(closed.jaxpr, every=True) if e.primitive.name in _PRINTS]
    if not prints:
        return closed, ()
    gone = frozenset().union(*(eqn.effects for eqn in prints))
    memo: dict[int, Jaxpr] = {}
    closed_memo: dict[int, ClosedJaxpr] = {}

    def rewrite(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in memo:
            eqns = [rewritten(eqn) for eqn in jaxpr.eqns if eqn.primitive.name not in _PRINTS]
            memo[id(jaxpr)] = jaxpr.replace(eqns=eqns, effects=jaxpr.effects - gone)
        return memo[id(jaxpr)]

    def rewritten(eqn: JaxprEqn) -> JaxprEqn:
        new = with_inner(eqn, rewrite, closed_memo, every=True)
        return new.replace(effects=new.effects - gone)

    lines = dict.fromkeys(source_line(eqn) or eqn.primitive.name for eqn in prints)
    return ClosedJaxpr(rewrite(closed.jaxpr), closed.consts), tuple(lines)
