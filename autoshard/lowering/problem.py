"""From `model_fn` and `knobs` to analysed programs, each with the space of its layouts."""

import dataclasses
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

from autoshard.errors import LayoutError, WorkloadError
from autoshard.program.analysis import Analysis, analyse
from autoshard.program.program import Program, sample_batch, trace
from autoshard.records.layout import Layout, MeshShape, Spec
from autoshard.space.annotated import analyse_annotated
from autoshard.space.meshes import mesh_shapes
from autoshard.space.pinned import read_fix, why_indivisible
from autoshard.space.space import Knobs, Space
from autoshard.target.target import Target
from autoshard.workload import Workload

A = TypeVar("A")
B = TypeVar("B")

KnobValue = str | int | float | bool | None
ModelFn = Callable[..., Workload]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """One value of the knobs: its analysis and the space of its layouts."""

    analysis: Analysis
    space: Space

    def analysis_for(self, layout: Layout) -> Analysis:
        """What a layout is judged and lowered with: the step as annotated has its own analysis."""
        if layout.as_annotated and self.space.annotated is not None:
            return self.space.annotated.analysis
        return self.analysis


def knob_values(model_fn: ModelFn, knobs: Mapping[str, Sequence[KnobValue]] | None) -> list[Knobs]:
    """Every combination of knob values, sorted by name within each.

    Raises:
      WorkloadError: an unknown knob, no values for one, or a value that is no JSON scalar.
    """
    knobs = dict(knobs or {})
    accepted = inspect.signature(model_fn).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        unknown = sorted(set(knobs) - set(accepted))
        if unknown:
            raise WorkloadError(
                f"model_fn takes no knob {', '.join(map(repr, unknown))}; it takes"
                f" {', '.join(map(repr, accepted)) or 'none'}"
            )
    for name, given in knobs.items():
        values: object = given
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise WorkloadError(f"knob {name!r}: expected a sequence of values, got {values!r}")
        for value in values:
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise WorkloadError(
                    f"knob {name!r}: values are str, int, float, bool or None, got {value!r}"
                )
            json.dumps(value)
    names = sorted(knobs)
    return [
        tuple(zip(names, values, strict=True))
        for values in itertools.product(*(knobs[name] for name in names))
    ]


def trace_all(
    model_fn: ModelFn,
    knobs: Mapping[str, Sequence[KnobValue]] | None,
    keep_constraints: bool,
) -> tuple[list[Program], list[str]]:
    """Traces every combination of knobs. One that cannot be traced is noted, unless all fail.

    Returns:
      The programs, and a sentence for each combination that failed.

    Raises:
      WorkloadError: what `trace` refuses, or knobs that change the global batch.
    """

    def traced(values: Knobs) -> Program:
        return trace(model_fn(**dict(values)), values, keep_constraints)

    programs, notes = _those_that_can(traced, knob_values(model_fn, knobs), dict, "traced")
    for program in programs[1:]:
        for a, b in itertools.zip_longest(programs[0].batch, program.batch):
            if a is None or b is None or (a.path, a.shape, a.dtype) != (b.path, b.shape, b.dtype):
                leaf = a or b
                raise WorkloadError(
                    f"knobs may not change the global batch: {leaf.path} is"
                    f" {f'{a.dtype}{list(a.shape)}' if a else 'absent'} with"
                    f" {dict(programs[0].knobs)} and"
                    f" {f'{b.dtype}{list(b.shape)}' if b else 'absent'} with {dict(program.knobs)}"
                )
    return programs, notes


def all_subjects(
    programs: Sequence[Program], as_subject: Callable[[Program], SearchProblem]
) -> tuple[list[SearchProblem], list[str]]:
    """Analyses every combination of knobs. One that cannot be is noted, unless all fail.

    What traces may still not lower for the target's platform, or name a mesh of other devices.

    Returns:
      The problems, and a sentence for each combination that failed.

    Raises:
      AutoshardError: what `make_problem` refuses, of the first, where it refuses all.
    """
    return _those_that_can(as_subject, programs, lambda program: dict(program.knobs), "analysed")


def _those_that_can(
    make: Callable[[A], B],
    given: Sequence[A],
    knobs_of: Callable[[A], Mapping[str, KnobValue]],
    done: str,
) -> tuple[list[B], list[str]]:
    """What is made of each combination of knobs, and a sentence for each of which nothing is.

    Raises:
      Exception: the first error, where nothing is made of any.
    """
    made: list[B] = []
    notes: list[str] = []
    first: Exception | None = None
    for one in given:
        try:
            made.append(make(one))
        except Exception as error:  # the user's own code may raise anything
            first = first or error
            text = f"knobs {dict(knobs_of(one))} cannot be {done}: {error}"
            notes.append(text.splitlines()[0][:300])
    if not made and first is not None:
        raise first
    return made, notes


def check_samples(programs: Sequence[Program], seed: int) -> None:
    """Draws one batch of each: what is wrong with `sample` shows before anything is searched.

    Raises:
      WorkloadError: a batch of another structure, shape or dtype.
      Exception: whatever `sample` raises.
    """
    for program in programs:
        if program.workload.sample is not None:
            sample_batch(program, seed)


def allowed_meshes(
    target: Target,
    mesh_shape: str,
    fix: Mapping[str, object] | None,
    single: Set[str] = frozenset(),
) -> tuple[MeshShape, ...]:
    """The mesh shapes a search may use; a given mesh comes first.

    Args:
      single: axes of a given mesh that stay of size one.

    Raises:
      WorkloadError: `mesh_shape` is neither "free" nor "fixed", or it is "fixed" and no mesh was
        given.
    """
    given = tuple((name, size) for name, size in target.given if size > 1)
    if mesh_shape == "fixed" and not target.given:
        raise WorkloadError(
            f'mesh_shape="fixed" keeps the shape of the mesh that is given, got'
            f" {target.describe()} without one: give a jax.sharding.Mesh, or leave mesh_shape out"
        )
    if mesh_shape == "fixed":
        return (given or mesh_shapes(target.device_count, (), ordered=False)[0],)
    if mesh_shape != "free":
        raise WorkloadError(f'mesh_shape is "free" or "fixed", got {mesh_shape!r}')
    others = (name for name, _ in target.given if name not in single)
    names = tuple(dict.fromkeys([*(name for name, _ in given), *others]))
    ordered = target.uneven or bool(fix and target.given)
    free = mesh_shapes(target.device_count, names, ordered=ordered, never=single)
    return tuple(dict.fromkeys([given, *free] if given else free))


def _check_mesh_axes(
    pinned: Sequence[tuple[str, tuple[str, ...]]],
    leaves: Sequence[tuple[int, Spec]],
    program: Program,
    meshes: Sequence[MeshShape],
) -> None:
    """Refuses what no mesh of the space can hold."""
    for i, spec in leaves:
        unfits = [why_indivisible(program.state[i], spec, dict(mesh)) for mesh in meshes]
        if all(unfits):
            raise LayoutError(f"fix cannot be kept on any mesh of these devices: {unfits[0]}")
    wanted = [(name, set(to)) for name, to in pinned]
    for name, axes in wanted:
        if not any(axes <= {m for m, _ in mesh} for mesh in meshes):
            known = sorted({m for mesh in meshes for m, _ in mesh})
            raise LayoutError(
                f"fix[{name!r}] names mesh axes {sorted(axes)}, expected some of {known} that one"
                " mesh has together; a jax.sharding.Mesh gives its axes names of your own"
            )


def _without(
    single: Set[str],
    pinned: Sequence[tuple[str, tuple[str, ...]]],
    leaves: Sequence[tuple[int, Spec]],
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[tuple[int, Spec], ...], frozenset[str]]:
    """What is fixed, without mesh axes of size one; and those that it named."""
    named = {m for _, to in pinned for m in to} | {m for _, s in leaves for dim in s for m in dim}
    return (
        tuple((axis, tuple(m for m in to if m not in single)) for axis, to in pinned),
        tuple(
            (i, tuple(tuple(m for m in dim if m not in single) for dim in spec))
            for i, spec in leaves
        ),
        frozenset(named & single),
    )


def make_problem(
    program: Program,
    target: Target,
    mesh_shape: str,
    fix: Mapping[str, object] | None,
    fixed_leaves: Sequence[tuple[str, Spec]] = (),
    fixed_axes: Sequence[tuple[str, tuple[str, ...]]] = (),
) -> SearchProblem:
    """Analyses a program and builds its space.

    Args:
      fixed_leaves, fixed_axes: (path, spec) and (logical axis, mesh axes) pairs on top of `fix`, as
        a plan file records them.
    """
    analysis = analyse(program, target.lowering_platform)
    pinned, leaves = read_fix(fix, program, analysis.axes)
    single = {name for name, n in (*target.given, *(program.pinned_mesh or ())) if n == 1}
    pinned, leaves, unused = _without(single, pinned, leaves)
    meshes = allowed_meshes(target, mesh_shape, fix, unused)
    if program.pinned_mesh is not None:
        count = math.prod(n for _, n in program.pinned_mesh)
        if count != target.device_count:
            raise WorkloadError(
                f"unsupported: the step names the axes of {dict(program.pinned_mesh)} itself, at"
                f" {', '.join(program.pins)}, which takes {count} devices; there are"
                f" {target.device_count}"
            )
        meshes = (program.pinned_mesh,)
    _check_mesh_axes(pinned, leaves, program, meshes)
    index = {leaf.path: i for i, leaf in enumerate(program.state)}
    leaves += tuple((index[path], spec) for path, spec in fixed_leaves if path in index)
    known = {a.name for a in analysis.axes.axes}
    pinned += tuple((axis, to) for axis, to in fixed_axes if axis in known)
    annotated = None
    # Constraints on several meshes cannot all be moved to one.
    own = [m for m in program.annotated_meshes if math.prod(n for _, n in m) == target.device_count]
    if (
        own
        and len(program.annotated_meshes) == 1
        and program.annotated is not None
        and not program.keeps_constraints
    ):
        annotated = analyse_annotated(program, analysis, own[0], target.lowering_platform)
    space = Space(
        program=program,
        axes=analysis.axes,
        sites=tuple(analysis.sites.sites),
        used_leaves=analysis.sites.used_leaves,
        meshes=meshes,
        pinned=pinned,
        fixed_leaves=leaves,
        annotated=annotated,
    )
    return SearchProblem(analysis=analysis, space=space)
