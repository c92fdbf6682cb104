"""Data flow of a step: which values are state, or gradients on their way into the new state.

A value is *storage* when it is computed from the state alone, or when it reaches the new state
through operations that neither contract nor reduce (sums of gradients, casts, optimizer
arithmetic), or when it is computed elementwise from such values alone. Everything else is
*compute*. No name and no shape of any model is looked at.

Of the state, and of what is computed from it alone, that is *used* of which compute values are
made: parameters on their way to activations, but no moments of an optimizer, unless it contracts
them with gradients (Shampoo). In a step that scans whole optimizer steps nothing is used: there
parameters depend on the batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TypeVar

from autoshard.compat.jaxpr import jaxprs

CONTRACTIONS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scaled_dot"}
)
"""Operations that bring a parameter to an activation."""

_STOPS = CONTRACTIONS | {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
    "gather",
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "scatter_add",
    "sort",
    "cumsum",
    "cumprod",
    "cummax",
    "cumlogsumexp",
    "shard_map",
    "pallas_call",
    "custom_call",
    "ffi_call",
    "cholesky",
    "triangular_solve",
    "eigh",
    "svd",
    "qr",
    "fft",
}
_RESIZES = frozenset(
    [
        "concatenate",
        "slice",
        "pad",
        "dynamic_slice",
        "dynamic_update_slice",
        "squeeze",
        "expand_dims",
        "split",
    ]
)
_REARRANGES = _RESIZES | {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "name",
    "reduce_precision",
    "reshape",
    "rev",
    "transpose",
}
"""Operations whose result has the elements of their operands, or some, and no others."""
STATE, BATCH, STORAGE, USED = 1, 2, 4, 8

T = TypeVar("T")
Known = dict[tuple[int, tuple[T, ...]], tuple[T, ...]]
"""(a jaxpr's id, flags of its inputs) -> flags of its outputs."""


class Flow:
    """Flags of every variable of a step, those of inner jaxprs included.

    Attributes:
      flags: variable -> STATE (depends on the state), BATCH (depends on the batch), STORAGE,
        USED.
    """

    def __init__(self, closed: jaxprs.ClosedJaxpr, state_count: int, returned: int):
        self.flags: dict[jaxprs.Var, int] = {}
        jaxpr = closed.jaxpr
        batch_count = len(jaxpr.invars) - state_count
        self._forward(jaxpr, [STATE] * state_count + [BATCH] * batch_count, {})
        self._into_state: set[jaxprs.Var] = set()
        count = len(jaxpr.outvars)
        self._backward(jaxpr, [i < returned for i in range(count)])
        for var in self._into_state:
            self.flags[var] = self.flags.get(var, 0) | STORAGE
        for var, flags in list(self.flags.items()):
            if flags == STATE:
                self.flags[var] = flags | STORAGE
        before = {var for var, flags in self.flags.items() if flags & STORAGE}
        self._elementwise(jaxpr, [v in before for v in jaxpr.invars], before, {})
        self._mark_used(jaxpr, [False] * count)
        del self._into_state

    def of(self, var: jaxprs.Atom) -> int:
        return 0 if isinstance(var, jaxprs.Literal) else self.flags.get(var, 0)

    def storage(self, var: jaxprs.Atom) -> bool:
        return bool(self.of(var) & STORAGE)

    def state_only(self, var: jaxprs.Atom) -> bool:
        return self.of(var) & (STATE | BATCH) == STATE

    def used(self, var: jaxprs.Atom) -> bool:
        return bool(self.of(var) & USED)

    def _forward(
        self, jaxpr: jaxprs.Jaxpr, ins: Sequence[int], known: Known[int]
    ) -> tuple[int, ...]:
        """Taints: what each value depends on; returns those of the outputs of this call.

        Args:
          known: outputs by jaxpr and inputs, for all calls of a step. A function that is called
            with a parameter and with an activation taints each result by its own operand.
        """
        key = (id(jaxpr), tuple(ins))
        if key in known:
            return known[key]
        here: dict[jaxprs.Var, int] = dict(zip(jaxpr.invars, ins, strict=True))

        def of(v: jaxprs.Atom) -> int:
            return 0 if isinstance(v, jaxprs.Literal) else here.get(v, 0)

        for eqn in jaxpr.eqns:
            inner = inner_links(eqn)
            if inner:
                outs = [0] * len(eqn.outvars)
                for body, operands, results, carries in inner:
                    given = [of(eqn.invars[i]) if i is not None else 0 for i in operands]
                    while True:
                        returned = self._forward(body, given, known)
                        grown = list(given)
                        for o, i in carries:
                            grown[i] |= returned[o]
                        if grown == given:
                            break
                        given = grown
                    for result, flag in zip(results, returned, strict=True):
                        if result is not None:
                            outs[result] |= flag
            else:
                every = 0
                for v in eqn.invars:
                    every |= of(v)
                outs = [every] * len(eqn.outvars)
            here.update(zip(eqn.outvars, outs, strict=True))
        for v, flag in here.items():
            self.flags[v] = self.flags.get(v, 0) | flag
        known[key] = tuple(of(v) for v in jaxpr.outvars)
        return known[key]

    def _backward(self, jaxpr: jaxprs.Jaxpr, outs: Sequence[bool]) -> list[bool]:
        """Marks what reaches the new state without being contracted or reduced."""
        marked = self._into_state
        for v, flag in zip(jaxpr.outvars, outs, strict=True):
            if flag and not isinstance(v, jaxprs.Literal):
                marked.add(v)
        for eqn in reversed(jaxpr.eqns):
            hit = [v in marked for v in eqn.outvars]
            if not any(hit):
                continue
            inner = inner_links(eqn)
            if inner:
                for v in _marked_inside(eqn, inner, hit, self._backward):
                    if not isinstance(v, jaxprs.Literal):
                        marked.add(v)
            elif eqn.primitive.name not in _STOPS:
                for v in eqn.invars:
                    if not isinstance(v, jaxprs.Literal) and _passes(eqn, v):
                        marked.add(v)
        return [v in marked for v in jaxpr.invars]

    def _elementwise(
        self,
        jaxpr: jaxprs.Jaxpr,
        ins: Sequence[bool],
        before: Set[jaxprs.Var],
        known: Known[bool],
    ) -> tuple[bool, ...]:
        """Values computed elementwise from storage values alone are storage too.

        Args:
          ins: which inputs are storage in this call.
          before: what is storage by itself.
          known: as in `_forward`.

        Returns:
          Which outputs are by `ins` alone: what `before` has of a function, it has of one call.
        """
        key = (id(jaxpr), tuple(ins))
        if key in known:
            return known[key]
        by_ins = {v for v, flag in zip(jaxpr.invars, ins, strict=True) if flag}
        here = by_ins | {v for v in jaxpr.invars if v in before}
        for eqn in jaxpr.eqns:
            inner = inner_links(eqn)
            for found in (by_ins, here):
                for body, operands, results, _ in inner:
                    given = [i is not None and _in(found, eqn.invars[i]) for i in operands]
                    returned = self._elementwise(body, given, before, known)
                    found.update(
                        eqn.outvars[o]
                        for o, flag in zip(results, returned, strict=True)
                        if o is not None and flag
                    )
                if inner or eqn.primitive.name in _STOPS:
                    continue
                arrays: list[jaxprs.Atom] = [v for v in eqn.invars if getattr(v.aval, "shape", ())]
                if arrays and all(_in(found, v) for v in arrays):
                    found.update(
                        v for v in eqn.outvars if any(_passes(eqn, given) for given in arrays)
                    )
            here.update(v for v in eqn.outvars if v in before)
        for v in here:
            self.flags[v] = self.flags.get(v, 0) | STORAGE
        known[key] = tuple(_in(by_ins, v) for v in jaxpr.outvars)
        return known[key]

    def _mark_used(self, jaxpr: jaxprs.Jaxpr, outs: Sequence[bool]) -> list[bool]:
        """Marks the state, and what is computed from it alone, that compute values are made of."""
        for v, flag in zip(jaxpr.outvars, outs, strict=True):
            if flag:
                self._use(v)
        for eqn in reversed(jaxpr.eqns):
            inner = inner_links(eqn)
            hit = [self.used(v) for v in eqn.outvars]
            for v in _marked_inside(eqn, inner, hit, self._mark_used):
                self._use(v)
            if eqn.primitive.name == "while":
                for v in eqn.invars[: eqn.params["cond_nconsts"]]:
                    self._use(v)
            if not inner and any(not self.storage(v) or self.used(v) for v in eqn.outvars):
                for v in eqn.invars:
                    self._use(v)
        return [self.used(v) for v in jaxpr.invars]

    def _use(self, var: jaxprs.Atom) -> None:
        """An array; a number made of the state, such as a norm, is no use of what it is made of."""
        if self.state_only(var) and bool(getattr(var.aval, "shape", ())):
            self.flags[var] |= USED


def into_products(jaxpr: jaxprs.Jaxpr, outs: Sequence[bool]) -> list[bool]:
    """Which inputs become the operand of a contraction, or a marked output, with no arithmetic.

    Args:
      outs: which outputs are marked.
    """
    found = {
        v
        for v, flag in zip(jaxpr.outvars, outs, strict=True)
        if flag and not isinstance(v, jaxprs.Literal)
    }
    for eqn in reversed(jaxpr.eqns):
        links = inner_links(eqn)
        hit = [v in found for v in eqn.outvars]
        reached: Iterable[jaxprs.Atom] = _marked_inside(eqn, links, hit, into_products)
        if eqn.primitive.name in CONTRACTIONS or (eqn.primitive.name in _REARRANGES and any(hit)):
            reached = eqn.invars
        found.update(v for v in reached if not isinstance(v, jaxprs.Literal))
    return [v in found for v in jaxpr.invars]


def _in(found: Set[jaxprs.Var], atom: jaxprs.Atom) -> bool:
    return not isinstance(atom, jaxprs.Literal) and atom in found


def _marked_inside(
    eqn: jaxprs.JaxprEqn,
    links: "list[Link]",
    hit: Sequence[bool],
    mark: Callable[[jaxprs.Jaxpr, Sequence[bool]], list[bool]],
) -> Iterator[jaxprs.Atom]:
    """Operands that lead to marked values inside an equation, or through it to marked results.

    Args:
      links: as `inner_links` gives them.
      hit: which of its results are marked.
      mark: marks what leads to some of a jaxpr's outputs; returns which of its inputs are marked.
    """
    for body, operands, results, carries in links:
        wanted = [o is not None and hit[o] for o in results]
        while True:
            needed = mark(body, wanted)
            grown = list(wanted)
            for o, i in carries:
                grown[o] |= needed[i]
            if grown == wanted:
                break
            wanted = grown
        for operand, flag in zip(operands, needed, strict=True):
            if flag and operand is not None:
                yield eqn.invars[operand]


def _passes(eqn: jaxprs.JaxprEqn, operand: jaxprs.Atom) -> bool:
    """Whether an operand keeps its size through a non-contracting equation."""
    shape = getattr(operand.aval, "shape", ())
    if not shape:
        return False
    if eqn.primitive.name in _RESIZES:
        return True
    size = math.prod(shape)
    return any(math.prod(getattr(o.aval, "shape", ())) == size for o in eqn.outvars)


Link = tuple[
    jaxprs.Jaxpr, list[int | None], list[int | None], list[tuple[int, int]]
]  # body, operand of each invar, result of each outvar, (outvar, invar) pairs of loop carries


def inner_links(eqn: jaxprs.JaxprEqn) -> list[Link]:
    """How the values of an equation's inner jaxprs correspond to its operands and results."""
    name = eqn.primitive.name
    links: list[Link] = []
    for _, _, inner in jaxprs.inner_jaxprs(eqn):
        body = jaxprs.open_jaxpr(inner)
        n_in, n_out = len(body.invars), len(body.outvars)
        operands: list[int | None] = list(range(n_in))
        results: list[int | None] = list(range(n_out))
        carries: list[tuple[int, int]] = []
        if name == "scan":
            carries = jaxprs.scan_carries(eqn)
        elif name == "while":
            skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            operands = [skip + k for k in range(n_in)]
            carries = [(k, consts + k) for k in range(n_out)]
        elif name == "cond":
            operands = [1 + k for k in range(n_in)]
        if n_in > len(eqn.invars) or n_out != len(eqn.outvars):
            continue  # a form this version does not know: nothing inside is touched
        links.append((body, operands, results, carries))
    return links
