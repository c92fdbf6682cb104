"""From a layout to the program that runs: the constrained step, jitted with its shardings.

Rung 2, rung 3 and the plan all lower through here, so that what is judged is what runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.shardy import stablehlo
from autoshard.program.analysis import Analysis
from autoshard.program.program import Leaf, Program
from autoshard.program.rewrite import constrained
from autoshard.program.sites import Site
from autoshard.records.layout import Spec
from autoshard.records.module import ArraySpec, Module
from autoshard.space.specs import Specs
from autoshard.target.target import Target


def partition_spec(spec: Spec) -> PartitionSpec:
    """The canonical PartitionSpec: no trailing None, one axis as a plain name."""
    parts: list[object] = [
        None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec
    ]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def shardings(mesh: Mesh | AbstractMesh, specs: Sequence[Spec]) -> list[NamedSharding]:
    return [NamedSharding(mesh, partition_spec(spec)) for spec in specs]


def site_shardings(
    specs: Specs, mesh: Mesh | AbstractMesh
) -> Callable[[Site], NamedSharding | None]:
    """What each site is pinned to; None for sites that stay open."""

    def of(site: Site) -> NamedSharding | None:
        placed = specs.sites.get(site.index)
        if placed is None:
            return None
        parts = [
            PartitionSpec.UNCONSTRAINED if is_open else (tuple(axes) or None)
            for axes, is_open in zip(placed.spec, placed.open, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*parts))

    return of


def constrained_step(
    analysis: Analysis, specs: Specs, mesh: Mesh | AbstractMesh
) -> jaxprs.ClosedJaxpr:
    """The flat step with the layout's constraint at every site."""
    program = analysis.program
    if not specs.mesh:
        return program.step  # one device: nothing to shard
    if analysis.as_annotated:
        assert program.annotated is not None
        return jaxprs.on_mesh(program.annotated, mesh)
    return constrained(analysis.sites, site_shardings(specs, mesh))


def jit_step(analysis: Analysis, specs: Specs, target: Target) -> jax.stages.Wrapped:
    """The flat step, jitted: (state leaves, batch leaves) -> (state leaves, metric leaves).

    The state is donated, the batch never. Every site of `specs` is constrained:
    `minimal_constraints` leaves out beforehand what says nothing new.
    """
    mesh = target.any_mesh(specs.mesh)
    closed = constrained_step(analysis, specs, mesh)
    return jax.jit(
        jaxprs.as_function(closed),
        in_shardings=shardings(mesh, specs.inputs),
        out_shardings=shardings(mesh, specs.outputs),
        donate_argnums=tuple(range(len(analysis.program.state))),
        keep_unused=True,
    )


@without_mesh()
def compilable_step(analysis: Analysis, specs: Specs, target: Target) -> jax.stages.Lowered:
    """The step as `Plan.step` runs it, ready to be compiled in this process."""
    return jit_step(analysis, specs, target).lower(*shapes(analysis.program.inputs))


def shapes(leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


@without_mesh()
def lower_step(analysis: Analysis, specs: Specs, target: Target) -> Module:
    """The step as a module that any process can compile.

    Raises:
      LoweringError: JAX cannot lower it for the target's platform.
    """
    jitted = jit_step(analysis, specs, target)
    lowered = stablehlo.lower(
        jitted.trace(*shapes(analysis.program.inputs)), target.lowering_platform
    )
    return module_of(
        lowered,
        specs.mesh or (("x", 1),),
        target.lowering_platform,
        analysis.program.inputs,
        specs.inputs,
        analysis.program.outputs,
        specs.outputs,
        len(analysis.program.state),
    )


@without_mesh()
def lower_unsharded(program: Program, target: Target) -> Module:
    """The step with no constraint and nothing divided: what every layout must agree with.

    On one device; where the step has manual regions (shard_map) on the devices that these name,
    each of which holds everything between them.
    """
    none = [tuple(() for _ in leaf.shape) for leaf in program.inputs]
    out = [tuple(() for _ in leaf.shape) for leaf in program.outputs]
    shape, step = None, program.plain
    placed: dict[str, Any] = {}
    if program.manual and program.pinned_mesh is not None:
        shape = program.pinned_mesh
        step = jaxprs.on_mesh(step, jaxprs.abstract_mesh(shape))
        mesh = target.any_mesh(shape)
        placed = {"in_shardings": shardings(mesh, none), "out_shardings": shardings(mesh, out)}
    jitted = jax.jit(jaxprs.as_function(step), keep_unused=True, **placed)
    lowered = stablehlo.lower(jitted.trace(*shapes(program.inputs)), target.lowering_platform)
    return module_of(
        lowered,
        shape or (("x", 1),),
        target.lowering_platform,
        program.inputs,
        none,
        program.outputs,
        out,
        len(program.state),
    )


@without_mesh()
def lower_init(program: Program, platform: str) -> Module:
    """init() on one device, as a module without inputs.

    Args:
      platform: as lowering and compilers name it.

    Raises:
      LoweringError: JAX cannot lower it for the platform.
    """
    jitted = jax.jit(jaxprs.as_function(program.plain_init))
    lowered = stablehlo.lower(jitted.trace(), platform)
    return module_of(
        lowered,
        (("x", 1),),
        platform,
        (),
        (),
        program.state,
        [tuple(() for _ in leaf.shape) for leaf in program.state],
        0,
    )


def module_of(
    lowered: jax.stages.Lowered,
    mesh: tuple[tuple[str, int], ...],
    platform: str,
    inputs: Sequence[Leaf],
    input_specs: Sequence[Spec],
    outputs: Sequence[Leaf],
    output_specs: Sequence[Spec],
    state_count: int,
) -> Module:
    """A lowered program as plain data."""
    return Module(
        stablehlo=stablehlo.bytecode(_stablehlo(lowered)),
        mesh=mesh,
        platform=platform,
        inputs=tuple(_array(x, s) for x, s in zip(inputs, input_specs, strict=True)),
        outputs=tuple(_array(x, s) for x, s in zip(outputs, output_specs, strict=True)),
        state_count=state_count,
    )


def _stablehlo(lowered: jax.stages.Lowered) -> stablehlo.Operation:
    module: stablehlo.Module = lowered.compiler_ir("stablehlo")
    return module.operation


def _array(leaf: Leaf, spec: Spec) -> ArraySpec:
    if leaf.is_key:  # a threefry key is two 32-bit words
        return ArraySpec(path=leaf.path, shape=(*leaf.shape, 2), dtype="uint32", spec=(*spec, ()))
    return ArraySpec(path=leaf.path, shape=leaf.shape, dtype=np.dtype(leaf.dtype).name, spec=spec)
