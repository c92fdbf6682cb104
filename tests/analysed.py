"""The workloads of `tests.programs`, analysed once a session, and ways to judge and run layouts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.lowering import lower as lowering
from autoshard.lowering.problem import SearchProblem, make_problem
from autoshard.program.analysis import Analysis
from autoshard.program.program import sample_batch, trace
from autoshard.records.layout import Layout
from autoshard.records.trial import COLLECTIVE_KINDS, Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.space.space import Space
from autoshard.target.cost import Constants, CostModel, LinkCost
from autoshard.target.target import Target, find_target
from autoshard.workload import Workload
from tests import programs
from tests.compiled import compiled

CONSTANTS = Constants(
    device="test",
    device_count=8,
    contract_flops_per_s=1e11,
    element_flops_per_s=1e10,
    bandwidth_bytes_per_s=1e10,
    launch_s=1e-6,
    shared=False,
    forms_reduce_scatter=True,
    links=tuple(
        LinkCost(kind=kind, group_size=n, latency_s=1e-5, s_per_byte=n * 1e-10)
        for kind in COLLECTIVE_KINDS
        for n in (2, 8)
    ),
    date="2026-01-01",
)
COST = CostModel(CONSTANTS)


@functools.cache
def target() -> Target:
    return find_target(jax.devices()[:8])


def analyse(workload: Workload, keep_constraints: bool = False) -> SearchProblem:
    return make_problem(trace(workload, (), keep_constraints), target(), "free", None)


@functools.cache
def subject(name: str) -> SearchProblem:
    return analyse(programs.EVERY[name]())


def propagator_of_step(step: Callable[..., Any], state: Any, batch: Any) -> Propagator:
    """Rung 1 of a step; state and batch: shapes or arrays."""
    workload = Workload(
        step=step,
        init=lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state),
        batch=batch,
    )
    return Propagator(analyse(workload).analysis)


def propagator_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Propagator:
    """Rung 1 of a function of arrays, whose results are a step's new state."""
    arguments = tuple(programs.shaped(*s) for s in shapes)
    made = jax.eval_shape(function, *arguments)
    return propagator_of_step(lambda state, batch: (function(*batch), 0.0), made, arguments)


@functools.cache
def propagator(analysis: Analysis) -> Propagator:
    return Propagator(analysis)


def judge(of: SearchProblem, layout: Layout) -> Estimate:
    """Rung 1's estimate; fails the test where rung 1 has none."""
    outcome = propagator(of.analysis_for(layout)).judge(of.space, layout, COST)
    assert isinstance(outcome, Estimate), outcome
    return outcome


def baseline(space: Space, name: str, mesh_axes: int | None = None) -> Layout:
    """The first baseline of a name, of the first mesh with so many axes."""
    for found in baselines(space):
        layout = found.candidate.layout
        if found.name == name and mesh_axes in (None, len(layout.mesh)):
            return layout
    raise AssertionError(f"no baseline {name!r}")


def arguments(of: SearchProblem) -> list[jax.Array]:
    """State and batch, flat."""
    program = of.analysis.program
    workload = program.workload
    if workload.sample is not None:
        batch = jax.tree.leaves(workload.sample(jax.random.key(1)))
    else:
        batch = sample_batch(program, 0)
    return [*jax.tree.leaves(workload.init()), *batch]


def run(of: SearchProblem, layout: Layout) -> list[np.ndarray]:
    """New state and metrics of one step under a layout."""
    specs = of.space.specs(layout)
    mesh = target().mesh(specs.mesh)
    step = lowering.jit_step(of.analysis_for(layout), specs, target())
    placed = [
        jax.device_put(x, s)
        for x, s in zip(arguments(of), lowering.shardings(mesh, specs.inputs), strict=True)
    ]
    ready = compiled(step, *lowering.shapes(of.analysis.program.inputs))
    return programs.flat_values(ready(*placed))


def run_plain(of: SearchProblem) -> list[np.ndarray]:
    """The same of the user's own step on one device."""
    workload = of.analysis.program.workload
    flat = arguments(of)
    count = len(of.analysis.program.state)
    state = jax.tree.unflatten(of.analysis.program.state_tree, flat[:count])
    batch = jax.tree.unflatten(of.analysis.program.batch_tree, flat[count:])
    return programs.flat_values(compiled(workload.step, state, batch)(state, batch))


def worst_error(of: SearchProblem, got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest relative L2 error: of the change of a state leaf, or of a metric."""
    before = programs.flat_values(arguments(of))[: len(of.analysis.program.state)]
    assert len(got) == len(want)
    worst = 0.0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not np.issubdtype(a.dtype, np.inexact):
            assert np.array_equal(a, b), i
            continue
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        start = before[i].astype(wide) if i < len(before) else np.zeros_like(b)
        change = b - np.where(np.isfinite(start), start, 0)  # of an infinite one all that is
        # Against 1e-4 this lets the last bit of a leaf that hardly changes differ.
        floor = 1e-3 * np.linalg.norm(b) + 1e-30
        worst = max(worst, float(np.linalg.norm(a - b) / max(np.linalg.norm(change), floor)))
    return worst
