"""Parts of mesh axes, in Shardy's notation: `"x":(p)n` is n places of x, p being major to them."""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.layout import MeshShape


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


def places_of_axes(axes: Sequence[str], mesh: MeshShape) -> tuple[int, ...]:
    """Places in the mesh, row-major, of the first group over some mesh axes or parts (`"x":(2)4`).

    A part `(p)n` of an axis is the n places that follow each other at a distance of what is minor
    to it, p being what is major to it (Shardy's sub-axes).
    """
    sizes = [n for _, n in mesh]
    strides = {name: math.prod(sizes[i + 1 :]) for i, (name, _) in enumerate(mesh)}
    whole = dict(mesh)
    found = np.zeros(1, dtype=int)
    for axis in axes:
        name, before, n = part_of(axis, mesh)
        step = whole[name] // (before * n) * strides[name]
        found = (found[:, None] + np.arange(n) * step).reshape(-1)
    return tuple(found.tolist())
