"""Which values a step writes to memory, and what the kernel of each reads and executes.

Elementwise chains are taken to fuse into what consumes them, as XLA fuses them, so that only what a
kernel writes costs memory and traffic.
"""

from typing import NamedTuple

from autoshard.operations import BORDERS, FREE, HEAVY, SLICES, Operations

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
_MOST_COPIES = 3  # XLA repeats a cheap chain in a few consumers, then writes it once


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
      written: of each value whether it is written to memory rather than fused into what uses it.
    """

    def __init__(self, operations: Operations):
        self._ops = operations
        self.written = [self._is_written(v) for v in range(len(operations.sizes))]

    def kernel(self, v: int) -> tuple[dict[int, float], float, list[Transposed]]:
        """What one kernel reads (value -> part of it), its operations, and what it transposes."""
        ops = self._ops
        transposed = self._transposed(v)
        reads: dict[int, float] = {}
        flops = ops.own_flops[v]
        name = ops.op_of[v]
        if name == "stablehlo.gather":
            reads[v] = 1.0
            stack = ops.operands[v][1:]
        else:
            stack = list(ops.operands[v])
        seen: set[int] = set()
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if (
                (ops.op_of[i] in SLICES and not self.written[i])
                or self.written[i]
                or ops.op_of[i] == ""
            ):
                reads[i] = 1.0
            elif ops.op_of[i] == "sdy.sharding_constraint":
                base = i
                while ops.parents[base] >= 0:
                    base = ops.parents[base]
                if self.written[base] or ops.op_of[base] == "":
                    reads[i] = 1.0
                else:
                    stack += ops.operands[i]
            else:
                flops += ops.own_flops[i]
                transposed += self._transposed(i)
                stack += ops.operands[i]
        return reads, flops, transposed

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

    def _is_written(self, v: int) -> bool:
        """Whether a value is written to memory rather than fused into what uses it."""
        ops = self._ops
        name = ops.op_of[v]
        if name == "" or name in HEAVY:
            return True
        if name in FREE or ops.sizes[v] == 0:
            return False
        uses = self._real_uses(v)
        if name in ("stablehlo.broadcast_in_dim", "stablehlo.iota", "stablehlo.convert"):
            return any(u in BORDERS or u.endswith("return") for u in uses)
        ends = [u for u in uses if u in HEAVY or u.endswith("return")]
        ends = [u for u in ends if u != "stablehlo.reduce"]
        if ends:
            return True
        if name in _EXPENSIVE and len(uses) > 1:
            return True
        return len(uses) > _MOST_COPIES

    def _real_uses(self, v: int) -> list[str]:
        found: list[str] = []
        for name, result in self._ops.uses[v]:
            if name in FREE and result >= 0:
                found += self._real_uses(result)
            else:
                found.append(name)
        return found
