"""Which values a step writes to memory, and what the kernel of each reads and executes.

What is cheap fuses into all that consumes it, as in XLA's instruction fusion, so that only what a
kernel writes costs memory and traffic: `docs/decisions/0024-fusion-repeats-what-is-cheap.md`,
`docs/decisions/0025-what-fusion-does-not-repeat.md`,
`docs/decisions/0055-what-is-computed-again.md`.
"""

import heapq
from collections.abc import Collection, Mapping
from typing import NamedTuple

from autoshard.buffers import innermost
from autoshard.cache_lines import Turn
from autoshard.library import NONE, Library
from autoshard.operations import (
    BORDERS,
    BROADCAST,
    FREE,
    HEAVY,
    JOINS,
    MOVES,
    SLICES,
    UPDATE,
    Operations,
)
from autoshard.pooling import POOLED, pooled_reads

_EXPENSIVE = frozenset(
    "stablehlo." + n
    for n in [
        "atan2",
        "cbrt",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "power",
        "remainder",
        "rsqrt",
        "sqrt",
        "tanh",
    ]
) | frozenset(f"chlo.{n}" for n in ["cosh", "digamma", "erf", "erf_inv", "erfc", "lgamma", "sinh"])
"""Operations that are computed once and written where several kernels need them.

Asked of XLA:CPU (jax 0.10.2 and 0.12.0.1, 2026-11-24) with one small program for each.
"""
_EXPENSIVE_ON_CPU = _EXPENSIVE | {"stablehlo.divide"}
_EXPENSIVE_ELSEWHERE = _EXPENSIVE | {"stablehlo.cosine", "stablehlo.sine", "stablehlo.tan"}
_MOST_COPIES = 15  # kAllowedCodeDuplication (xla/service/fusion_node_indexing_evaluation.cc)
_CONVERT = "stablehlo.convert"
_REPEATED = FREE | {BROADCAST, _CONVERT, "stablehlo.iota"}
"""Operations that are computed wherever they are needed."""
_PRODUCT = "stablehlo.dot_general"
_COPYING = frozenset({_PRODUCT, "stablehlo.convolution"})
"""Operations whose operands XLA:CPU copies where they lie in another order than it needs."""
_CONSTRAINT = "sdy.sharding_constraint"
_NOWHERE = frozenset[int]()


class Transposed(NamedTuple):
    """A value that a kernel transposes.

    Attributes:
      product: the product that makes it just so, unless its parts are summed over devices; else -1.
      arrays: how many of its size are read for it, each across cache lines.
      turn: from which order to which.
    """

    value: int
    product: int
    arrays: int
    turn: Turn


class Paths:
    """Which values lie on the ways from a value through its users, and behind which of them memory.

    Values are added after all that use them. Sets of values are the bits of integers.

    Args:
      count: of values.
    """

    def __init__(self, count: int):
        self._after = [0] * count
        self._behind = [0] * count

    def add(self, v: int, users: Mapping[int, bool]) -> None:
        """Adds a value.

        Args:
          users: what is made of it -> whether it is computed where that is.
        """
        for user, fuses in users.items():
            there = self._after[user] | 1 << user
            self._after[v] |= there
            self._behind[v] |= self._behind[user] if fuses else there

    def lead_over_memory(self, users: Collection[int]) -> bool:
        """Whether one of these is made of another, too, by way of what is read from memory."""
        behind = these = 0
        for user in users:
            behind |= self._behind[user]
            these |= 1 << user
        return bool(behind & these)


class Fusion:
    """What fuses in a module.

    Args:
      parts: into how many arrays are divided where XLA:CPU asks how large they are.

    Attributes:
      written: of each value whether it is written to memory rather than fused into all that use it.
    """

    def __init__(self, operations: Operations, parts: int = 1):
        self._ops = operations
        self._by_cost = operations.platform != "cpu"
        self._expensive = _EXPENSIVE_ELSEWHERE if self._by_cost else _EXPENSIVE_ON_CPU
        count = len(operations.sizes)
        self.written = [True] * count
        # By kernel that computes a value itself: the values at whose places it is needed there.
        # Code that computes a value is shared by all that need it at the same places
        # (xla/service/fusion_node_indexing_evaluation.cc).
        self._fused: list[dict[int, frozenset[int]]] = [{} for _ in range(count)]
        self._copies: dict[tuple[int, int], int] = {}  # of a value's code in a kernel
        self._library = Library(operations, parts)
        paths = Paths(count)
        for v in reversed(range(count)):  # what uses a value comes after it
            asked = self._asked(v)
            if self._handed(v) == NONE and self._library.takes(v):
                self._library.kernel[v] = self._library.alone_in(v)
            users = self._users(v)
            self.written[v] = self._is_written(v, asked, self._library.needed_by(v)) or (
                paths.lead_over_memory(users) and self._is_counted(v) and self._adds_reads(v)
            )
            if not self.written[v]:
                self._fuse(v, asked)
            elif self._is_duplicated(v):
                self._fuse(v, {k: places for k, places in asked.items() if self._is_loop(k)})
            paths.add(v, {user: self._fuses_into(v, user) for user in users})
        self._copied_fills = self._fills_of_the_same()

    def kernel(self, v: int) -> tuple[dict[int, float], float, list[Transposed]]:
        """What one kernel reads (value -> part of it), its operations, and what it transposes."""
        ops = self._ops
        transposed = self._transposed(v, v)
        flops = ops.own_flops[v]
        reads: dict[int, float] = {}
        gathers = ops.op_of[v] == "stablehlo.gather"
        if gathers:
            reads[v] = 1.0
        parts: dict[int, float] = {}
        self._ask(v, 1.0, ops.operands[v][gathers:], parts)
        waiting = [-i for i in parts]
        heapq.heapify(waiting)
        while waiting:
            i = -heapq.heappop(waiting)  # what needs it here comes after it, and was there before
            part = min(1.0, parts[i])
            if self.is_read(i, v):
                reads[i] = part
                continue
            flops += part * ops.own_flops[i]
            transposed += self._transposed(i, v)
            for operand in ops.operands[i]:
                if operand not in parts:
                    heapq.heappush(waiting, -operand)
            self._ask(i, part, ops.operands[i], parts)
        if self.copies(v):
            turned = {self._plain(t.value) for t in transposed}
            for operand in list(reads):
                if self._plain(operand) in turned and self._is_there(self._plain(operand)):
                    self._copy(operand, reads)
        if ops.op_of[v] == POOLED and not self._by_cost:
            self._look_up(v, reads)
        if v in self._copied_fills:
            reads[v] = 1.0
        return reads, flops, transposed

    def summed_product(self, v: int) -> int:
        """The product of two arrays that a kernel of XLA:CPU makes and sums over one dimension.

        -1 where it does nothing of the kind. See `degenerate`.
        """
        ops = self._ops
        if self._by_cost or v not in ops.summed:
            return -1
        made = ops.operands[v][0]
        while ops.parents[made] >= 0:
            made = ops.parents[made]
        if ops.op_of[made] != "stablehlo.multiply" or self.is_read(made, v):
            return -1
        factors = set(ops.operands[made])
        return -1 if len(factors) < 2 or any(map(ops.is_fill, factors)) else made

    def updates_in_place(self, v: int) -> bool:
        """Whether a value is another one with a part overwritten; not of what is never in memory.

        What fills an array, or casts another one, fuses with the update: the whole is written.
        """
        ops = self._ops
        return ops.op_of[v] == UPDATE and self.written[self._plain(ops.operands[v][0])]

    def copies(self, v: int) -> bool:
        """Whether a kernel is one for which XLA:CPU copies operands that lie in another order."""
        return not self._by_cost and self._ops.op_of[v] in _COPYING

    def ready(self, v: int) -> int:
        """From which position on all is there that the kernel of a value reads."""
        v = self._plain(v)
        reads = self.kernel(v)[0] if self._ops.op_of[v] else ()
        return max((self._ops.position_of[i] for i in reads), default=self._ops.position_of[v])

    def is_copied(self, v: int) -> bool:
        """Whether what a product needs transposed is in memory as it is, too, while that runs."""
        made = self._plain(v)
        return self._is_there(made) and not self._is_duplicated(made)

    def _copy(self, v: int, reads: dict[int, float]) -> None:
        """Adds to what a product reads what the copy of an operand does, and what it writes."""
        made = self._plain(v)
        copied = self.kernel(made)[0] if self._is_duplicated(made) else {v: 1.0}
        reads[v] += 1.0
        for i, part in copied.items():
            reads[i] = reads.get(i, 0.0) + part

    def _fills_of_the_same(self) -> set[int]:
        """Arrays that are copies of one that a constant fills just so.

        XLA:CPU fills one, and copies it for each further loop or carry that it begins with.
        """
        ops = self._ops
        first: dict[tuple[object, ...], int] = {}
        copied = set[int]()
        for v, written in enumerate(self.written):
            if self._by_cost or not written or ops.op_of[v] != BROADCAST or not ops.fill(v):
                continue
            loop = innermost(ops.loops, ops.position_of[v])
            kind = (ops.fill(v), ops.dims[v], ops.sizes[v], loop)
            if first.setdefault(kind, v) != v:
                copied.add(v)
        return copied

    def _look_up(self, v: int, reads: dict[int, float]) -> None:
        """Adds to what the gradient of a pool reads what looking up the places does."""
        ops = self._ops
        pooled, gradient = ops.operands[v][:2]
        element_bytes = ops.sizes[pooled] / max(ops.elements[pooled], 1.0)
        more = pooled_reads(len(ops.dims[pooled]), element_bytes)
        for i, times in zip((pooled, gradient), more, strict=True):
            reads[i] = reads.get(i, 0.0) + times

    def _ask(self, v: int, part: float, operands: list[int], parts: dict[int, float]) -> None:
        """Adds to the parts of values that a kernel needs what part of a value needs of them."""
        slices = self._ops.op_of[v] in SLICES
        for operand in operands:
            before = parts.get(operand, 0.0)
            if slices:  # each needs other elements
                cut = self._ops.elements[v] / max(self._ops.elements[operand], 1.0)
                parts[operand] = before + part * cut
            else:
                parts[operand] = max(before, part)

    def _plain(self, v: int) -> int:
        """The value that operations which cost nothing made this one of."""
        ops = self._ops
        while ops.op_of[v] in FREE and ops.operands[v]:
            v = ops.operands[v][0]
        return v

    def _is_there(self, v: int) -> bool:
        """Whether what a product needs transposed is in memory before, as others need it."""
        name = self._ops.op_of[v]
        if name == "" or name in HEAVY or self._handed(v) != NONE:
            return True
        return len(self._real_uses(v)) > 1

    def is_read(self, v: int, kernel: int) -> bool:
        """Whether a kernel that needs a value finds it, or what it is a part of, in memory."""
        ops = self._ops
        if self.written[v]:
            return kernel not in self._fused[v]
        if ops.op_of[v] not in SLICES and ops.op_of[v] != _CONSTRAINT:
            return False
        whole = self._plain(ops.operands[v][0])
        return self.written[whole] and kernel not in self._fused[whole]

    def _asked(self, v: int) -> dict[int, frozenset[int]]:
        """The kernels that would compute a value, and at the places of which values."""
        asked: dict[int, frozenset[int]] = {}
        for _, user in self._ops.uses[v]:
            if user < 0:
                continue
            alone = frozenset((user,))
            moves = self._ops.op_of[user] in MOVES
            if self.written[user]:
                asked[user] = asked.get(user, _NOWHERE) | alone
            for kernel, places in self._fused[user].items():
                asked[kernel] = asked.get(kernel, _NOWHERE) | (alone if moves else places)
        return asked

    def _handed(self, v: int) -> int:
        """The kernel of the library in which alone a value is needed; NONE where there is none."""
        return self._library.kernel[v]

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

    def _transposed(self, v: int, kernel: int) -> list[Transposed]:
        """What an operation of a kernel transposes; no matrix that products alone read."""
        ops = self._ops
        found = ops.transposed.get(v, {})
        product = -1
        if found and ops.op_of[v] == "stablehlo.transpose" and ops.is_matrix(v):
            if set(self._real_uses(v)) == {_PRODUCT}:
                return []
            (made,) = ops.operands[v]
            product = made if ops.op_of[made] == _PRODUCT else -1
        copies = ops.op_of[v] in _COPYING
        return [
            Transposed(
                value=value,
                product=product,
                arrays=self._made_of(value) if copies else self._arrays(ops.operands[v], kernel),
                turn=turn,
            )
            for value, turn in found.items()
        ]

    def _made_of(self, v: int) -> int:
        """How many arrays the copy of what a product needs reads: what makes it fuses into it."""
        made = self._plain(v)
        name = self._ops.op_of[made]
        if name == "" or name in HEAVY or name in MOVES or self._handed(made) != NONE:
            return 1
        return self._arrays(self._ops.operands[made], made)

    def _arrays(self, values: list[int], kernel: int) -> int:
        """How many arrays of the size of values a kernel reads to make them, place by place."""
        ops = self._ops
        most = max((ops.elements[v] for v in values), default=0.0)
        stack, seen, found = list(values), set[int](), 0
        while stack:
            i = stack.pop()
            if i in seen or ops.elements[i] != most or ops.is_fill(i):
                continue
            seen.add(i)
            if self.is_read(i, kernel):
                found += 1
            elif ops.op_of[i] not in MOVES:
                stack += ops.operands[i]
        return max(found, 1)

    def _is_written(self, v: int, asked: Collection[int], libraries: Collection[int]) -> bool:
        """Whether a value is written to memory, however often it would be computed.

        Args:
          asked: the kernels that would compute it.
          libraries: `Library.needed_by` of it.
        """
        ops = self._ops
        name = ops.op_of[v]
        if v in ops.unused:
            return False
        if self._handed(v) != NONE:
            return self._handed(v) == v
        if name == "" or name in HEAVY:
            return True
        if name in FREE or ops.sizes[v] == 0:
            return False
        uses = self._real_uses(v)
        if name in _REPEATED:
            if any(u in BORDERS or u.endswith("return") for u in uses):
                return True
            if set(libraries) == {NONE} or ops.is_fill(v) or not self._library.is_large(v):
                return False
            if name == BROADCAST:
                return len(libraries) > 1
            return name == _CONVERT and not self._library.takes(v) and not self._is_spread(v)
        if any((u in HEAVY or u.endswith("return")) and u != "stablehlo.reduce" for u in uses):
            return True
        if set(libraries) != {NONE}:
            return True
        if len(asked) < 2:
            return False
        return self._is_expensive(v) or (self._by_cost and self._reads_more(v, len(asked)))

    def _adds_reads(self, v: int) -> bool:
        """Whether kernels that compute a value for themselves read more arrays than it is.

        XLA:CPU computes those in no kernel but one, unless they fuse into all their users on all
        paths (`ComputeGloballyUnfusible` in xla/service/instruction_fusion.cc).
        """
        ops = self._ops
        operands, rank = ops.operands[v], _true_rank(ops.dims[v])
        arrays = [i for i in operands if _true_rank(ops.dims[i]) >= rank and not self._is_filled(i)]
        return len(arrays) > 1 and sum(ops.elements[i] for i in set(operands)) > ops.elements[v]

    def _users(self, v: int) -> set[int]:
        """The values that are made of one; a constraint is the same array by another name."""
        users = set[int]()
        for name, user in self._ops.uses[v]:
            if user >= 0:
                users |= self._users(user) if name == _CONSTRAINT else {user}
        return users

    def _fuses_into(self, v: int, user: int) -> bool:
        """Whether all kernels that make what is made of a value compute that value themselves."""
        kernels = {user} if self.written[user] else self._fused[user]
        return all(kernel in self._fused[v] for kernel in kernels)

    def _is_spread(self, v: int) -> bool:
        """Whether a value is converted from a broadcast: XLA converts before it spreads."""
        while self._ops.op_of[v] == _CONVERT:
            v = self._ops.unchanged(self._ops.operands[v][0])
        return self._ops.op_of[v] == BROADCAST

    def _is_expensive(self, v: int) -> bool:
        """Whether a value is computed once and written where several kernels need it."""
        ops = self._ops
        name = ops.op_of[v]
        if name == "stablehlo.divide" and ops.is_fill(ops.operands[v][1]):
            return False  # multiplied by the inverse
        return name in self._expensive

    def _is_duplicated(self, v: int) -> bool:
        """Whether kernels compute for themselves what is written for those that cannot.

        XLA:CPU does so where that makes them read no more.
        """
        if not self._is_counted(v) or self._handed(v) != NONE or self._is_expensive(v):
            return False
        return not self._adds_reads(v)

    def _is_counted(self, v: int) -> bool:
        """Whether XLA:CPU decides by what an operation reads whether it is computed again."""
        name = self._ops.op_of[v]
        return not (self._by_cost or name == "" or name in HEAVY or name in FREE)

    def _is_filled(self, v: int) -> bool:
        """Whether an array is made of fewer elements than it has, by a broadcast or a count."""
        return self._ops.op_of[self._plain(v)] == BROADCAST or self._ops.is_fill(v)

    def _is_loop(self, kernel: int) -> bool:
        """Whether a kernel computes what it needs element by element; no library's, no update."""
        name = self._ops.op_of[kernel]
        if self._handed(kernel) != NONE:
            return False
        return name not in HEAVY or name == "stablehlo.reduce"

    def _reads_more(self, v: int, kernels: int) -> bool:
        """Whether kernels that compute a value read more than where one of them writes it."""
        made = self._ops.sizes[v]
        needed = sum(
            self._needed(operand, self._ops.elements[v]) for operand in self._ops.operands[v]
        )
        return kernels * needed > needed + made + kernels * made

    def _needed(self, v: int, elements: float) -> float:
        """Bytes in memory that so many elements of a value come from, at most."""
        ops = self._ops
        if ops.op_of[v] in _REPEATED:
            return sum(self._needed(operand, elements) for operand in ops.operands[v])
        return ops.sizes[v] * min(1.0, elements / max(ops.elements[v], 1.0))

    def _real_uses(self, v: int) -> list[str]:
        found: list[str] = []
        for name, result in self._ops.uses[v]:
            if name in FREE and result >= 0:
                found += self._real_uses(result)
            else:
                found.append(name)
        return found


def _true_rank(dims: tuple[int, ...]) -> int:
    return sum(extent != 1 for extent in dims)
