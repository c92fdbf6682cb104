"""Which values a step writes to memory, and what the kernel of each reads and executes.

What is cheap fuses into all that consumes it, as in XLA's instruction fusion, so that only what a
kernel writes costs memory and traffic: `docs/decisions/0024-fusion-repeats-what-is-cheap.md`.
"""

import heapq
from collections.abc import Collection
from typing import NamedTuple

from autoshard.operations import BORDERS, FREE, HEAVY, JOINS, SLICES, Operations

_EXPENSIVE = frozenset(
    "stablehlo." + n
    for n in [
        "exponential",
        "tanh",
        "log",
        "power",
        "rsqrt",
        "sqrt",
        "divide",
        "sine",
        "cosine",
        "logistic",
        "exponential_minus_one",
        "log_plus_one",
        "cbrt",
        "atan2",
        "tan",
        "remainder",
    ]
) | frozenset(f"chlo.{n}" for n in ["erf", "erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh"])
CHEAP_DIVISION = ("cuda", "rocm", "tpu")
"""Platforms on which quotients are computed again wherever they are needed.

On GPUs so by xla/backends/gpu/transforms/instruction_fusion.cc; taken to hold of TPUs, too.
"""
_MOST_COPIES = 15  # kAllowedCodeDuplication (xla/service/fusion_node_indexing_evaluation.cc)
_REPEATED = FREE | {"stablehlo.broadcast_in_dim", "stablehlo.convert", "stablehlo.iota"}
"""Operations that are computed wherever they are needed."""
_MOVES = (
    SLICES
    | JOINS
    | {"stablehlo.broadcast_in_dim", "stablehlo.reduce", "stablehlo.reverse", "stablehlo.transpose"}
)
"""Operations that need other places of their operands than of what they make."""


_PRODUCT = "stablehlo.dot_general"


class Transposed(NamedTuple):
    """A value that a kernel transposes.

    Attributes:
      product: the product that makes it just so, unless its parts are summed over devices; else -1.
    """

    value: int
    product: int


class Fusion:
    """What fuses in a module.

    Attributes:
      written: of each value whether it is written to memory rather than fused into all that use it.
    """

    def __init__(self, operations: Operations):
        self._ops = operations
        cheap = {"stablehlo.divide"} if operations.platform in CHEAP_DIVISION else set()
        self._expensive = _EXPENSIVE - cheap
        count = len(operations.sizes)
        self.written = [True] * count
        # By kernel that computes a value itself: the values at whose places it is needed there.
        # Code that computes a value is shared by all that need it at the same places
        # (xla/service/fusion_node_indexing_evaluation.cc).
        self._fused: list[dict[int, frozenset[int]]] = [{} for _ in range(count)]
        self._copies: dict[tuple[int, int], int] = {}  # of a value's code in a kernel
        for v in reversed(range(count)):  # what uses a value comes after it
            asked = self._asked(v)
            self.written[v] = self._is_written(v, asked)
            if not self.written[v]:
                self._fuse(v, asked)

    def kernel(self, v: int) -> tuple[dict[int, float], float, list[Transposed]]:
        """What one kernel reads (value -> part of it), its operations, and what it transposes."""
        ops = self._ops
        transposed = self._transposed(v)
        flops = ops.own_flops[v]
        reads: dict[int, float] = {}
        gathers = ops.op_of[v] == "stablehlo.gather"
        if gathers:
            reads[v] = 1.0
        parts = dict.fromkeys(ops.operands[v][gathers:], 1.0)
        waiting = [-i for i in parts]
        heapq.heapify(waiting)
        while waiting:
            i = -heapq.heappop(waiting)  # what needs it here comes after it, and was there before
            part = min(1.0, parts[i])
            if self._is_read(i, v):
                reads[i] = part
                continue
            flops += part * ops.own_flops[i]
            transposed += self._transposed(i)
            slices = ops.op_of[i] in SLICES
            for operand in ops.operands[i]:
                if operand not in parts:
                    heapq.heappush(waiting, -operand)
                before = parts.get(operand, 0.0)
                if slices:  # each needs other elements
                    parts[operand] = before + part * ops.elements[i] / max(
                        ops.elements[operand], 1.0
                    )
                else:
                    parts[operand] = max(before, part)
        return reads, flops, transposed

    def _is_read(self, v: int, kernel: int) -> bool:
        """Whether a kernel that needs a value finds it, or what it is a part of, in memory."""
        ops = self._ops
        if self.written[v] or ops.op_of[v] == "":
            return kernel not in self._fused[v]
        if ops.op_of[v] not in SLICES and ops.op_of[v] != "sdy.sharding_constraint":
            return False
        whole = ops.operands[v][0]
        while ops.op_of[whole] in FREE and ops.operands[whole]:
            whole = ops.operands[whole][0]
        return self.written[whole] and kernel not in self._fused[whole]

    def _asked(self, v: int) -> dict[int, frozenset[int]]:
        """The kernels that would compute a value, and at the places of which values."""
        asked: dict[int, frozenset[int]] = {}
        for _, user in self._ops.uses[v]:
            if user < 0:
                continue
            moves = self._ops.op_of[user] in _MOVES
            kernels = dict(self._fused[user])
            if self.written[user]:
                kernels[user] = frozenset((user,))
            for kernel, places in kernels.items():
                own = frozenset((user,)) if moves else places
                asked[kernel] = asked.get(kernel, frozenset()) | own
        return asked

    def _fuse(self, v: int, asked: dict[int, frozenset[int]]) -> None:
        """Fuses a value into the kernels in which its code stands not too often."""
        name = self._ops.op_of[v]
        for kernel, places in asked.items():
            copies = sum(self._copies.get((kernel, place), 1) for place in places)
            if name not in _REPEATED and copies > (1 if name in JOINS else _MOST_COPIES):
                self.written[v] = True
            else:
                self._fused[v][kernel] = places
                self._copies[kernel, v] = copies

    def _transposed(self, v: int) -> list[Transposed]:
        """What an operation transposes; no matrix that only products read, either way."""
        ops = self._ops
        found = ops.transposed.get(v, ())
        product = -1
        if found and ops.op_of[v] == "stablehlo.transpose" and ops.is_matrix(v):
            if set(self._real_uses(v)) == {_PRODUCT}:
                return []
            (made,) = ops.operands[v]
            product = made if ops.op_of[made] == _PRODUCT else -1
        return [Transposed(value=value, product=product) for value in found]

    def _is_written(self, v: int, asked: Collection[int]) -> bool:
        """Whether a value is written to memory, however often it would be computed.

        Args:
          asked: the kernels that would compute it.
        """
        ops = self._ops
        name = ops.op_of[v]
        if name == "" or name in HEAVY:
            return True
        if name in FREE or ops.sizes[v] == 0:
            return False
        uses = self._real_uses(v)
        if name in _REPEATED:
            return any(u in BORDERS or u.endswith("return") for u in uses)
        if any((u in HEAVY or u.endswith("return")) and u != "stablehlo.reduce" for u in uses):
            return True
        return name in self._expensive and len(asked) > 1

    def _real_uses(self, v: int) -> list[str]:
        found: list[str] = []
        for name, result in self._ops.uses[v]:
            if name in FREE and result >= 0:
                found += self._real_uses(result)
            else:
                found.append(name)
        return found
