"""Replica groups in XLA's three notations: who communicates with whom.

The notations, as XLA prints them (xla/hlo/ir/replica_group.cc and mesh_and_axis.cc, 2026):

- lists: `{{0,1},{2,3}}`; `{}` is one group of all devices;
- iota: `[4,2]<=[8]` and `[4,2]<=[2,4]T(1,0)`, groups x size from a reshaped, transposed iota;
- mesh: `mesh['a'=2,'b'=4] {'b'}`, with sub-axes `'a':(1)2` and, where the devices are reordered,
  `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}` or `device_ids=(0,4,1,5,...)`.

A notation that is not understood is an error: read as "no groups" it would make communication free.
"""

import functools
import math
import re

import numpy as np

from autoshard.records.groups import Devices, Groups, groups_along_parts
from autoshard.rungs.compile.hlo.records import HloError

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


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def _iota(dims: str, transpose: str | None) -> Devices:
    shape = _ints(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_ints(transpose)) if transpose else devices


def _rows(devices: Devices, shape: tuple[int, ...]) -> Groups:
    if len(shape) != 2:
        raise ValueError(f"expected [groups,size], got {list(shape)}")
    return tuple(tuple(row) for row in devices.reshape(shape).tolist())


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
    return groups_along_parts(devices, list(sizes.values()), spans)
