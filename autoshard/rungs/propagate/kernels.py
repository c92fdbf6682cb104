"""The kernels of a step, before any layout: what is written to memory, what each kernel reads.

Elementwise operations fuse into what takes them. A value is written where a heavy operation needs
it, where it leaves the step or a loop, and where several kernels need it; what is cheap (a
broadcast, a cast) is computed again instead. A layout changes how far each value is divided:
`local_shapes` fills that in.

Not modelled: fusion by a compiler's own cost model, several results of one fusion, caches.
"""

import dataclasses
import heapq

import numpy as np

from autoshard.rungs.propagate.operations import (
    BORDERS,
    BROADCAST,
    FREE,
    HEAVY,
    SLICES,
    UPDATE,
    Operations,
)

_CHEAP = frozenset({BROADCAST, "stablehlo.convert", "stablehlo.iota"})
"""Operations that are computed wherever they are needed."""
_NO_KERNELS = BORDERS | {"", "stablehlo.case", "stablehlo.if"}
_TAKEN = BORDERS | {"stablehlo.return", "func.return", "sdy.return"}
"""What takes values as they lie in memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one module as arrays; `n` values, `k` kernels, `r` reads.

    Attributes:
      written: of each value whether it is written to memory.
      value: (k,) the value a kernel writes.
      flops: (k,) floating-point operations if nothing is sharded, fused chains included.
      trips: (k,) how often it runs in a step.
      writes: (k,) 1 if it writes its whole value, 0 if it updates in place.
      dtypes: (k,) of a product's or convolution's operands, such as `bf16`, with how precisely it
        multiplies (`precision.effective_matmul_dtype`); else "".
      read_kernel, read_value: (r,) which kernel reads which value.
      read_scale: (r,) part of the value that is read.
    """

    written: list[bool]
    value: np.ndarray
    flops: np.ndarray
    trips: np.ndarray
    writes: np.ndarray
    dtypes: tuple[str, ...]
    read_kernel: np.ndarray
    read_value: np.ndarray
    read_scale: np.ndarray

    def traffic(self, local: np.ndarray) -> np.ndarray:
        """(k,) bytes that each kernel reads and writes.

        Args:
          local: (n,) bytes that a device has of each value.
        """
        read = np.bincount(
            self.read_kernel,
            weights=local[self.read_value] * self.read_scale,
            minlength=len(self.value),
        )
        return local[self.value] * self.writes + read


def find_kernels(ops: Operations) -> Kernels:
    """What fuses in a module, and what is a kernel."""
    written = _written(ops)
    value: list[int] = []
    flops: list[float] = []
    writes: list[float] = []
    reads: list[tuple[int, int, float]] = []
    for v, is_written in enumerate(written):
        if not is_written or ops.op_of[v] in _NO_KERNELS:
            continue
        k = len(value)
        value.append(v)
        if updates_in_place(ops, written, v):
            reads.append((k, ops.operands[v][1], 2.0))  # and writes as much
            flops.append(0.0)
            writes.append(0.0)
            continue
        read, fused = _kernel(ops, written, v)
        reads += [(k, i, scale) for i, scale in read.items()]
        flops.append(fused)
        writes.append(1.0)
    kernel, of, scale = zip(*reads, strict=True) if reads else ((), (), ())
    return Kernels(
        written=written,
        value=np.array(value, dtype=int),
        flops=np.array(flops),
        trips=np.array([ops.trip_of[v] for v in value]),
        writes=np.array(writes),
        dtypes=tuple(ops.dtype_of.get(v, "") for v in value),
        read_kernel=np.array(kernel, dtype=int),
        read_value=np.array(of, dtype=int),
        read_scale=np.array(scale),
    )


def updates_in_place(ops: Operations, written: list[bool], v: int) -> bool:
    """Whether a value is another one with a part overwritten, which lies in memory."""
    return ops.op_of[v] == UPDATE and written[ops.unchanged(ops.operands[v][0])]


def _written(ops: Operations) -> list[bool]:
    """Of each value whether it is written to memory rather than fused into what takes it."""
    count = len(ops.sizes)
    written = [False] * count
    kernels_of: list[set[int]] = [set() for _ in range(count)]
    for v in reversed(range(count)):  # what uses a value comes after it
        name = ops.op_of[v]
        users = _users(ops, v)
        for _, user in users:
            if user >= 0:
                kernels_of[v] |= {user} if written[user] else kernels_of[user]
        if name == "" or name in HEAVY:
            written[v] = v not in ops.unused
        elif name in FREE or v in ops.unused or not ops.sizes[v]:
            continue
        elif name in _CHEAP:
            written[v] = any(taker in _TAKEN for taker, _ in users)
        else:
            heavy = any(
                taker in _TAKEN or (taker in HEAVY and taker != "stablehlo.reduce")
                for taker, _ in users
            )
            written[v] = heavy or len(kernels_of[v]) > 1
    return written


def _users(ops: Operations, v: int) -> list[tuple[str, int]]:
    """(operation, the value it makes or -1) of all that take a value by this or another name."""
    found: list[tuple[str, int]] = []
    for name, user in ops.uses[v]:
        if name in FREE and user >= 0:
            found += _users(ops, user)
        else:
            found.append((name, user))
    return found


def _kernel(ops: Operations, written: list[bool], v: int) -> tuple[dict[int, float], float]:
    """What one kernel reads (value -> part of it), and its operations."""
    flops = ops.own_flops[v]
    reads: dict[int, float] = {}
    operands = ops.operands[v]
    if ops.op_of[v] == "stablehlo.gather":  # reads of its table what it makes
        reads[v], operands = 1.0, operands[1:]
    parts: dict[int, float] = {}
    waiting: list[int] = []
    _need(ops, v, operands, 1.0, parts, waiting)
    while waiting:
        i = -heapq.heappop(waiting)  # what needs it comes after it, and was there before
        whole = ops.unchanged(ops.operands[i][0]) if ops.op_of[i] in SLICES else i
        if written[i] or (whole != i and written[whole]):
            reads[i] = parts[i]
            continue
        flops += parts[i] * ops.own_flops[i]
        _need(ops, i, ops.operands[i], parts[i], parts, waiting)
    return reads, flops


def _need(
    ops: Operations,
    v: int,
    operands: list[int],
    part: float,
    parts: dict[int, float],
    waiting: list[int],
) -> None:
    """Adds what part of a value needs of its operands."""
    for i in operands:
        if i not in parts:
            heapq.heappush(waiting, -i)
        if ops.op_of[v] in SLICES:  # each slice needs other elements
            cut = ops.elements[v] / max(ops.elements[i], 1.0)
            parts[i] = min(1.0, parts.get(i, 0.0) + part * cut)
        else:
            parts[i] = max(parts.get(i, 0.0), part)
