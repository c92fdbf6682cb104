"""The model of time that rungs 1 and 2 share, and its constants.

The model is a roofline (Williams, Waterman and Patterson, CACM 52, 2009). The time of a step is the
sum over kernels of max(operations / rate, bytes / bandwidth) + launch, plus latency + bytes /
bandwidth for each collective (alpha-beta model). On live devices calibration measures the
collectives by kind and group size. For hardware that is not here their cost follows from the links
of the group (`network`). The devices of a fake mesh share the cores of one host: the rates are the
host's, the work of all devices adds up, and fresh pages of a large block of temporaries cost time.

Not modelled here: overlap of communication with computation (rung 2 reads it off the schedule), and
caches. A kernel reads and writes the main memory at one bandwidth, whatever it touches.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.errors import CalibrationError, HloError
from autoshard.records.layout import MeshShape
from autoshard.records.trial import Collective
from autoshard.records.work import Work
from autoshard.target.network import Network, collective_s

_NARROW = re.compile(r"(?:f|i|s|u|ui)([48])(?:[eE]\d.*)?")
"""Types of 8 and 4 bits: f8E4M3FN (MLIR), f8e4m3fn (HLO), i8, ui8, s8, u4."""

GATHERS_AT_ONCE = frozenset({"tpu"})
"""Platforms whose compiler gathers along several dimensions at once: seen with libtpu 0.0.42.

Not so XLA:CPU (jax 0.10.2 and 0.12.0.1) and XLA:GPU (jax 0.10.2).
"""

SUMS_APART = frozenset({"cpu"})
"""Platforms whose compiler does not fold sums over devices: see `Constants.folds_sums`.

So seen with jax 0.10.2 and 0.12.0.1. XLA:GPU (jax 0.10.2; its passes all-reduce-folder and
all-reduce-reassociate) and libtpu 0.0.42 fold them.
"""

FRESH_FROM_BYTES = 32 << 20
"""From which size on glibc's malloc maps a block anew each time, and gives it back when freed.

Smaller ones it mostly keeps after the first time: mallopt(3), M_MMAP_THRESHOLD, which rises by
itself to at most 4 MiB times the size of a long.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Cost of one kind of collective in groups of one size.

    Attributes:
      latency_s: of one execution with nothing to send.
      s_per_byte: for each byte of payload on one device (see `Collective.bytes`).
    """

    kind: str
    group_size: int
    latency_s: float
    s_per_byte: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the model knows of a target.

    Attributes:
      device: kind of device, for messages and keys.
      device_count: devices it was measured or catalogued for.
      contract_flops_per_s: matrix products and convolutions of other dtypes than the next names.
      contract_by_dtype: the same by dtype of the operands, sorted by name; of f32 also by how
        precisely it is multiplied, where that costs more (`precision.precise_rates`).
      element_flops_per_s: everything else, one operation an element.
      bandwidth_bytes_per_s: memory traffic.
      launch_s: fixed cost of a kernel.
      shared: all devices share the cores of one host, and the rates are the host's.
      forms_reduce_scatter: the compiler makes one reduce-scatter of an all-reduce whose result is
        sliced along the same axes; else the whole is reduced and then cut.
      links: measured collectives; () where the network says what they cost.
      date: ISO date of the calibration; "" for the catalogue's figures.
      gathers_by_dimension: an array that is divided along several dimensions is gathered along one
        after another, the last first; else along all of them at once.
      folds_sums: what is summed over devices along several dimensions is summed along all of them
        at once, and sums that are added up are added before they are sent; else one dimension after
        another, and each by itself.
      fresh_s_per_byte: seconds for each byte of a block of at least `FRESH_FROM_BYTES`, whose
        pages the system gives anew to each step; on a shared host alone.
      clock_hz: cycles a second of the compiler's own estimates; 0 where it makes none.
      source: what else the figures depend on: topology and digest of its catalogue entry.
    """

    device: str
    device_count: int
    contract_flops_per_s: float
    element_flops_per_s: float
    bandwidth_bytes_per_s: float
    launch_s: float
    shared: bool
    forms_reduce_scatter: bool
    links: tuple[LinkCost, ...]
    date: str
    contract_by_dtype: tuple[tuple[str, float], ...] = ()
    gathers_by_dimension: bool = True
    folds_sums: bool = True
    fresh_s_per_byte: float = 0.0
    clock_hz: float = 0.0
    source: str = ""

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Constants":
        """Reads what `to_json` wrote.

        Raises:
          CalibrationError: the fields are those of another version of autoshard.
        """
        known = {field.name for field in dataclasses.fields(Constants)}
        differing = sorted(known ^ data.keys())
        if differing:
            raise CalibrationError(
                "the constants were written by another version of autoshard, which differs in"
                f" {', '.join(differing)}: calibrate the target again"
            )
        links = tuple(LinkCost(**link) for link in data["links"])
        by_dtype = tuple((str(d), float(r)) for d, r in data["contract_by_dtype"])
        return Constants(**{**data, "links": links, "contract_by_dtype": by_dtype})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far the higher rungs found the model off: factors on its two parts. 1, 1 says nothing."""

    compute: float = 1.0
    communication: float = 1.0


class CostModel:
    """Seconds of kernels and collectives on one target.

    Args:
      network: the links of hardware that is not here; None where the constants hold measured ones.
    """

    def __init__(
        self,
        constants: Constants,
        network: Network | None = None,
    ):
        self.constants = constants
        self._network = network
        self._by_dtype = dict(constants.contract_by_dtype)
        self._links: dict[str, tuple[list[int], list[float], list[float]]] = {}
        for kind in {link.kind for link in constants.links}:
            own = sorted((x for x in constants.links if x.kind == kind), key=lambda x: x.group_size)
            self._links[kind] = (
                [x.group_size for x in own],
                [x.latency_s for x in own],
                [x.s_per_byte for x in own],
            )

    @property
    def _devices(self) -> int:
        """How many devices' work adds up."""
        return self.constants.device_count if self.constants.shared else 1

    def rate(self, dtype: str) -> float:
        """Operations a second of products of this dtype, in MLIR's words or HLO's; "" for all else.

        A rate of `f8` or `f4` is that of every format of the width, `s8` that of `i8` and `u8` too.
        The rate of f32 depends on its precision (`precision.effective_matmul_dtype`) where the
        constants say so.
        """
        if not dtype:
            return self.constants.element_flops_per_s
        if dtype in self._by_dtype or not self._by_dtype:
            return self._by_dtype.get(dtype, self.constants.contract_flops_per_s)
        plain, _, passes = dtype.partition(":")[0].partition("_x")
        if passes:
            return self.rate(plain) / int(passes)
        width = _NARROW.fullmatch(plain)
        name = f"{'f' if plain[0] == 'f' else 's'}{width[1]}" if width else plain
        return self._by_dtype.get(name, self.constants.contract_flops_per_s)

    def kernels_s(
        self, flops: np.ndarray, bytes_: np.ndarray, trips: np.ndarray, dtypes: Sequence[str]
    ) -> float:
        """Seconds of all kernels of a step, for one device.

        Args:
          flops, bytes_, trips: one entry a kernel.
          dtypes: of a product's operands; "" for other kernels.
        """
        rates = {dtype: self.rate(dtype) for dtype in set(dtypes)}
        rate = np.array([rates[dtype] for dtype in dtypes])
        each = np.maximum(flops / rate, self.memory_s(bytes_)) + self.constants.launch_s
        return float(self._devices * np.dot(each, trips))

    def memory_s(self, bytes_: Any) -> Any:
        """Seconds of memory traffic, for a number or an array of them."""
        return bytes_ / self.constants.bandwidth_bytes_per_s

    def fresh_s(self, block_bytes: float) -> float:
        """Seconds that a step waits for the pages of its temporaries, one block on each device.

        Args:
          block_bytes: of all temporaries of one device. A block below `FRESH_FROM_BYTES` costs
            nothing, since the allocator keeps it.
        """
        if block_bytes < FRESH_FROM_BYTES:
            return 0.0
        return self._devices * block_bytes * self.constants.fresh_s_per_byte

    def kernel_s(self, work: Work) -> float:
        """Seconds of one compiled kernel.

        Products take the compiler's own cycles, where it prints any. For kernels that only move and
        transform data its cycles come to 2 to 5 times what the memory allows (libtpu 0.0.42 and
        0.0.50). Those kernels, and all kernels without cycles, take a roofline.
        """
        c = self.constants
        if work.cycles is not None and work.matmul_flops and c.clock_hz:
            return self._devices * work.cycles / c.clock_hz
        busy = sum(flops / self.rate(dtype) for dtype, flops in work.matmul_flops)
        busy += work.element_flops / c.element_flops_per_s
        return self._devices * (max(busy, float(self.memory_s(work.bytes))) + c.launch_s)

    def collective_s(self, one: Collective, mesh: MeshShape) -> float:
        """Seconds of one execution of a collective on a mesh.

        Raises:
          HloError: its kind is unknown, or the constants hold no measurement of it.
        """
        if one.group_size <= 1:
            return 0.0
        if self._network is not None:
            spans = self._network.spans(one.mesh_axes, one.group_size, mesh, one.members)
            return collective_s(one.kind, spans, one.bytes)
        links = self._links.get(one.kind)
        if links is None:
            raise HloError(
                f"got a collective of kind {one.kind!r} in groups of {one.group_size}, expected one"
                f" of {sorted(self._links)}, which were measured"
            )
        # Between two measured group sizes both constants are taken to be linear in the size.
        sizes, latencies, per_bytes = links
        latency = float(np.interp(one.group_size, sizes, latencies))
        per_byte = float(np.interp(one.group_size, sizes, per_bytes))
        return latency + per_byte * one.bytes

    def collectives_s(self, collectives: Iterable[Collective], mesh: MeshShape) -> float:
        return sum(self.collective_s(c, mesh) * c.count for c in collectives)


class MeshPrices:
    """The same model for programs compiled for one mesh, as `hlo.timeline` asks it."""

    def __init__(self, cost: CostModel, mesh: MeshShape):
        self._cost, self._mesh = cost, mesh

    def kernel_s(self, work: Work) -> float:
        return self._cost.kernel_s(work)

    def collective_s(self, one: Collective) -> float:
        return self._cost.collective_s(one, self._mesh)


def fit_correction(
    pairs: Iterable[tuple[float, float, float]], prior_weight: float = 1.0
) -> Correction:
    """Least squares for the factors that bring predictions to what was seen.

    Each pair is (predicted compute seconds, predicted communication seconds, seen seconds). Errors
    count relative to what was seen; a ridge towards the pairs' common scale keeps a factor that the
    pairs say nothing about in line.
    """
    rows = [(a / t, b / t) for a, b, t in pairs if t > 0]
    if not rows:
        return Correction()
    x = np.array(rows)
    scale = 1.0 / float(np.mean(x.sum(axis=1)))
    ridge = prior_weight * np.eye(2) * float(np.mean(x.sum(axis=1) ** 2))
    solved = np.linalg.solve(x.T @ x + ridge, x.T @ np.ones(len(rows)) + ridge @ [scale, scale])
    low, high = scale / 4, scale * 4
    compute, communication = (float(np.clip(v, low, high)) for v in solved)
    return Correction(compute=compute, communication=communication)
