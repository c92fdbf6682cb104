"""Targets: what `mesh` names. Live devices, fake CPU meshes, hardware that is not here."""

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.compat.jaxpr.jaxprs import abstract_mesh
from autoshard.compat.xla.compilers import require_compiler
from autoshard.compat.xla.device_order import device_order
from autoshard.compat.xla.deviceless import Hardware
from autoshard.compat.xla.platforms import lowering_platform
from autoshard.errors import TargetError
from autoshard.records.positions import Position
from autoshard.target import host
from autoshard.target.catalogue import catalogue
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.topology import Topology, parse_topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """The devices a search plans for.

    Attributes:
      devices: in the order of the given mesh, major to minor; () for hardware that is not here.
      platform: "cpu", "gpu" or "tpu" as JAX names it.
      device_kind: the vendor's name.
      given: the given mesh's shape; () where plain devices were given.
      memory_bytes: what one device can hold.
      memory_source: where that number comes from, for messages.
      shared_host: a fake mesh: all devices share the cores and the memory of one host.
      topology: of hardware that is not here; else None.
    """

    devices: tuple[jax.Device, ...]
    platform: str
    device_kind: str
    given: tuple[tuple[str, int], ...]
    memory_bytes: int
    memory_source: str
    shared_host: bool
    topology: Topology | None = None

    @property
    def device_count(self) -> int:
        return self.topology.device_count if self.topology else len(self.devices)

    @property
    def is_here(self) -> bool:
        """Whether programs can run on it."""
        return self.topology is None

    @property
    def lowering_platform(self) -> str:
        """The platform as lowering and compilers name it: "cpu", "cuda", "rocm" or "tpu"."""
        return self.topology.chip.platform if self.topology else lowering_platform(self.devices[0])

    @property
    def uneven(self) -> bool:
        """Whether it matters which mesh axis runs over which links."""
        return self.platform == "tpu" or len({(p.slice, p.host) for p in self.positions}) > 1

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where each device stands, as far as it says it."""
        return self.topology.positions if self.topology else _positions(self.devices)

    @property
    def hardware(self) -> Hardware | None:
        """What a compiler must know where the devices are not here."""
        if self.topology is None:
            return None
        return Hardware(
            platform=self.topology.chip.platform,
            topology=self.topology.compiler_name,
            options=tuple(self.topology.compiler_options.items()),
        )

    def order(self, shape: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """For each place of a mesh, major to minor, the number of the device that stands there.

        A mesh that was given keeps its devices where they are; any other is laid out by where the
        devices are, so that a plan made for a topology finds the same order on the devices.
        """
        axes = tuple(shape) or (("x", 1),)
        sizes = tuple(n for _, n in axes)
        if math.prod(sizes) != self.device_count:
            raise TargetError(
                f"a mesh of {dict(axes)} needs {math.prod(sizes)} devices, got {self.device_count}"
            )
        given = tuple((name, n) for name, n in self.given if n > 1)
        if self.shared_host or (given and given == tuple((m, n) for m, n in axes if n > 1)):
            return tuple(range(self.device_count))
        return device_order(self.positions, self.device_kind, self.platform, sizes)

    def mesh(self, shape: Sequence[tuple[str, int]]) -> Mesh:
        """A mesh of Auto axes over the devices; () gives one axis of size one.

        Raises:
          TargetError: another number of devices, or they are not here.
        """
        if not self.is_here:
            raise TargetError(
                f"{self.describe()} are not here: save the plan, and load it where they are"
            )
        axes = tuple(shape) or (("x", 1),)
        order = self.order(axes)
        return Mesh(
            np.array([self.devices[i] for i in order], dtype=object).reshape([n for _, n in axes]),
            tuple(name for name, _ in axes),
            axis_types=(AxisType.Auto,) * len(axes),
        )

    def placed(self, shape: Sequence[tuple[str, int]]) -> tuple[jax.Device, ...]:
        """The devices at the places of a mesh, major to minor; for a single place the first.

        Raises:
          TargetError: another number of devices.
        """
        if math.prod(n for _, n in shape) == 1:
            return self.devices[:1]
        return tuple(self.devices[i] for i in self.order(shape))

    def any_mesh(self, shape: Sequence[tuple[str, int]]) -> Mesh | AbstractMesh:
        """`mesh`, without devices where they are not here: enough to lower for."""
        axes = tuple(shape) or (("x", 1),)
        return self.mesh(axes) if self.is_here else abstract_mesh(axes)

    def describe(self) -> str:
        if self.topology is not None:
            return f"{self.device_count} {self.device_kind} devices ({self.topology.name})"
        fake = "fake " if self.shared_host else ""
        return f"{len(self.devices)} {fake}{self.device_kind} devices"


def find_target(
    mesh: object,
    memory_bytes: int | None = None,
    hardware: str | os.PathLike[str] | None = None,
) -> Target:
    """Reads the `mesh` argument of the public functions.

    Args:
      mesh: a `jax.sharding.Mesh` (Auto or Explicit axes: the devices are what counts), a sequence
        of devices, or the name of hardware that is not here, such as "v5p:4x4x4".
      memory_bytes: overrides what one device can hold; of named hardware at most all it has.
      hardware: a catalogue file of the user's own.

    Raises:
      TargetError: no devices, something that is not a mesh, a name that no hardware has, or its
        compiler is not installed; memory_bytes above what the named hardware has; `hardware` beside
        devices; an accelerator that says no memory and that the catalogue does not know.
    """
    given: tuple[tuple[str, int], ...] = ()
    if hardware is not None and not isinstance(mesh, str):
        raise TargetError(
            f"got hardware={os.fspath(hardware)!r} and devices that are here, expected the name of"
            " hardware in that file: what devices here can do is measured; leave hardware out"
        )
    if isinstance(mesh, Mesh):
        given = tuple((str(n), int(s)) for n, s in mesh.shape.items())
        devices = tuple(mesh.devices.flat)
    elif isinstance(mesh, str):
        return _named(parse_topology(mesh, catalogue(hardware)), memory_bytes)
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
        own = _own_limit_bytes(devices) if first.platform != "cpu" else None
        if own is not None:
            limit, source = own, "the device's own limit"
        elif first.platform != "cpu":
            limit, source = _catalogued_limit(first.device_kind)
        else:
            limit = host.memory_bytes() // len(devices)
            source = "the host's memory that this process may use, divided by devices"
    _check_memory(limit)
    return Target(
        devices=devices,
        platform=first.platform,
        device_kind=first.device_kind,
        given=given,
        memory_bytes=limit,
        memory_source=source,
        shared_host=first.platform == "cpu",
    )


def require_own_devices(target: Target) -> None:
    """Refuses a search on devices of other processes of a job.

    Each process would race candidates by its own clock, decide for itself, and wait for the others
    in a collective that they never run.

    Raises:
      TargetError: a device belongs to another process than this one.
    """
    if not target.devices:
        return
    own = target.devices[0].client.process_index()
    processes = sorted({d.process_index for d in target.devices})
    if processes == [own]:
        return
    raise TargetError(
        f"got {target.device_count} devices of processes {processes}, expected devices of process"
        f" {own} alone, where this runs: a search cannot measure across processes yet; search for"
        " the hardware by its name in one process (autoshard.targets()), save the plan, and load"
        " it in every process (autoshard.load_plan)"
    )


def _named(topology: Topology, memory_bytes: int | None) -> Target:
    """A target that is not here; its compiler must be."""
    chip = topology.chip
    require_compiler(chip.platform)
    limit, source = memory_bytes, "memory_bytes"
    if limit is None:
        limit, source = int(chip.usable_bytes.value), chip.usable_bytes.source
    if limit > chip.memory_bytes.value:
        raise TargetError(
            f"got memory_bytes {limit}, expected at most {int(chip.memory_bytes.value)}, which is"
            f" all that a device of {topology.name} has; correct the chip in a catalogue file of"
            " your own (hardware=) if it has more"
        )
    _check_memory(limit)
    return Target(
        devices=(),
        platform={"cuda": "gpu"}.get(chip.platform, chip.platform),
        device_kind=chip.device_kind,
        given=(),
        memory_bytes=limit,
        memory_source=source,
        shared_host=False,
        topology=topology,
    )


def _own_limit_bytes(devices: Sequence[jax.Device]) -> int | None:
    """What a device says it can hold; None where devices do not say it.

    In a job of many processes only the devices of this one can be asked.

    Raises:
      TargetError: none of them is this process's.
    """
    process = devices[0].client.process_index()
    here = next((d for d in devices if d.process_index == process), None)
    if here is None:
        raise TargetError(
            f"got {len(devices)} devices of which none belongs to process {process}, where this"
            " runs: what they hold cannot be asked; add a device of this process, or give"
            " memory_bytes"
        )
    stats = here.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def _catalogued_limit(device_kind: str) -> tuple[int, str]:
    """What a live accelerator that does not say it can hold, and who says so.

    Raises:
      TargetError: the catalogue does not know it.
    """
    chip = chip_of_kind(device_kind)
    if chip is None:
        raise TargetError(
            f"{device_kind} does not say how much memory it has, and the catalogue does not know"
            " it: give memory_bytes"
        )
    return int(chip.usable_bytes.value), chip.usable_bytes.source


def _check_memory(limit: int) -> None:
    if limit <= 0:
        raise TargetError(f"memory_bytes must be positive, got {limit}")


def _positions(devices: Sequence[jax.Device]) -> tuple[Position, ...]:
    """Where live devices are, as far as they say it."""
    return tuple(
        Position(
            slice=int(getattr(d, "slice_index", None) or 0),
            host=int(d.process_index),
            coords=tuple(getattr(d, "coords", None) or ()),
            core=int(getattr(d, "core_on_chip", None) or 0),
        )
        for d in devices
    )
