"""Replica groups: who communicates with whom, in XLA's three notations, and over which mesh axes.

The notations, as XLA prints them (xla/hlo/ir/replica_group.cc and mesh_and_axis.cc, 2026):

- lists: `{{0,1},{2,3}}`; `{}` is one group of all devices;
- iota: `[4,2]<=[8]` and `[4,2]<=[2,4]T(1,0)`, groups x size from a reshaped, transposed iota;
- mesh: `mesh['a'=2,'b'=4] {'b'}`, with sub-axes `'a':(1)2` and, where the devices are reordered,
  `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}` or `device_ids=(0,4,1,5,...)`.

A notation that is not understood is an error: read as "no groups" it would make communication free.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.hlo.records import HloError
from autoshard.layout import MeshShape
from autoshard.subaxes import named_part

Groups = tuple[tuple[int, ...], ...]
"""Groups of device numbers, each in the order XLA gives it."""

_Devices = npt.NDArray[np.int64]

_LISTS = re.compile(r"\{(\{\d+(,\d+)*\}(,\{\d+(,\d+)*\})*)?\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^{}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_REFERENCE = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"\{(\{\d+,\d+\}(,\{\d+,\d+\})*)?\}")


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, device_count: int) -> Groups:
    """Reads replica groups in any of the three notations.

    Args:
      text: what stands behind `replica_groups=`.
      device_count: how many devices run the program; `{}` means all of them.

    Raises:
      HloError: not one of the notations, or it names devices twice or beyond `device_count`.
    """
    stripped = text.strip()
    if stripped == "{}":
        return (tuple(range(device_count)),)
    try:
        if _LISTS.fullmatch(stripped):
            groups = tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", stripped))
        elif found := _IOTA.fullmatch(stripped):
            groups = _rows(_iota(found[2], found[3]), _ints(found[1]))
        elif found := _MESH.fullmatch(stripped):
            groups = _mesh_groups(found[1], found[2], found[3])
        else:
            raise ValueError("no known notation")
    except (ValueError, KeyError) as error:
        raise HloError(
            "expected replica groups such as {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'a'}; "
            f"got {text!r} ({error})"
        ) from error
    members = [device for group in groups for device in group]
    if not members or len(set(members)) != len(members) or max(members) >= device_count:
        raise HloError(
            f"expected disjoint groups of devices 0..{device_count - 1}, got {text!r} = {groups}"
        )
    return groups


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Reads the `source_target_pairs` of a collective-permute, such as `{{0,1},{1,0}}`.

    Raises:
      HloError: `text` has another form.
    """
    if not _PAIRS.fullmatch(text.strip()):
        raise HloError(f"expected pairs such as {{{{0,1}},{{1,0}}}}, got {text[:160]!r}")
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text))


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
    expected = _groups_along(devices, [size for _, size in mesh], spans)
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


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def _iota(dims: str, transpose: str | None) -> _Devices:
    shape = _ints(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_ints(transpose)) if transpose else devices


def _rows(devices: _Devices, shape: tuple[int, ...]) -> Groups:
    if len(shape) != 2:
        raise ValueError(f"expected [groups,size], got {list(shape)}")
    return tuple(tuple(row) for row in devices.reshape(shape).tolist())


def _grouped(devices: _Devices, inside: list[int]) -> Groups:
    """Groups along the dimensions `inside`; the last of them runs fastest."""
    outside = [i for i in range(devices.ndim) if i not in inside]
    size = math.prod(devices.shape[i] for i in inside)
    return _rows(devices.transpose(outside + inside), (devices.size // size, size))


def _mesh_groups(axes: str, order: str | None, references: str) -> Groups:
    """Groups in the mesh notation; a sub-axis `'a':(p)s` is the s that p major parts precede."""
    pieces = [_AXIS.fullmatch(part.strip()) for part in axes.split(",")]
    if not all(pieces):
        raise ValueError(f"mesh axes {axes!r}")
    sizes = {piece[1]: int(piece[2]) for piece in pieces if piece}
    devices = np.arange(math.prod(sizes.values()))
    if order is not None:
        iota = _ORDER.fullmatch(order.strip())
        devices = np.ravel(_iota(iota[1], iota[2])) if iota else np.asarray(_ints(order))
        if sorted(devices.tolist()) != list(range(math.prod(sizes.values()))):
            raise ValueError(f"device_ids {order!r} of a mesh of {math.prod(sizes.values())}")
    names = list(sizes)
    spans: list[tuple[int, int, int]] = []
    for part in references.split(","):
        found = _REFERENCE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"axis {part!r}")
        name, before, size = found[1], int(found[2] or 1), int(found[3] or sizes[found[1]])
        if sizes[name] % (before * size):
            raise ValueError(f"sub-axis {part!r} of an axis of size {sizes[name]}")
        spans.append((names.index(name), before, size))
    return _groups_along(devices, list(sizes.values()), spans)


def _groups_along(
    devices: _Devices, sizes: Sequence[int], spans: Sequence[tuple[int, int, int]]
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
