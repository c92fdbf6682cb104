"""Which device stands where in a mesh: jax's own mesh utilities, asked without devices."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from jax.experimental import mesh_utils

from autoshard.errors import TargetError
from autoshard.records.positions import Position, over_slices

_KINDS = {"TPU v5": "TPU v5p", "TPU v5e": "TPU v5 lite", "TPU v6e": "TPU v6 lite"}


def known_kind(device_kind: str) -> str:
    """One name for a kind of device of which libtpu's releases say several."""
    return _KINDS.get(device_kind, device_kind)


@dataclasses.dataclass(frozen=True, slots=True)
class _Device:
    """What `mesh_utils` reads of a device."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int


@functools.lru_cache(maxsize=4096)
def device_order(
    positions: tuple[Position, ...], device_kind: str, platform: str, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """For each place of a mesh, major to minor, the number of the device that stands there.

    Slices, and hosts on switched networks, are outermost: the first mesh axes that a factor of
    their number divides run across them. Inside a slice of TPUs `jax.experimental.mesh_utils` lays
    the mesh axes over the torus, the last ones (the busiest, by its convention) over most links.

    Args:
      sizes: of the mesh axes, major to minor.

    Raises:
      TargetError: the sizes do not multiply to the number of devices.
    """
    count = len(positions)
    if math.prod(sizes) != count:
        raise TargetError(f"a mesh of {list(sizes)} needs {math.prod(sizes)} devices, got {count}")
    if platform != "tpu" or count == 1:
        # Stable: devices of one host stay in the order they were given in.
        return tuple(sorted(range(count), key=lambda i: (positions[i].slice, positions[i].host)))
    devices = [
        _Device(
            id=i,
            platform=platform,
            device_kind=known_kind(device_kind),
            process_index=p.host,
            slice_index=p.slice,
            coords=(*p.coords, *(0,) * (3 - len(p.coords))),
            core_on_chip=p.core,
        )
        for i, p in enumerate(positions)
    ]
    slices = len({p.slice for p in positions})
    parts = over_slices(slices, sizes)
    inner = [n // s for n, s in zip(sizes, parts, strict=True)]
    blocks = [
        _torus([d for d in devices if d.slice_index == s], inner)
        for s in sorted({p.slice for p in positions})
    ]
    # (slices..., inner...) -> each mesh axis is its part over slices, then its part inside.
    grid = np.array(blocks).reshape(*parts, *inner)
    n = len(sizes)
    grid = grid.transpose([k for axis in range(n) for k in (axis, n + axis)])
    return tuple(int(i) for i in grid.reshape(-1))


def _torus(devices: Sequence[_Device], sizes: Sequence[int]) -> np.ndarray:
    """Device numbers of one slice in the shape of the mesh."""
    try:
        found = mesh_utils.create_device_mesh(
            tuple(sizes), list(devices), allow_split_physical_axes=True
        )
    except (ValueError, NotImplementedError, AssertionError):
        found = np.array(devices, dtype=object).reshape(sizes)  # a shape it has no way for
    return np.array([d.id for d in found.flat]).reshape(sizes)
