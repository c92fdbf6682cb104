"""Evaluation functions run with a plan's shardings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.xla.stderr_capture import quiet
from autoshard.lowering.lower import constrained_step, shapes, shardings
from autoshard.plan.donation import refuse_deleted
from autoshard.program.analysis import Analysis, analyse
from autoshard.program.axes import Axes
from autoshard.program.program import Program, trace_function
from autoshard.records.layout import Layout, Spec, rules
from autoshard.space.pinned import why_indivisible
from autoshard.space.specs import Specs, grouped, resolve

_MOST_SHAPES = 16


class Evaluation:
    """`function(state, batch)`, compiled for each batch shape with the plan's rules.

    The programs of the `_MOST_SHAPES` shapes used last are kept: a batch size that is new at each
    call would otherwise fill the memory with programs.

    Args:
      analysis, specs, layout, mesh: of the plan's step.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        analysis: Analysis,
        specs: Specs,
        layout: Layout,
        mesh: Mesh | AbstractMesh,
    ):
        self._function = function
        self._step = analysis
        self._specs = specs
        self._layout = layout
        self._mesh = mesh
        self._compiled: dict[object, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        flat, tree = jax.tree.flatten((state, batch))
        key = (tree, tuple((np.shape(x), jax.dtypes.result_type(x)) for x in flat))
        found = self._compiled.pop(key, None) or self._build(state, batch)
        self._compiled[key] = found  # the one used last comes last
        while len(self._compiled) > _MOST_SHAPES:
            del self._compiled[next(iter(self._compiled))]
        run, out_tree = found
        return jax.tree.unflatten(out_tree, run(*flat))

    def _build(self, state: Any, batch: Any) -> tuple[Callable[..., Any], Any]:
        program = trace_function(self._function, state, batch, self._step.program)
        out_tree = program.metrics_tree
        if not self._layout.mesh:
            alone = jax.jit(jaxprs.as_function(program.step))
            return without_mesh()(alone), out_tree
        with without_mesh():
            closed, inputs = self._constrained(program)
            count = len(program.state)
            given = shardings(self._mesh, inputs)
            given[:count] = shardings(self._mesh, self._specs.inputs[:count])  # it stays there
            replicated = [tuple(() for _ in leaf.shape) for leaf in program.metrics]
            jitted = jax.jit(
                jaxprs.as_function(closed),
                in_shardings=given,
                out_shardings=shardings(self._mesh, replicated),
            )
            with quiet():
                compiled = jitted.lower(*shapes(program.inputs)).compile()

        def run(*flat: Any) -> Any:
            refuse_deleted(flat, program.inputs)
            placed = [
                x if isinstance(x, jax.Array) and x.sharding == s else jax.device_put(x, s)
                for x, s in zip(flat, given, strict=True)
            ]
            return compiled(*placed)

        return run, out_tree

    def _constrained(self, program: Program) -> tuple[jaxprs.ClosedJaxpr, Sequence[Spec]]:
        """The function with the plan's constraints, and the specs of its inputs.

        A step as written has no rules: its batches lie as the plan's do, where they divide so.
        """
        step, layout = self._step, self._layout
        if layout.as_annotated:
            own = zip(step.program.inputs, self._specs.inputs, strict=True)
            known = {leaf.path: spec for leaf, spec in own}
            sizes = {str(name): int(size) for name, size in self._mesh.shape.items()}
            specs_of = [(leaf, known.get(leaf.path, ())) for leaf in program.inputs]
            return program.step, [
                spec
                if len(spec) == len(leaf.shape) and why_indivisible(leaf, spec, sizes) is None
                else tuple(() for _ in leaf.shape)
                for leaf, spec in specs_of
            ]
        analysis = analyse(program, step.platform)
        names = _plans_names(program, analysis.axes, step)
        compute, storage = dict(layout.activation_rules), dict(layout.state_rules)
        usable = Layout(
            mesh=layout.mesh,
            activation_rules=rules({a: compute[b] for a, b in names.items() if b in compute}),
            state_rules=rules({a: storage[b] for a, b in names.items() if b in storage}),
            conflict_losers=named_here(layout.conflict_losers, names),
            gather=layout.gather,
            small_replicated=layout.small_replicated,
            gather_loop_inputs=layout.gather_loop_inputs,
        )
        sites = analysis.sites
        specs = resolve(
            program,
            analysis.axes,
            grouped(analysis.axes, sites.sites),
            usable,
            used_leaves=sites.used_leaves,
        )
        return constrained_step(analysis, specs, self._mesh), specs.inputs


def named_here(axes: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """Some of the plan's axes by the names that they have in an evaluation function.

    >>> named_here(("rows", "gone"), {"a": "rows", "b": "rows", "c": "columns"})
    ('a', 'b')
    """
    return tuple(sorted(here for here, of_plan in names.items() if of_plan in axes))


def _plans_names(program: Program, axes: Axes, step: Analysis) -> dict[str, str]:
    """Logical axis of an evaluation function -> the plan's axis that lies along the same leaves.

    Names alone would not do: without the optimizer's arithmetic parameters and their moments are no
    longer tied, and an axis may be named by another leaf.
    """
    usable = {a.name for a in axes.axes if not a.is_loop}
    own = zip(step.program.inputs, step.axes.inputs, strict=True)
    known = {leaf.path: dims for leaf, dims in own}
    names: dict[str, str] = {}
    for leaf, dims in zip(program.inputs, axes.inputs, strict=True):
        for here, there in zip(dims, known.get(leaf.path, ()), strict=False):
            if len(here) == len(there):
                for (name, _), (plans, _) in zip(here, there, strict=True):
                    if name in usable and plans is not None:
                        names.setdefault(name, plans)
    shared = usable & {a.name for a in step.axes.axes}
    return {**{name: name for name in shared}, **names}
