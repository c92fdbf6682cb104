"""Parts of mesh axes, in Shardy's notation: `"x":(p)n` is n places of x, p being major to them."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autoshard.records.layout import MeshShape


def part_of(axis: str, mesh: MeshShape) -> tuple[str, int, int]:
    """(mesh axis, what is major to the part, its size) of an axis, whole or in part.

    >>> part_of('"x":(2)4', (("x", 16),)), part_of("x", (("x", 16),))
    (('x', 2, 4), ('x', 1, 16))
    """
    if ":(" not in axis:
        return axis, 1, dict(mesh)[axis]
    name, _, part = axis.partition(":(")
    before, _, size = part.partition(")")
    return name.strip('"'), int(before), int(size)


def axis_name(axis: str) -> str:
    """The mesh axis that this is, or is a part of.

    >>> axis_name('"x":(1)4'), axis_name("x")
    ('x', 'x')
    """
    return axis.partition(":(")[0].strip('"')


def ways(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts mesh axes, or parts of some, divide what lies over them.

    >>> ways(['"x":(1)4', "y"], {"x": 8, "y": 2}), ways([], {})
    (8, 1)
    """
    return math.prod(int(a.rpartition(")")[2]) if ":(" in a else sizes[a] for a in axes)


def named_part(axis: str, whole: int, before: int, size: int) -> str:
    """What a part of an axis is called, of one that may itself be a part.

    Args:
      whole: size of the axis.
      before, size: of the part, within the axis.

    >>> named_part("x", 16, 2, 4), named_part("x", 16, 1, 16), named_part('"x":(2)8', 8, 2, 4)
    ('"x":(2)4', 'x', '"x":(4)4')
    """
    if size == whole:
        return axis
    name, major, _ = part_of(axis, ((axis, whole),))
    return f'"{name}":({major * before}){size}'


def distinct(axes: Iterable[str]) -> tuple[str, ...]:
    """The same mesh axes with none named twice: where a whole axis is there its parts go, and parts
    that overlap or follow each other become one. Sorted.

    >>> distinct(['"x":(1)2', '"x":(2)2', "y"])
    ('"x":(1)4', 'y')
    >>> distinct(['"x":(1)2', "x"])
    ('x',)
    """
    names = set(axes)
    if not any(":(" in axis for axis in names):
        return tuple(sorted(names))
    whole = {axis for axis in names if ":(" not in axis}
    parts: dict[str, list[tuple[int, int]]] = {}  # (major to it, major to what follows it)
    for axis in names - whole:
        name, _, part = axis.partition(":(")
        before, _, size = part.partition(")")
        if name.strip('"') not in whole:
            parts.setdefault(name, []).append((int(before), int(before) * int(size)))
    for name, spans in parts.items():
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        whole |= {f"{name}:({start}){end // start}" for start, end in merged}
    return tuple(sorted(whole))


def places_of_axes(axes: Sequence[str], mesh: MeshShape) -> tuple[int, ...]:
    """Places in the mesh, row-major, of the first group over some mesh axes or parts (`"x":(2)4`).

    A part `(p)n` of an axis is the n places that follow each other at a distance of what is minor
    to it, p being what is major to it (Shardy's sub-axes).
    """
    found = np.zeros(1, dtype=int)
    for distance, n in _distances(axes, mesh):
        found = (found[:, None] + np.arange(n) * distance).reshape(-1)
    return tuple(found.tolist())


def groups_along(axes: Sequence[str], mesh: MeshShape) -> npt.NDArray[np.int64]:
    """Places in the mesh, row-major, of every group over some mesh axes or parts: groups x members.

    The first row is `places_of_axes`; the others are the same, moved.
    """
    places = np.arange(math.prod(n for _, n in mesh))
    starts = np.ones(len(places), dtype=bool)
    for distance, n in _distances(axes, mesh):
        starts &= places // distance % n == 0
    return places[starts][:, None] + np.array(places_of_axes(axes, mesh))


def _distances(axes: Sequence[str], mesh: MeshShape) -> list[tuple[int, int]]:
    """Of each axis or part how far apart its places are in the mesh, and how many there are."""
    sizes = [n for _, n in mesh]
    strides = {name: math.prod(sizes[i + 1 :]) for i, (name, _) in enumerate(mesh)}
    whole = dict(mesh)
    found = []
    for axis in axes:
        name, before, n = part_of(axis, mesh)
        found.append((whole[name] // (before * n) * strides[name], n))
    return found
