"""Targets: what the `mesh` argument names. Live devices and fake CPU meshes."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.errors import TargetError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """The devices a search plans for.

    Attributes:
      devices: in the order of the given mesh, major to minor.
      platform: "cpu", "gpu" or "tpu" as JAX names it.
      device_kind: the vendor's name.
      given: the given mesh's shape; () where plain devices were given.
      memory_bytes: what one device can hold.
      memory_source: where that number comes from, for messages.
      shared_host: a fake mesh: all devices share the cores and the memory of one host.
    """

    devices: tuple[jax.Device, ...]
    platform: str
    device_kind: str
    given: tuple[tuple[str, int], ...]
    memory_bytes: int
    memory_source: str
    shared_host: bool

    @property
    def device_count(self) -> int:
        return len(self.devices)

    def mesh(self, shape: Sequence[tuple[str, int]]) -> Mesh:
        """A mesh of Auto axes over the devices; () gives one axis of size one."""
        axes = tuple(shape) or (("x", 1),)
        sizes = tuple(n for _, n in axes)
        if math.prod(sizes) != len(self.devices):
            raise TargetError(
                f"a mesh of {dict(axes)} needs {math.prod(sizes)} devices, got {len(self.devices)}"
            )
        return Mesh(
            np.array(self.devices, dtype=object).reshape(sizes),
            tuple(name for name, _ in axes),
            axis_types=(AxisType.Auto,) * len(axes),
        )

    def describe(self) -> str:
        fake = "fake " if self.shared_host else ""
        return f"{len(self.devices)} {fake}{self.device_kind} devices"


def find_target(mesh: object, memory_bytes: int | None = None) -> Target:
    """Reads the `mesh` argument of the public functions.

    Args:
      mesh: a `jax.sharding.Mesh` (Auto or Explicit axes: the devices are what counts) or a
        sequence of devices.
      memory_bytes: overrides what one device can hold.

    Raises:
      TargetError: no devices, or something that is not a mesh.
    """
    given: tuple[tuple[str, int], ...] = ()
    if isinstance(mesh, Mesh):
        given = tuple((str(n), int(s)) for n, s in mesh.shape.items())
        devices = tuple(mesh.devices.flat)
    elif isinstance(mesh, str):
        raise TargetError(
            f"mesh={mesh!r} names hardware that is not here; this version plans for live devices"
            " and fake CPU meshes: pass a jax.sharding.Mesh or a list of devices"
        )
    elif isinstance(mesh, (Sequence, np.ndarray)):
        devices = tuple(np.asarray(mesh, dtype=object).flat)
    else:
        raise TargetError(
            f"mesh must be a jax.sharding.Mesh or a sequence of devices, got {type(mesh).__name__}"
        )
    if not devices or (isinstance(mesh, Mesh) and mesh.empty):
        raise TargetError("the mesh is empty: it has no devices")
    wrong = [d for d in devices if not isinstance(d, jax.Device)]
    if wrong:
        raise TargetError(f"expected JAX devices, got {type(wrong[0]).__name__}: {wrong[0]!r}")
    if len(set(devices)) != len(devices):
        raise TargetError("the mesh names a device twice")
    first = devices[0]
    limit, source = memory_bytes, "memory_bytes"
    if limit is None:
        stats = first.memory_stats() if first.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            limit, source = int(stats["bytes_limit"]), "the device's own limit"
        else:
            limit = _host_memory_bytes() // len(devices)
            source = "host memory divided by devices"
    if limit <= 0:
        raise TargetError(f"memory_bytes must be positive, got {limit}")
    return Target(
        devices=devices,
        platform=first.platform,
        device_kind=first.device_kind,
        given=given,
        memory_bytes=limit,
        memory_source=source,
        shared_host=first.platform == "cpu",
    )


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
