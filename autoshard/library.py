"""What XLA:CPU hands to its library with each reduction of one array.

The library makes one kernel of a reduction, of what only that needs, and of what comes after it
while nothing else needs what it is made of (xla/backends/cpu/transforms/library_rewriter.cc and
ynn_matcher.h; `ynn_fusion` in the compiled text): of a softmax, for one, all but the quotients, or
all of it. What else it needs is in memory before: `docs/decisions/0055-what-is-computed-again.md`.
"""

from autoshard.operations import BROADCAST, FREE, HEAVY, MOVES, Operations

_KEPT_APART = MOVES | frozenset(
    "stablehlo." + n
    for n in [
        "atan2",
        "cbrt",
        "clamp",
        "compare",
        "cosine",
        "remainder",
        "round_nearest_afz",
        "select",
        "sine",
        "tan",
    ]
)
"""Operations that the library does not take along.

Of 28 functions asked of jax 0.10.2 and 0.12.0.1 on 2026-11-24, and 29 on 2026-11-28; the library of
0.12.0.1 takes cosines, sines and tangents along.
"""
_CONVERTED = frozenset({"bf16", "f32", "i8"})
"""What the library converts from and to: not f16, i1 nor i32 (both versions, 2026-11-28)."""
_LEAST = tuple(f"dense<{x}>" for x in ("0xFF800000", "0xFF80", "0xFC00", "0xFFF0000000000000"))
"""Minus infinity, as MLIR writes it of f32, bf16, f16 and f64."""
_ENOUGH = 4096  # elements; kMinElements (xla/backends/cpu/ynn_support.cc)
NONE = -1


class Library:
    """The kernels of the library in a module; none for other platforms.

    Args:
      parts: into how many arrays are divided when the compiler asks how large they are.

    Attributes:
      kernel: of each value the kernel of the library in which alone it is needed, by the value it
        writes; NONE for all others.
    """

    def __init__(self, operations: Operations, parts: int):
        self._ops = operations
        self._enough = _ENOUGH * parts
        self._exists = operations.platform == "cpu"
        self.kernel = [NONE] * len(operations.sizes)
        if not self._exists:
            return
        for v in reversed(range(len(self.kernel))):
            if not self.reduces(v) or not self.is_large(v):
                continue
            chain = self._chain(v)
            ends = self.alone_in(chain[-1])
            for one in chain:
                self.kernel[one] = chain[-1] if ends == NONE else ends

    def reduces(self, v: int) -> bool:
        """Whether a value is one that an array is reduced to, and no integers."""
        ops = self._ops
        if not self._exists or ops.op_of[v] != "stablehlo.reduce" or v in ops.unused:
            return False
        return len(ops.operands[v]) == 2 and not ops.element_of[v].startswith("i")

    def needed_by(self, v: int) -> set[int]:
        """The kernels of the library that need a value, NONE for all other kernels."""
        if not self._exists:
            return {NONE}
        found = set[int]()
        for name, user in self._ops.uses[v]:
            if name in FREE and user >= 0:  # the same array by another name
                found |= self.needed_by(user)
            else:
                found.add(self.kernel[user] if user >= 0 else NONE)
        return found

    def alone_in(self, v: int) -> int:
        """The kernel of the library in which alone a value is needed; NONE where there is none."""
        needed = self.needed_by(v)
        return needed.pop() if len(needed) == 1 else NONE

    def takes(self, v: int) -> bool:
        """Whether the library takes an operation along with a reduction."""
        ops = self._ops
        name = ops.op_of[v]
        if name == "stablehlo.convert":
            return {ops.element_of[v], ops.element_of[ops.operands[v][0]]} <= _CONVERTED
        return name != "" and name not in HEAVY and name not in FREE and name not in _KEPT_APART

    def is_large(self, v: int) -> bool:
        """Whether an operation has enough to do for the library."""
        ops = self._ops
        most = max([ops.elements[v], *(ops.elements[i] for i in ops.operands[v])])
        return most >= self._enough

    def _chain(self, v: int) -> list[int]:
        """A reduction and what the library makes of it in turn."""
        ops = self._ops
        chain, length = [v], 1
        user = self._only_user(v)
        while user >= 0:
            spreads = ops.op_of[user] == BROADCAST
            if not self._is_idle(user):
                if not self.is_large(user) or not (spreads or self.takes(user)):
                    break
                if self._divides_by(user, chain[-1]) and not self.is_large(chain[-2]):
                    break  # by few elements, whose inverses come first
            chain.append(user)
            if not spreads:
                length = len(chain)  # nothing ends in a broadcast
            user = self._only_user(user)
        return chain[:length]

    def _only_user(self, v: int) -> int:
        """The value that all uses of one go into; -1 where there are others, or none."""
        while len(set(self._ops.uses[v])) == 1:
            name, user = self._ops.uses[v][0]
            if name not in FREE or user < 0:
                return user
            v = user
        return -1

    def _is_idle(self, v: int) -> bool:
        """Whether an operation leaves elements as they are: for XLA it is not there."""
        ops = self._ops
        if ops.elements[v] != ops.elements[ops.operands[v][0]]:
            return False
        if ops.op_of[v] == "stablehlo.maximum":  # as a softmax begins it
            return any(ops.fill(i).startswith(_LEAST) for i in ops.operands[v])
        return ops.op_of[v] == BROADCAST

    def _divides_by(self, v: int, by: int) -> bool:
        """Whether a value is divided by what a broadcast makes."""
        ops = self._ops
        if ops.op_of[v] != "stablehlo.divide" or ops.op_of[by] != BROADCAST:
            return False
        return ops.unchanged(ops.operands[v][1]) == by
