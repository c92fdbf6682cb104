"""The one model of time that rungs 1 and 2 share, and its constants.

Time of a step = sum over kernels of max(operations / rate, bytes / bandwidth) + launch, plus for
each collective latency + bytes / bandwidth of its group. On live devices both are measured for each
kind and group size (alpha-beta model); for hardware that is not here they follow from the links the
group runs over (`network`). Devices of a fake mesh share the cores of one host: there the rates are
the host's, the work of all devices adds up, a product waits for its operands before it computes,
and pages of a large block of temporaries cost time.

Not modelled here: overlap of communication with computation (rung 2 reads it off the schedule),
what one kernel leaves in the caches for the next, where a step touches more than they hold.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.hlo.work import Work
from autoshard.layout import MeshShape
from autoshard.network import Network, collective_s
from autoshard.rows import MANY
from autoshard.trial import Collective

MODEL_REVISION = 56
"""Part of every journal key.

Raise it when estimates change by a change here, to `network`, `arithmetic`, `precision`, `siting`,
`rewrite`, `specs`, `operations`, `fusion`, `library`, `kernels`, `buffers`, `trips`, `transposes`,
`cache_lines`, `convolutions`, `halos`, `shifts`, `pooling`, `vectorization`, `degenerate`, `rows`,
`hlo` or `rungs` (propagate, sending, gathers, halos, shifting, own_sends), to what `compat` reads
of a module or tells the partitioner, or to which constraints `constraints.told` keeps.
"""

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

ONE_BY_ONE = frozenset({"cpu"})
"""Platforms that send the arrays of a combined collective one after another.

XLA:CPU's compiler combines all-reduces and its runtime takes them apart again: that of k arrays
takes as long as k (jax 0.10.2 and 0.12, `docs/decisions/0031`). XLA:GPU combines up to 30 MB, and
gathers too: next to the steps of pods what that saves, the latency of small ones, is nothing. Rung
1 counts each array everywhere.
"""

GATHERS_OUTERMOST = frozenset({"cpu"})
"""Platforms that gather along the outermost dimension alone: see `Constants.gathers_outermost`.

So seen with jax 0.10.2 and 0.12.0.1 (`docs/decisions/0039`).
"""

MOVES_INVARIANTS = frozenset({"cpu"})
"""Platforms whose compiler takes collectives out of loops that do not change what is sent.

So seen with jax 0.10.2 and 0.12.0.1. XLA:GPU (jax 0.10.2) leaves them; libtpu 0.0.42 takes them out
and puts gathers back into the loops of a train step ("sunk").
"""

FRESH_FROM_BYTES = 32 << 20
"""From which size on glibc's malloc maps a block anew each time, and gives it back when freed.

Smaller ones it mostly keeps after the first time: mallopt(3), M_MMAP_THRESHOLD, which rises by
itself to at most 4 MiB times the size of a long.
"""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


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
      unvectorized_flops_per_s: of that what loops do element by element (`vectorization`); 0 for as
        fast as the rest.
      loop_parts: the most parts that the compiler divides a loop into for the host's threads.
      bandwidth_bytes_per_s: memory traffic, beyond the caches.
      bandwidths: (bytes, bytes a second), ascending, of traffic by what all devices together touch
        before they come back to it; the last is the one beyond the caches. () for that everywhere.
      launch_s: fixed cost of a kernel.
      array_s: what each array of one device costs that a step takes and returns, on a shared host
        alone: on others the host is ahead of the devices.
      shared: the rates are of a host whose cores all devices share.
      forms_reduce_scatter: the compiler makes one reduce-scatter of an all-reduce whose result is
        sliced along the same axes; else the whole is reduced and then cut.
      links: measured collectives; () where the network says what they cost.
      date: ISO date of the calibration; "" for the catalogue's figures.
      gathers_by_dimension: an array that is divided along several dimensions is gathered along one
        after another, the last first; else along all of them at once.
      folds_sums: what is summed over devices along several dimensions is summed along all of them
        at once, and sums that are added up are added before they are sent; else one dimension after
        another, and each by itself.
      one_by_one: the arrays of a combined collective are sent one after another.
      gathers_outermost: what is gathered along another dimension than the outermost is copied to an
        order in which that is, and back.
      moves_invariants: what a loop sends of what it does not change is sent once, in front of it.
      fresh_s_per_byte: seconds for each byte of a block of at least `FRESH_FROM_BYTES`, whose
        pages the system gives anew to each step; on a shared host alone.
      transposed_s: seconds for each element that a transpose reads across cache lines, where the
        cache does not hold these (`cache_lines`), beyond its bytes; on a shared host alone.
      collided_s: the same where the lines push each other out of the cache, of a crowding of 1; 0
        for as long as those that do not.
      degenerate_s: seconds for each element of a sum of products beside a dimension of one element
        (`degenerate`), beyond its arithmetic and its bytes; on a shared host alone.
      degenerate_across_s: the same where what is added up does not lie densely.
      turned_flops_per_s: convolutions that XLA turns around (`convolutions`); 0 for as fast as the
        others.
      least_rows: a product of fewer rows takes as long as one of so many (`rows`); on a shared host
        alone.
      patch_s: seconds for each element of the patches that are copied for a convolution
        (`convolutions`), beyond its arithmetic and its bytes; on a shared host alone.
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
    bandwidths: tuple[tuple[int, float], ...] = ()
    gathers_by_dimension: bool = True
    folds_sums: bool = True
    one_by_one: bool = False
    gathers_outermost: bool = False
    moves_invariants: bool = False
    fresh_s_per_byte: float = 0.0
    transposed_s: float = 0.0
    collided_s: float = 0.0
    degenerate_s: float = 0.0
    degenerate_across_s: float = 0.0
    turned_flops_per_s: float = 0.0
    array_s: float = 0.0
    unvectorized_flops_per_s: float = 0.0
    loop_parts: int = 1
    least_rows: float = 1.0
    patch_s: float = 0.0
    clock_hz: float = 0.0
    source: str = ""

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "Constants":
        links = tuple(LinkCost(**link) for link in data["links"])  # type: ignore[attr-defined]
        by_dtype = tuple((str(d), float(r)) for d, r in data.get("contract_by_dtype", ()))  # type: ignore[attr-defined]
        rest = dict(data)
        if "combines_sums" in rest:  # until 0.1; true of the same platforms
            rest["one_by_one"] = rest.pop("combines_sums")
        rest["bandwidths"] = tuple((int(b), float(r)) for b, r in data.get("bandwidths", ()))  # type: ignore[attr-defined]
        return Constants(**{**rest, "links": links, "contract_by_dtype": by_dtype})  # type: ignore[arg-type]


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
        self._touched = np.log([bytes_ for bytes_, _ in constants.bandwidths])
        self._s_per_byte = [1 / rate for _, rate in constants.bandwidths]
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
        Of f32 it depends on how precisely it is multiplied (`precision.multiplied_as`) where the
        constants say so, else it is that of all f32.
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
        self,
        flops: np.ndarray,
        bytes_: np.ndarray,
        trips: np.ndarray,
        dtypes: Sequence[str],
        transposed: np.ndarray | float = 0.0,
        collided: np.ndarray | float = 0.0,
        turned: np.ndarray | bool = False,
        vectorized: np.ndarray | bool = True,
        touched: np.ndarray | None = None,
        degenerate: np.ndarray | float = 0.0,
        degenerate_across: np.ndarray | float = 0.0,
        rows: np.ndarray | float = MANY,
        patches: np.ndarray | float = 0.0,
    ) -> float:
        """Seconds of all kernels of a step, for one device.

        Args:
          flops, bytes_, trips: of one entry a kernel.
          dtypes: of a product's operands; "" for other kernels.
          transposed: elements that a kernel reads across cache lines, each by what it costs.
          collided: those whose lines push each other out of the cache, each by its crowding.
          turned: whether it is a convolution that XLA turns around.
          vectorized: whether it does not do its arithmetic element by element.
          touched: as `memory_s` has it.
          degenerate, degenerate_across: as `Work` has them.
          rows: of the result of a product (`rows`).
          patches: elements of patches that are copied for a convolution (`convolutions`).
        """
        c = self.constants
        rates = {dtype: self.rate(dtype) for dtype in set(dtypes)}
        rate = np.array([rates[dtype] for dtype in dtypes])
        if c.turned_flops_per_s:
            rate = np.where(turned, c.turned_flops_per_s, rate)
        if c.unvectorized_flops_per_s:
            rate = np.where(vectorized, rate, c.unvectorized_flops_per_s)
        arithmetic_s, memory_s = flops / rate, self.memory_s(bytes_, touched)
        arithmetic_s = arithmetic_s * np.maximum(1.0, c.least_rows / rows)
        each = np.maximum(arithmetic_s, memory_s)
        if c.shared:
            each = np.where([bool(dtype) for dtype in dtypes], arithmetic_s + memory_s, each)
        each = each + self._across_lines_s(transposed, collided) + c.launch_s
        each = each + self._degenerate_s(degenerate, degenerate_across) + patches * c.patch_s
        return float(self._devices * np.dot(each, trips))

    def memory_s(self, bytes_: Any, touched: Any = None) -> Any:
        """Seconds of memory traffic; of a number, or of an array of them.

        Args:
          touched: bytes of one device that the step, or the loop it is in, touches before it comes
            back to these; None for more than the caches hold.
        """
        if touched is None or not self._s_per_byte:
            return bytes_ / self.constants.bandwidth_bytes_per_s
        at = np.log(np.maximum(np.multiply(touched, self._devices), 1.0))
        return bytes_ * np.interp(at, self._touched, self._s_per_byte)

    def _across_lines_s(self, crossing: Any, colliding: Any) -> Any:
        """Seconds of elements that are read across cache lines, and of those that collide."""
        c = self.constants
        if not c.collided_s:
            return crossing * c.transposed_s
        return (crossing - colliding) * c.transposed_s + colliding * c.collided_s

    def _degenerate_s(self, along: Any, across: Any) -> Any:
        """Seconds of sums of products beside a dimension of one, beyond what others take."""
        c = self.constants
        return along * c.degenerate_s + across * c.degenerate_across_s

    def handing_s(self, arrays: int) -> float:
        """Seconds in which the host hands a step so many arrays, and takes back what it returns."""
        return self._devices * arrays * self.constants.array_s

    def fresh_s(self, block_bytes: float, between: tuple[float, float] = (1.0, 1.0)) -> float:
        """Seconds a step waits for the pages of its temporaries, one block on each device.

        Args:
          block_bytes: of all temporaries of one device.
          between: which shares of it they may be, the least and the most: the more of these reach
            `FRESH_FROM_BYTES`, the likelier they do.
        """
        least, most = between
        likely = float(block_bytes >= FRESH_FROM_BYTES)
        if block_bytes and most > least:
            likely = math.log(most * block_bytes / FRESH_FROM_BYTES) / math.log(most / least)
            likely = min(max(likely, 0.0), 1.0)
        return likely * self._devices * block_bytes * self.constants.fresh_s_per_byte

    def kernel_s(self, work: Work, touched: float | None = None) -> float:
        """Seconds of one compiled kernel; `touched` as `memory_s` has it.

        Products take the cycles that the compiler says, where it says any. For kernels that only
        move and transform data its cycles come to 2 to 5 times what the memory allows (libtpu
        0.0.42 and 0.0.50): those, and all where there are no cycles, take a roofline. On a shared
        host a product packs its operands and then computes: there both add up.
        """
        c = self.constants
        if work.cycles is not None and work.matmul_flops and c.clock_hz:
            return self._devices * work.cycles / c.clock_hz
        busy = sum(flops / self.rate(dtype) for dtype, flops in work.matmul_flops)
        busy *= max(1.0, c.least_rows / work.rows)
        if work.turned_flops and c.turned_flops_per_s:
            busy *= 1.0 - work.turned_flops / sum(flops for _, flops in work.matmul_flops)
            busy += work.turned_flops / c.turned_flops_per_s
        one_by_one = work.unvectorized_flops if c.unvectorized_flops_per_s else 0.0
        busy += (work.element_flops - one_by_one) / c.element_flops_per_s
        if one_by_one:
            busy += one_by_one / c.unvectorized_flops_per_s
        memory_s = float(self.memory_s(work.bytes, touched))
        packed = c.shared and work.matmul_flops
        each = busy + memory_s if packed else max(busy, memory_s)
        each += self._across_lines_s(work.transposed, work.collided)
        each += self._degenerate_s(work.degenerate, work.degenerate_across)
        each += work.patches * c.patch_s
        return self._devices * (each + c.launch_s)

    def collective_s(self, one: Collective, mesh: MeshShape) -> float:
        """Seconds of one execution of a collective on a mesh."""
        if one.group_size <= 1:
            return 0.0
        if self._network is not None:
            spans = self._network.spans(one.mesh_axes, one.group_size, mesh, one.members)
            return collective_s(one.kind, spans, one.bytes)
        links = self._links.get(one.kind) or self._links.get("all_gather")
        if not links:
            return 0.0
        # Between two measured group sizes both constants are taken to be linear in the size.
        sizes, latencies, per_bytes = links
        latency = float(np.interp(one.group_size, sizes, latencies))
        per_byte = float(np.interp(one.group_size, sizes, per_bytes))
        turns = one.arrays if self.constants.one_by_one else 1
        return latency * turns + per_byte * one.bytes

    def collectives_s(self, collectives: Iterable[Collective], mesh: MeshShape) -> float:
        return sum(self.collective_s(c, mesh) * c.count for c in collectives)


class MeshPrices:
    """The same model for programs compiled for one mesh, as `hlo.timeline` asks it.

    Args:
      step_bytes: what a device touches in a step; None for more than the caches hold.
    """

    def __init__(self, cost: CostModel, mesh: MeshShape, step_bytes: float | None = None):
        self._cost, self._mesh, self._step_bytes = cost, mesh, step_bytes

    def kernel_s(self, work: Work, turn_bytes: float | None) -> float:
        known = [one for one in (self._step_bytes, turn_bytes) if one is not None]
        return self._cost.kernel_s(work, min(known, default=None))

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
