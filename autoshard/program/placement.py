"""Siting: which values of a step are sites, and whose rules they take.

The same placement serves rung 1 (every site open), rung 2 and the running step (sites with the
sharding their layout gives).
"""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.compat.jaxpr import jaxprs
from autoshard.program.flow import CONTRACTIONS, Flow, inner_links, into_products
from autoshard.program.sites import LoopPosition, ParamUse, Place, Site, SiteMap, SitePlacement

_OPENERS = CONTRACTIONS | frozenset(
    [
        "gather",
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-sub",
        "scatter-mul",
        "scatter-min",
        "scatter-max",
        "reshape",
        "concatenate",
        "reduce_sum",
        "reduce_max",
        "cumsum",
        "cumprod",
        "cummax",
        "cumlogsumexp",
        "sort",
        "top_k",
        "reduce_window_sum",
        "reduce_window_max",
        "select_and_scatter_add",
        "dynamic_slice",
        "dynamic_update_slice",
    ]
)
_QUIET = frozenset(
    [
        "broadcast_in_dim",
        "iota",
        "convert_element_type",
        "transpose",
        "squeeze",
        "expand_dims",
        "copy",
        "pad",
        "slice",
        "rev",
        "random_bits",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "random_fold_in",
        "random_split",
        "stop_gradient",
        "threefry2x32",
        "shard_map",
        "pallas_call",
        "custom_call",
        "ffi_call",
        "optimization_barrier",
        "name",
        "copy_p",
        "split",
        "argmax",
        "argmin",
    ]
)


def find_sites(closed: jaxprs.ClosedJaxpr, state_count: int, returned: int) -> SiteMap:
    """Finds the sites of a flat step.

    Args:
      state_count: the first so many inputs are the state.
      returned: the first so many outputs are the new state.
    """
    flow = Flow(closed, state_count, returned)
    finder = _Finder(closed, flow)
    state = closed.jaxpr.invars[:state_count]
    return SiteMap(
        step=closed,
        sites=finder.sites,
        sited=finder.sited,
        used_leaves=frozenset(i for i, v in enumerate(state) if flow.used(v)),
    )


@dataclasses.dataclass(slots=True)
class _Seen:
    """What is known of one jaxpr on the way through its equations.

    Attributes:
      once: whether it runs once a step.
      turned: results of which nothing but a transpose is used; see `_only_transposed`.
      kept: what the body of a loop returns.
      settled: values that carry a sharding already: sited ones, what elementwise chains make of
        them, and what the caller hands in.
      at_parameters: what lies as parameters do: what is made where they are, and what is made of
        that alone.
      entering, before_loops, passing: the site of a value for all equations that use it so.
    """

    once: bool
    turned: set[jaxprs.Var]
    kept: set[jaxprs.Var]
    settled: set[jaxprs.Var]
    at_parameters: set[jaxprs.Var] = dataclasses.field(default_factory=set)
    entering: dict[jaxprs.Var, int] = dataclasses.field(default_factory=dict)
    before_loops: dict[jaxprs.Var, int] = dataclasses.field(default_factory=dict)
    passing: dict[jaxprs.Var, int] = dataclasses.field(default_factory=dict)


class _Finder:
    """Finds the sites of a step and of the jaxprs inside it, each of these once."""

    def __init__(self, closed: jaxprs.ClosedJaxpr, flow: Flow):
        self.sites: list[Site] = []
        self.sited: dict[int, SitePlacement] = {}
        self._flow = flow
        self._again: set[int] = set()
        _find_again(closed.jaxpr, False, self._again, set())
        self._find(closed.jaxpr, None)

    def _add(
        self,
        place: Place,
        var: jaxprs.Var,
        storage: bool,
        eqn: jaxprs.JaxprEqn,
        batch_first: bool = True,
        passing: bool = False,
        owned: Sequence[int] = (),
        used: ParamUse = ParamUse.NOWHERE,
        looped: LoopPosition = LoopPosition.NOT,
    ) -> int:
        index = len(self.sites)
        self.sites.append(
            Site(
                index=index,
                place=place,
                storage=storage,
                of_state=self._flow.state_only(var),
                used=used if storage and self._flow.used(var) else ParamUse.NOWHERE,
                looped=looped,
                batch_first=batch_first,
                passing=passing,
                owned=tuple(owned),
                shape=tuple(var.aval.shape),
                operation=eqn.primitive.name,
                source=jaxprs.source_line(eqn),
            )
        )
        return index

    def _find(self, jaxpr: jaxprs.Jaxpr, loop: jaxprs.JaxprEqn | None) -> None:
        """Finds the sites of a jaxpr and of those inside it.

        Args:
          loop: the loop whose body it is.
        """
        if id(jaxpr) in self.sited:
            return
        sited = self.sited[id(jaxpr)] = SitePlacement(loop)
        if loop is not None:
            sited.entries.update(self._at_entry(jaxpr, loop))
        seen = _Seen(
            once=id(jaxpr) not in self._again,
            turned=_only_transposed(jaxpr),
            kept=set() if loop is None else {v for v in jaxpr.outvars if _worth(v)},
            settled=set(jaxpr.invars),
        )
        for e, eqn in enumerate(jaxpr.eqns):
            for body, *_ in inner_links(eqn):
                self._find(body, eqn if eqn.primitive.name in jaxprs.LOOPS else None)
            there = self._goes_to_parameters(eqn) or _made_of(seen.at_parameters, eqn)
            uses = self._into_inner(eqn, seen) | self._of_state(eqn)
            uses |= self._between_products(eqn, there, seen)
            if there:
                seen.at_parameters.update(eqn.outvars)
            results = self._at_results(eqn, there, seen)
            if eqn.primitive.name == "gather" and 0 in uses and 0 in results:
                table = self.sites[uses[0]]
                self.sites[uses[0]] = dataclasses.replace(table, found=results[0])
            sited.uses.update({(e, i): site for i, site in uses.items()})
            sited.results.update({(e, o): site for o, site in results.items()})

    def _at_entry(self, jaxpr: jaxprs.Jaxpr, loop: jaxprs.JaxprEqn) -> dict[int, int]:
        """Sites on what a loop's body is entered with, by position."""
        looped = self._looped(loop)
        return {
            i: self._add(
                Place.ENTRY,
                var,
                self._flow.storage(var),
                loop,
                used=ParamUse.INSIDE,
                looped=LoopPosition.INSIDE if i in looped else LoopPosition.NOT,
            )
            for i, var in enumerate(jaxpr.invars)
            if _worth(var) and self._flow.of(var)
        }

    def _into_inner(self, eqn: jaxprs.JaxprEqn, seen: _Seen) -> dict[int, int]:
        """Sites on the way into a loop, or into what is computed again, by operand."""
        uses: dict[int, int] = {}
        for i in self._entering(eqn) if seen.once else ():
            operand = eqn.invars[i]
            if operand not in seen.entering:
                seen.entering[operand] = self._add(
                    Place.USE, operand, True, eqn, used=ParamUse.ENTERING
                )
            uses[i] = seen.entering[operand]
        for i in self._looped(eqn):
            operand = eqn.invars[i]
            if operand not in seen.before_loops:
                seen.before_loops[operand] = self._add(
                    Place.USE, operand, False, eqn, looped=LoopPosition.BEFORE
                )
            uses[i] = seen.before_loops[operand]
        return uses

    def _of_state(self, eqn: jaxprs.JaxprEqn) -> dict[int, int]:
        """Sites between parameters and the product, lookup or broadcast that uses them."""
        name, flow = eqn.primitive.name, self._flow
        mixes = any(not flow.state_only(v) and flow.of(v) for v in eqn.invars)
        if not (name in CONTRACTIONS or _enlarges(eqn) or (name == "gather" and mixes)):
            return {}
        return {
            i: self._add(Place.USE, operand, not mixes and name in CONTRACTIONS, eqn)
            for i, operand in enumerate(eqn.invars[:1] if name == "gather" else eqn.invars)
            if _worth(operand) and flow.state_only(operand)
        }

    def _between_products(self, eqn: jaxprs.JaxprEqn, there: bool, seen: _Seen) -> dict[int, int]:
        """Sites on activations that come to where parameters lie for a product, or from there."""
        uses: dict[int, int] = {}
        for i, operand in enumerate(eqn.invars if eqn.primitive.name == "dot_general" else ()):
            activation = self._flow.of(operand) and not self._flow.state_only(operand)
            if not (_worth(operand) and activation) or there == (operand in seen.at_parameters):
                continue
            if operand not in seen.passing:  # what several products use goes to all of them at once
                owned = eqn.params["dimension_numbers"][1][i] if there else ()
                seen.passing[operand] = self._add(
                    Place.USE, operand, False, eqn, not there, passing=True, owned=owned
                )
            uses[i] = seen.passing[operand]
        return uses

    def _at_results(self, eqn: jaxprs.JaxprEqn, there: bool, seen: _Seen) -> dict[int, int]:
        """Sites on what an equation computes, by result."""
        opens = self._opens(eqn, seen)
        results: dict[int, int] = {}
        for o, var in enumerate(eqn.outvars):
            if var in seen.turned:
                continue  # its site comes after the transpose
            if (opens or var in seen.kept) and _worth(var) and self._flow.of(var):
                results[o] = self._add(
                    Place.RESULT,
                    var,
                    self._flow.storage(var),
                    eqn,
                    batch_first=not there,
                    used=ParamUse.OUTSIDE if seen.once else ParamUse.INSIDE,
                )
                seen.settled.add(var)
        return results

    def _opens(self, eqn: jaxprs.JaxprEqn, seen: _Seen) -> bool:
        """Whether the partitioner may shard an equation's results as its operands do not say.

        An elementwise equation hands on what its operands have: its results are settled after it.
        """
        name, arrays = eqn.primitive.name, [v for v in eqn.invars if _worth(v)]
        if inner_links(eqn):
            return name in jaxprs.LOOPS
        if name in _OPENERS or (name == "transpose" and not seen.turned.isdisjoint(arrays)):
            return True
        if name in _QUIET:
            return _narrows(eqn) and self._flow.state_only(eqn.invars[0])
        opens = not seen.settled.issuperset(arrays)
        seen.settled.update(eqn.outvars)
        return opens

    def _entering(self, eqn: jaxprs.JaxprEqn) -> list[int]:
        """Operands that compute values are made of in an inner jaxpr that does not run once."""
        links = inner_links(eqn)
        if eqn.primitive.name not in jaxprs.AGAIN and not any(
            id(body) in self._again for body, *_ in links
        ):
            return []
        there = {
            i
            for body, operands, *_ in links
            for i, v in zip(operands, body.invars, strict=True)
            if i is not None and self._flow.used(v)
        }
        return [
            i
            for i, operand in enumerate(eqn.invars)
            if _worth(operand) and self._flow.used(operand) and (i in there or not links)
        ]

    def _looped(self, eqn: jaxprs.JaxprEqn) -> list[int]:
        """Operands of a loop over arrays that are activations, and no carries, used by products."""
        if eqn.primitive.name != "scan":
            return []
        carried = {i for _, i in jaxprs.scan_carries(eqn)}
        flow = self._flow
        found = []
        for body, *_ in inner_links(eqn):
            used = into_products(body, [False] * len(body.outvars))
            for i, v in enumerate(body.invars):
                activation = flow.of(v) and not flow.state_only(v) and not flow.storage(v)
                if used[i] and activation and i not in carried and _worth(eqn.invars[i]):
                    found.append(i)
        return found

    def _goes_to_parameters(self, eqn: jaxprs.JaxprEqn) -> bool:
        """Whether a product has a batch dimension in common with a parameter or its gradient.

        So it is with experts: each has a matrix of its own, and whoever has the matrix has to do
        the work. The products of other matrices can be done where the activation lies.
        """
        if eqn.primitive.name != "dot_general":
            return False
        _, (batch, _) = eqn.params["dimension_numbers"]
        flow = self._flow
        parameters = any(flow.state_only(v) for v in eqn.invars if _worth(v))
        return bool(batch) and (parameters or any(flow.storage(v) for v in eqn.outvars))


def _find_again(
    jaxpr: jaxprs.Jaxpr, again: bool, found: set[int], seen: set[tuple[int, bool]]
) -> None:
    """Adds to `found` every jaxpr inside that does not run once a step alone."""
    if (id(jaxpr), again) in seen:
        return
    seen.add((id(jaxpr), again))
    if again:
        found.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        for body, *_ in inner_links(eqn):
            _find_again(body, again or eqn.primitive.name in jaxprs.AGAIN, found, seen)


def _only_transposed(jaxpr: jaxprs.Jaxpr) -> set[jaxprs.Var]:
    """Results of contractions that nothing but one transpose uses: gradients of matrices.

    A constraint between the two would keep the compiler from making one product of them, and a
    reduce-scatter along another dimension than the first: libtpu then reduces the whole.
    """
    made = {v for eqn in jaxpr.eqns if eqn.primitive.name in CONTRACTIONS for v in eqn.outvars}
    uses: dict[jaxprs.Var, list[str]] = {v: [] for v in made}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, jaxprs.Literal) and v in uses:
                uses[v].append(eqn.primitive.name)
    for v in jaxpr.outvars:
        if not isinstance(v, jaxprs.Literal) and v in uses:
            uses[v].append("returned")
    return {v for v, names in uses.items() if names == ["transpose"]}


def _made_of(values: set[jaxprs.Var], eqn: jaxprs.JaxprEqn) -> bool:
    """Whether an operation, no product and no loop, has arrays of these alone as operands."""
    arrays = [v for v in eqn.invars if _worth(v)]
    alone = bool(arrays) and values.issuperset(arrays)
    return alone and eqn.primitive.name not in CONTRACTIONS | jaxprs.LOOPS


def _worth(var: jaxprs.Atom) -> bool:
    """Only arrays of more than one element, of ordinary dtypes, are worth a site."""
    if isinstance(var, jaxprs.Literal):
        return False
    shape = getattr(var.aval, "shape", ())
    return bool(shape) and math.prod(shape) > 1 and not str(var.aval.dtype).startswith("key<")


def _narrows(eqn: jaxprs.JaxprEqn) -> bool:
    """A cast to fewer bytes, as of parameters to the type that is computed in.

    Of a parameter it is done where the parameter is stored: with a constraint on what uses it
    alone, XLA gathers the wide array and then casts.
    """
    if eqn.primitive.name != "convert_element_type":
        return False
    wide, narrow = (getattr(v.aval, "dtype", None) for v in (eqn.invars[0], eqn.outvars[0]))
    return wide is not None and narrow is not None and bool(narrow.itemsize < wide.itemsize)


def _enlarges(eqn: jaxprs.JaxprEqn) -> bool:
    """A broadcast of an array: a parameter that meets an activation elementwise."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    operand: jaxprs.Atom = eqn.invars[0]
    result: jaxprs.Atom = eqn.outvars[0]
    return math.prod(result.aval.shape) > math.prod(operand.aval.shape)
