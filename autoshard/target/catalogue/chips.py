"""Chips and the links between them: the records of the catalogue."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping

LEVELS = ("chip", "ici", "nvlink", "network", "dcn")
"""Levels of links, innermost first.

chip: between the JAX devices of one chip. ici: between the chips of a TPU slice. nvlink: between
the GPUs of one NVLink domain. network: InfiniBand or RoCE between those. dcn: between slices.
"""

DTYPES = ("f64", "f32", "bf16", "f16", "f8", "f4", "s8", "s4")
"""Types of operands that a chip may have a rate for: f8 and f4 stand for all formats of that width.

A type without a rate is not computed in hardware; it is priced at the rate of f32.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of the catalogue with what vouches for it.

    Attributes:
      value: in `unit`.
      unit: SI: "FLOP/s", "bytes", "bytes/s", "s" or "Hz".
      source: document and section or table; where there is none it says "assumed", and why.
      date: of the document, or of the day it was read where it bears none: year, year-month or
        year-month-day; "" for a plain number of a user's file.
    """

    value: float
    unit: str
    source: str
    date: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """All shapes that slices of a chip can have, with what vouches for it as in `Figure`."""

    value: tuple[tuple[int, ...], ...]
    source: str
    date: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How devices are joined at one level.

    Attributes:
      level: one of `LEVELS`.
      kind: "torus": each chip has links to its neighbours along each dimension; the devices of one
        chip share them. "switch": any device reaches any other.
      bandwidth: in one direction: of one link of a torus; of a switch, what one JAX device can send
        into it.
      latency: one hop, or one step of a collective, over this level.
      domain: of a switch, how many JAX devices it joins; None: all there are.
      wraps_at: of a torus, a dimension whose extent is a multiple of this wraps around; None: no
        dimension does.
      cubes: of a torus, dimensions wrap around only if every extent is a multiple of `wraps_at`:
        the wraparound runs through optical switches on the faces of whole cubes.
    """

    level: str
    kind: str
    bandwidth: Figure
    latency: Figure
    domain: int | None
    wraps_at: int | None
    cubes: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of chip. All figures are of one JAX device unless said otherwise.

    Attributes:
      name: what users write, e.g. "v5p" or "h100".
      platform: "tpu" or "cuda".
      device_kind: as `jax.Device.device_kind` says.
      flops: peak of matrix products by type of operands (`DTYPES`), dense. "f32" is what XLA does
        by default: one pass in bf16 on TPU, TF32 on GPU.
      element_flops: peak of all other arithmetic, in f32, one operation an element (a fused
        multiply-add counts as one instruction but as two operations).
      memory_bytes: the device's memory.
      usable_bytes: what XLA lets programs use of it.
      memory_bandwidth: peak between memory and chip, reads and writes together.
      clock_hz: TPU: what turns the compiler's `estimated_cycles` into seconds; None on GPU.
      launch_s: fixed cost of a kernel.
      devices_per_chip: JAX devices of one chip.
      host_shape: TPU: chips of one host along the dimensions of the torus; GPU: (devices of a
        host,).
      dims: number of extents in a target's name: dimensions of the torus (TPU); hosts and devices
        of a host (GPU).
      max_shape: the largest slice, its extents in any order; where slices are made of whole cubes,
        no other slice may have more chips. () where there is no limit.
      max_extent: of slices of whole cubes, the longest dimension that is offered; None: any.
      shapes: all slices there are; None where `host_shape`, `max_shape` and cubes say it.
      links: innermost first.
      target_config: GPU: the text of XLA's GpuTargetConfigProto; "" for TPU.
      libtpu_name: TPU: what libtpu calls the chip, whatever its name here; "" for GPU.
      chip_config: TPU: libtpu's name for how the cores of a chip are used; "" for its default.
    """

    name: str
    platform: str
    device_kind: str
    flops: Mapping[str, Figure]
    element_flops: Figure
    memory_bytes: Figure
    usable_bytes: Figure
    memory_bandwidth: Figure
    clock_hz: Figure | None
    launch_s: Figure
    devices_per_chip: int
    host_shape: tuple[int, ...]
    dims: int
    max_shape: tuple[int, ...]
    links: tuple[Link, ...]
    target_config: str
    libtpu_name: str = ""
    chip_config: str = ""
    max_extent: int | None = None
    shapes: Shapes | None = None

    def __hash__(self) -> int:
        # Of mappings there is no hash; equal chips have equal names and kinds.
        return hash((self.name, self.device_kind))

    @property
    def digest(self) -> str:
        """Of everything an estimate may depend on: not of the name, nor of sources and dates."""
        data = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        del data["name"]
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def link(self, level: str) -> Link | None:
        """The link of a level, or None where the chip has none there."""
        return next((link for link in self.links if link.level == level), None)


def _plain(value: object) -> object:
    """Plain JSON of a field, of a figure only its value."""
    if isinstance(value, Figure):
        return value.value
    if isinstance(value, Shapes):
        return _plain(value.value)
    if isinstance(value, Link):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value
