"""The step as its author wrote it: with the sharding constraints it has, put on our devices.

Where the author says nothing (the shardings of the state, of the batch) the partitioner is asked
what the constraints imply.
"""

import dataclasses
from collections.abc import Sequence, Set

import jax
from jax.sharding import NamedSharding

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.shardy import flattening, partitioner, shardings, stablehlo
from autoshard.program.analysis import Analysis
from autoshard.program.program import Leaf, Program
from autoshard.records.layout import MeshShape, Spec
from autoshard.space.specs import Specs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnnotatedStep:
    """The baseline "as annotated", ready to be judged and lowered.

    Attributes:
      analysis: of the step with its own constraints, which its digest covers; it has no sites.
      specs: what the constraints imply for inputs and outputs.
    """

    analysis: Analysis
    specs: Specs


@without_mesh()
def analyse_annotated(
    program: Program, base: Analysis, mesh: MeshShape, platform: str
) -> AnnotatedStep:
    """Analyses the step with its own constraints on a mesh of the author's shape."""
    assert program.annotated is not None
    abstract = jaxprs.abstract_mesh(mesh)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs]
    closed = jaxprs.on_mesh(program.annotated, abstract)
    module = flattening.flatten(stablehlo.lower_abstract(closed, shapes, platform))
    stablehlo.tag(module)
    attributes = shardings.Attributes(module.context)
    every_open, out_open = (
        [_open(leaf) for leaf in leaves] for leaves in (program.inputs, program.outputs)
    )
    judged = partitioner.judge(module, mesh, every_open, out_open, {}, {}, attributes)
    names = {name for name, _ in mesh}
    inputs: list[Spec] = []
    for leaf, dims in zip(program.inputs, judged.argument_dims, strict=True):
        inputs.append(_spec(leaf, dims, names))
    count = len(program.state)
    declared = _declared_by_init(program, mesh, platform)
    if declared is not None:
        inputs[:count] = declared
    # Its constraints are part of the program here, and so is what they imply for its inputs.
    analysis = base.written(module, platform, f"\n{inputs}")
    specs = Specs(
        mesh=mesh,
        inputs=tuple(inputs),
        outputs=(*inputs[:count], *(tuple(() for _ in x.shape) for x in program.metrics)),
        sites={},
        dropped=(),
        idle=(),
    )
    return AnnotatedStep(analysis=analysis, specs=specs)


def _declared_by_init(program: Program, mesh: MeshShape, platform: str) -> list[Spec] | None:
    """The state's shardings where the author's init() constrains them, None where it does not."""
    closed = program.init
    said = [
        sharding
        for eqn in jaxprs.equations(closed.jaxpr)
        if jaxprs.is_placement(eqn)
        for sharding in jaxprs.placements(eqn)
        if isinstance(sharding, NamedSharding)
    ]
    names = {name for name, _ in mesh}
    if not said or any(not names.issuperset(s.mesh.axis_names) for s in said):
        return None
    moved = jaxprs.on_mesh(closed, jaxprs.abstract_mesh(mesh))
    module = flattening.flatten(stablehlo.lower_abstract(moved, [], platform))
    stablehlo.tag(module)
    out = [_open(leaf) for leaf in program.state]
    judged = partitioner.judge(module, mesh, [], out, {}, {}, shardings.Attributes(module.context))
    return [
        _spec(leaf, dims, names)
        for leaf, dims in zip(program.state, judged.result_dims, strict=True)
    ]


def _open(leaf: Leaf) -> shardings.Dims:
    """Every dimension open; the words of a PRNG key are one more."""
    return tuple(((), True) for _ in (*leaf.shape, *((),) * leaf.is_key))


def _spec(leaf: Leaf, dims: Sequence[tuple[str, ...]], names: Set[str]) -> Spec:
    """What the partitioner says of a leaf, without the words of a key.

    A part of a mesh axis cannot be written as a PartitionSpec: that dimension stays whole.
    """
    rank = len(leaf.shape)
    if len(dims) < rank:
        return ((),) * rank
    return tuple(axes if names >= set(axes) else () for axes in dims[:rank])
