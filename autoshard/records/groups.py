"""Groups of devices: who communicates with whom, and over which mesh axes."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.records.layout import MeshShape
from autoshard.records.subaxes import named_part

Groups = tuple[tuple[int, ...], ...]
"""Groups of device numbers, each in the order XLA gives it."""

Devices = npt.NDArray[np.int64]
"""Device numbers in the order of a mesh."""


def groups_of_axes(mesh: MeshShape, axes: Iterable[str]) -> Groups:
    """The groups of devices that differ only in their coordinates on `axes`.

    Args:
      mesh: (mesh axis, size) pairs, major to minor over the device order.
      axes: names of mesh axes; their order does not matter.
    """
    wanted = set(axes)
    if unknown := wanted - {name for name, _ in mesh}:
        raise ValueError(f"expected axes of the mesh {mesh}, got {sorted(unknown)}")
    devices = np.arange(math.prod(size for _, size in mesh)).reshape([size for _, size in mesh])
    inside = [i for i, (name, _) in enumerate(mesh) if name in wanted]
    return _grouped(devices, inside)


@functools.lru_cache(maxsize=4096)
def axes_of_groups(groups: Groups, mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes that the groups run over, in mesh order; () if they are no product of axes.

    Parts of axes are named as Shardy names them and rung 1 does: `"x":(2)4`. Axes of size one never
    appear, and groups of one device run over no axis.

    Args:
      mesh: (mesh axis, size) pairs; an axis may itself be named as a part of one.
    """
    spans: list[tuple[int, int, int]] = []
    for axis, along in enumerate(_coordinates(groups[0], mesh)):
        parts = _parts_along(sorted(set(along)), mesh[axis][1])
        if parts is None:
            return ()
        spans += [(axis, before, size) for before, size in parts]
    devices = np.arange(math.prod(size for _, size in mesh))
    expected = groups_along_parts(devices, [size for _, size in mesh], spans)
    if {frozenset(g) for g in groups} != {frozenset(g) for g in expected}:
        return ()
    return tuple(named_part(*mesh[axis], before, size) for axis, before, size in spans)


def _parts_along(coordinates: list[int], whole: int) -> list[tuple[int, int]] | None:
    """The parts (major to it, size) of an axis that some coordinates run over, major first.

    Args:
      coordinates: in rising order, each once.
      whole: size of the axis.

    Returns:
      None where the coordinates are not those of parts of the axis.
    """
    found: list[tuple[int, int]] = []
    offsets = [c - coordinates[0] for c in coordinates]
    while len(offsets) > 1:
        step = offsets[1]
        size = next((k for k, at in enumerate(offsets) if at != k * step), len(offsets))
        higher = offsets[::size]
        whole_steps = all(offset % (step * size) == 0 for offset in (whole, *higher))
        if not whole_steps or offsets != [h + k * step for h in higher for k in range(size)]:
            return None
        found.append((whole // (step * size), size))
        offsets = higher
    return found[::-1]


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes on which any source differs from its target, in mesh order."""
    sources = _coordinates([source for source, _ in pairs], mesh)
    targets = _coordinates([target for _, target in pairs], mesh)
    return tuple(
        name for (name, _), s, t in zip(mesh, sources, targets, strict=True) if tuple(s) != tuple(t)
    )


class Partners(NamedTuple):
    """Who takes part in a collective together.

    Attributes:
      axes: the mesh axes they run over; () where they are no product of axes.
      size: how many they are; of groups that differ, in the largest.
      members: where there are no axes, the places in the mesh of that group; else ().
    """

    axes: tuple[str, ...]
    size: int
    members: tuple[int, ...] = ()


def partners_in_groups(groups: Groups, mesh: MeshShape) -> Partners:
    """Of a collective among groups."""
    axes = axes_of_groups(groups, mesh)
    largest = max(groups, key=len)
    return Partners(axes, len(largest), () if axes else largest)


def partners_in_pairs(pairs: Sequence[tuple[int, int]], mesh: MeshShape) -> Partners:
    """Of a permutation; a device that sends to itself sends nothing."""
    axes = axes_of_pairs([(source, to) for source, to in pairs if source != to], mesh)
    return Partners(axes, math.prod(size for name, size in mesh if name in axes))


def _coordinates(devices: Sequence[int], mesh: MeshShape) -> list[list[int]]:
    """For each mesh axis the coordinates of the devices."""
    shape = [size for _, size in mesh]
    if max(devices, default=0) >= math.prod(shape):
        raise ValueError(f"expected devices of the mesh {mesh}, got {max(devices)}")
    return [along.tolist() for along in np.unravel_index(np.asarray(devices, int), shape)]


def _grouped(devices: Devices, inside: list[int]) -> Groups:
    """Groups along the dimensions `inside`; the last of them runs fastest."""
    outside = [i for i in range(devices.ndim) if i not in inside]
    size = math.prod(devices.shape[i] for i in inside)
    rows = devices.transpose(outside + inside).reshape(devices.size // size, size)
    return tuple(tuple(row) for row in rows.tolist())


def groups_along_parts(
    devices: Devices, sizes: Sequence[int], spans: Sequence[tuple[int, int, int]]
) -> Groups:
    """Groups of the devices of a mesh along parts of its axes, the last of them fastest.

    Args:
      devices: all of them, flat.
      sizes: of the mesh axes.
      spans: (number of the axis, what is major to the part, size of the part).

    Raises:
      ValueError: parts overlap, or do not divide one another.
    """
    cuts = [{1, size} for size in sizes]
    for axis, before, size in spans:
        cuts[axis] |= {before, before * size}
    # Cut every axis where a part begins or ends: each part is then whole dimensions.
    places = [
        (axis, low, high)
        for axis, at in enumerate(cuts)
        for low, high in itertools.pairwise(sorted(at))
    ]
    if any(high % low for _, low, high in places):
        raise ValueError(f"parts {spans} of axes of {sizes} that do not divide one another")
    inside = [
        i
        for axis, before, size in spans
        for i, (other, low, high) in enumerate(places)
        if other == axis and before <= low and high <= before * size
    ]
    if len(set(inside)) != len(inside):
        raise ValueError(f"parts {spans} of axes of {sizes} overlap")
    return _grouped(devices.reshape([high // low for _, low, high in places] or [1]), inside)
