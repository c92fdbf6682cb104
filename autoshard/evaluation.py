"""Evaluation functions run with a plan's shardings."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autoshard.analysis import analyse
from autoshard.axes import Axes
from autoshard.compat import jaxprs
from autoshard.compat.noise import quiet
from autoshard.layout import Layout, rules
from autoshard.lowering import constrained_step, shapes, shardings
from autoshard.program import Program, trace_function
from autoshard.specs import grouped, resolve

if TYPE_CHECKING:
    from autoshard.plan import Plan


class Evaluation:
    """`function(state, batch)`, compiled once for each batch shape with the plan's rules."""

    def __init__(self, function: Callable[..., Any], plan: "Plan"):
        self._function = function
        self._plan = plan
        self._compiled: dict[object, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        flat, tree = jax.tree.flatten((state, batch))
        key = (tree, tuple((np.shape(x), jax.dtypes.result_type(x)) for x in flat))
        if key not in self._compiled:
            self._compiled[key] = self._build(state, batch)
        run, out_tree = self._compiled[key]
        return jax.tree.unflatten(out_tree, run(*flat))

    def _build(self, state: Any, batch: Any) -> tuple[Callable[..., Any], Any]:
        plan = self._plan
        program = trace_function(self._function, state, batch, plan.program)
        out_tree = program.metrics_tree
        layout = plan.layout
        if not layout.mesh or layout.as_written:
            return jax.jit(jaxprs.as_function(program.step)), out_tree
        analysis = analyse(program, plan.platform)
        names = _plans_names(program, analysis.axes, plan)
        compute, storage = dict(layout.compute), dict(layout.storage)
        usable = Layout(
            mesh=layout.mesh,
            compute=rules({a: compute[b] for a, b in names.items() if b in compute}),
            storage=rules({a: storage[b] for a, b in names.items() if b in storage}),
            giving_way=named_here(layout.giving_way, names),
            whole=layout.whole,
            whole_into_loops=layout.whole_into_loops,
        )
        sites = analysis.sites
        specs = resolve(
            program,
            analysis.axes,
            grouped(analysis.axes, sites.sites),
            usable,
            used_leaves=sites.used_leaves,
        )
        mesh = plan.mesh
        count = len(program.state)
        given = shardings(mesh, specs.inputs)
        given[:count] = jax.tree.leaves(plan.state_shardings)  # the state stays where it is
        jitted = jax.jit(
            jaxprs.as_function(constrained_step(analysis, specs, mesh)),
            in_shardings=given,
            out_shardings=shardings(mesh, specs.outputs[count:]),
        )

        with quiet():
            compiled = jitted.lower(*shapes(program.inputs)).compile()

        def run(*flat: Any) -> Any:
            placed = [
                x if isinstance(x, jax.Array) and x.sharding == s else jax.device_put(x, s)
                for x, s in zip(flat, given, strict=True)
            ]
            return compiled(*placed)

        return run, out_tree


def named_here(axes: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """Some of the plan's axes by the names that they have in an evaluation function.

    >>> named_here(("rows", "gone"), {"a": "rows", "b": "rows", "c": "columns"})
    ('a', 'b')
    """
    return tuple(sorted(here for here, of_plan in names.items() if of_plan in axes))


def _plans_names(program: Program, axes: Axes, plan: "Plan") -> dict[str, str]:
    """Logical axis of an evaluation function -> the plan's axis that lies along the same leaves.

    Names alone would not do: without the optimizer's arithmetic parameters and their moments are no
    longer tied, and an axis may be named by another leaf.
    """
    usable = {a.name for a in axes.axes if not a.is_loop}
    known = {leaf.path: d for leaf, d in zip(plan.program.inputs, plan.axes.inputs, strict=True)}
    names: dict[str, str] = {}
    for leaf, dims in zip(program.inputs, axes.inputs, strict=True):
        for here, there in zip(dims, known.get(leaf.path, ()), strict=False):
            if len(here) == len(there):
                for (name, _), (plans, _) in zip(here, there, strict=True):
                    if name in usable and plans is not None:
                        names.setdefault(name, plans)
    shared = usable & {a.name for a in plan.axes.axes}
    return {**{name: name for name in shared}, **names}
