"""Evaluation functions run with a plan's shardings."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autoshard.analysis import analyse
from autoshard.compat import jaxprs
from autoshard.compat.noise import quiet
from autoshard.layout import Layout, rules
from autoshard.lowering import constrained_step, shapes, shardings
from autoshard.program import trace_function
from autoshard.specs import resolve

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
        known = {a.name for a in analysis.axes.axes if not a.is_loop}
        usable = Layout(
            mesh=layout.mesh,
            compute=rules({a: to for a, to in layout.compute if a in known}),
            storage=rules({a: to for a, to in layout.storage if a in known}),
            occurrences=layout.occurrences,
        )
        specs = resolve(program, analysis.axes, analysis.sites.sites, usable)
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
                x if i < count else jax.device_put(x, s)
                for i, (x, s) in enumerate(zip(flat, given, strict=True))
            ]
            return compiled(*placed)

        return run, out_tree
