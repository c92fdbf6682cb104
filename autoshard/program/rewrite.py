"""The rewrite that puts sharding constraints into a step, at its sites."""

from collections.abc import Callable

from jax.sharding import NamedSharding

from autoshard.compat.jaxpr import jaxprs
from autoshard.program.sites import Site, SiteMap


def constrained(
    site_map: SiteMap, sharding_of: Callable[[Site], NamedSharding | None]
) -> jaxprs.ClosedJaxpr:
    """The step with a constraint at every site for which `sharding_of` gives a sharding.

    A jaxpr that occurs many times is rewritten once, so that it stays one function.
    """
    memo: dict[int, jaxprs.Jaxpr] = {}
    closed_memo: dict[int, jaxprs.ClosedJaxpr] = {}

    def rewrite(jaxpr: jaxprs.Jaxpr) -> jaxprs.Jaxpr:
        if id(jaxpr) in memo:
            return memo[id(jaxpr)]
        sited = site_map.sited.get(id(jaxpr))
        if sited is None:
            return jaxpr
        alias: dict[jaxprs.Var, jaxprs.Var] = {}
        eqns: list[jaxprs.JaxprEqn] = []
        pinned: dict[int, jaxprs.Atom] = {}

        def read(v: jaxprs.Atom) -> jaxprs.Atom:
            return v if isinstance(v, jaxprs.Literal) else alias.get(v, v)

        def pin(index: int, source: jaxprs.Var, like: jaxprs.JaxprEqn) -> jaxprs.Var:
            site = site_map.sites[index]
            sharding = sharding_of(site)
            if sharding is None:
                return source
            target = jaxprs.fresh(source)
            eqns.append(jaxprs.constraint_equation(source, target, sharding, site.tag, like))
            return target

        if sited.loop is not None:
            for i, index in sited.entries.items():
                alias[jaxpr.invars[i]] = pin(index, jaxpr.invars[i], sited.loop)
        for e, eqn in enumerate(jaxpr.eqns):
            new = jaxprs.with_inner(eqn, rewrite, closed_memo)
            invars = [read(v) for v in new.invars]
            for i in range(len(invars)):
                if (e, i) in sited.uses:
                    index = sited.uses[e, i]
                    if index not in pinned:
                        pinned[index] = pin(index, invars[i], eqn)
                    invars[i] = pinned[index]
            eqns.append(new.replace(invars=invars))
            for o, var in enumerate(eqn.outvars):
                if (e, o) in sited.results:
                    alias[var] = pin(sited.results[e, o], var, eqn)
        out = jaxpr.replace(eqns=eqns, outvars=[read(v) for v in jaxpr.outvars])
        memo[id(jaxpr)] = out
        return out

    return jaxprs.ClosedJaxpr(rewrite(site_map.step.jaxpr), site_map.step.consts)
