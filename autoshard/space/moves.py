"""The neighbours of a candidate: what lies one decision away in a space."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from autoshard.records.layout import Candidate, Gather, Layout, MeshShape, rules
from autoshard.space.meshes import MAX_MESH_AXES
from autoshard.space.space import Space


def neighbours(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates one decision away.

    Another rule, another level of `Gather`, small arrays replicated or not, loop inputs
    gathered before the loop or not, other conflict losers, a mesh axis divided or moved.
    """
    return (near for near in moves(space, candidate) if space.contains(near) is None)


def moves(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """The same and some the space does not contain: cheap, to be asked about one by one."""
    if candidate.layout.as_annotated:
        return
    seen = {candidate.layout}
    for swapped in axis_swaps(space, candidate):
        seen.add(swapped.layout)
        yield swapped
    for layout in (candidate.layout, *_divided(space, candidate.layout)):
        for near in _changed(space, layout):
            if near not in seen:
                seen.add(near)
                yield Candidate(layout=near, knobs=space.knobs)  # canonical already


def axis_swaps(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """The first of the moves: the same rules over other links, where links differ."""
    layouts = dict.fromkeys(map(space.canonical, _swapped(space, candidate.layout)))
    return (space.candidate(layout) for layout in layouts if layout != candidate.layout)


def _changed(space: Space, layout: Layout) -> Iterator[Layout]:
    """Canonical layouts one decision away."""
    for whole in Gather:
        if whole is not layout.gather:
            yield space.effective(dataclasses.replace(layout, gather=whole))
    replicated = dataclasses.replace(layout, small_replicated=not layout.small_replicated)
    yield space.effective(replicated)
    if space.enters_loops(layout):
        flipped = not layout.gather_loop_inputs
        yield space.effective(dataclasses.replace(layout, gather_loop_inputs=flipped))
    make = functools.partial(
        space.layout,
        gather=layout.gather,
        small_replicated=layout.small_replicated,
        gather_loop_inputs=layout.gather_loop_inputs,
    )
    compute, storage = dict(layout.activation_rules), dict(layout.state_rules)
    conflict_losers = layout.conflict_losers
    for axis in space.shardable():
        a = axis.name
        old, kept = compute.get(a, ()), storage.get(a, ())
        for to in space.options(axis, layout.mesh):
            if to != old:
                changed = {**compute, a: to}
                if not axis.is_data:
                    yield make(layout.mesh, changed, storage, conflict_losers)
                yield make(
                    layout.mesh,
                    changed,
                    storage if axis.is_data else {**storage, a: to},
                    conflict_losers,
                )
                # The mesh axes may have been at work elsewhere: move them here.
                freed = {
                    b: tuple(m for m in was if m not in to) if b != a else to
                    for b, was in changed.items()
                }
                if to and freed != changed:
                    both = {
                        b: freed.get(b, was) if storage.get(b) == compute.get(b) else was
                        for b, was in {**storage, a: to}.items()
                    }
                    yield make(
                        layout.mesh, freed, storage if axis.is_data else both, conflict_losers
                    )
            if to != kept and not axis.is_data:
                yield make(layout.mesh, compute, {**storage, a: to}, conflict_losers)
    contested = space.contested(compute, storage)
    for a in contested:
        yield make(layout.mesh, compute, storage, {*conflict_losers} ^ {a})
    # Weights in a row are all divided by rows or all by columns: one alone pays for both.
    for given in ((), contested):
        yield make(layout.mesh, compute, storage, given)


def _swapped(space: Space, layout: Layout) -> Iterator[Layout]:
    """The same rules with two mesh axes over each other's links, where that matters."""
    allowed = {tuple(n for _, n in mesh) for mesh in space.meshes}
    for i, ((first, m), (second, n)) in enumerate(itertools.pairwise(layout.mesh)):
        mesh = (*layout.mesh[:i], (first, n), (second, m), *layout.mesh[i + 2 :])
        if tuple(size for _, size in mesh) not in allowed:
            continue
        other = {first: second, second: first}
        place = {name: k for k, (name, _) in enumerate(mesh)}

        swapped = [
            rules(
                {a: sorted((other.get(x, x) for x in to), key=place.__getitem__) for a, to in table}
            )
            for table in (layout.activation_rules, layout.state_rules)
        ]
        yield dataclasses.replace(
            layout, mesh=mesh, activation_rules=swapped[0], state_rules=swapped[1]
        )


def _divided(space: Space, layout: Layout) -> Iterator[Layout]:
    """The same layout on a mesh with one axis divided in two, every rule using both halves."""
    names = {name for mesh in space.meshes for name, _ in mesh}
    for i, (name, size) in enumerate(layout.mesh):
        if len(layout.mesh) >= MAX_MESH_AXES:
            return
        used = [n for n, _ in layout.mesh]
        spare = next((n for n in sorted(names) if n not in used), None)
        if spare is None:
            return
        for major in range(2, size):
            if size % major:
                continue
            mesh = (
                *layout.mesh[:i],
                (name, major),
                (spare, size // major),
                *layout.mesh[i + 1 :],
            )
            if not _allows(space, mesh):
                continue

            def widen(
                table: tuple[tuple[str, tuple[str, ...]], ...],
                name: str = name,
                spare: str = spare,
            ) -> tuple[tuple[str, tuple[str, ...]], ...]:
                return tuple(
                    (a, tuple(x for m in to for x in ((m, spare) if m == name else (m,))))
                    for a, to in table
                )

            yield dataclasses.replace(
                layout,
                mesh=mesh,
                activation_rules=widen(layout.activation_rules),
                state_rules=widen(layout.state_rules),
            )


def _allows(space: Space, mesh: MeshShape) -> bool:
    sizes = sorted(n for _, n in mesh)
    return any(sorted(n for _, n in allowed) == sizes for allowed in space.meshes)
