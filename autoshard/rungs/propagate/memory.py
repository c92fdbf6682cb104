"""What a device holds at a time: buffers, their live ranges, and the peak under one layout.

Live ranges as in XLA's buffer assignment (`xla/hlo/analysis/alias_analysis`,
`xla/service/copy_insertion`): the operand, the carried value inside and the result of a `while` are
one buffer. A value handed to a loop and not used afterwards gives its buffer away; one that the
loop only reads is not copied at all. What an iteration returns is written over what it was given,
where that is not needed any more.

Not modelled: packing (fragmentation), and copies that XLA inserts and then fails to remove.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.compat.shardy.stablehlo import MANUAL
from autoshard.rungs.propagate.kernels import Kernels, updates_in_place
from autoshard.rungs.propagate.operations import BORDERS, HEAVY, UPDATE, Loop, Operations

_PASSES_ON = BORDERS | {"stablehlo.optimization_barrier"}
_JOINS = frozenset({"stablehlo.concatenate", "stablehlo.pad"})


class Received(NamedTuple):
    """A buffer beside the values, which a collective writes: bytes, between two positions."""

    first: int
    last: int
    bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Buffers of one module as arrays; `n` values.

    Attributes:
      buffer: (n,) the value whose buffer a value lies in; its own number where it has its own.
      live_from, live_to: (n,) positions between which a buffer is needed; -1, -1 for none. Those of
        a constraint count where a layout makes it another array than what it constrains.
      parents: (n,) for a constraint's value the value it constrains, else -1.
      length: the last position.
    """

    buffer: np.ndarray
    live_from: np.ndarray
    live_to: np.ndarray
    parents: np.ndarray
    length: int

    def peak(self, local: np.ndarray, received: Iterable[Received]) -> float:
        """Largest sum of live buffers over the step, bytes; arguments not included.

        Args:
          local: (n,) bytes that a device has of each value.
        """
        change = np.zeros(self.length + 2)
        sizes, live_to = self.sized(local)
        held = self.live_from >= 0
        np.add.at(change, self.live_from[held], sizes[held])
        np.add.at(change, live_to[held] + 1, -sizes[held])
        for first, last, bytes_ in received:
            change[first] += bytes_
            change[min(last + 1, len(change) - 1)] -= bytes_
        return float(np.cumsum(change).max(initial=0.0))

    def sized(self, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of each buffer, that of the largest value in it; position of its last need).

        A constraint that keeps the size of what it constrains is the same array. Else it is another
        one, and what it constrains is needed no longer than until then.
        """
        bytes_ = np.where(np.isfinite(local), local, 0.0)
        sizes = np.zeros(len(local))
        np.maximum.at(sizes, self.buffer, bytes_)
        live_to = self.live_to.copy()
        constraints = np.flatnonzero(self.parents >= 0)
        parents = self.parents[constraints]
        same = bytes_[constraints] == bytes_[parents]
        sizes[constraints[same]] = 0.0
        kept = self.buffer[parents]
        for c, buffer, one in zip(
            constraints[::-1].tolist(), kept[::-1].tolist(), same[::-1].tolist(), strict=True
        ):
            until = live_to[c] if one else self.live_from[c]
            live_to[buffer] = max(live_to[buffer], until)
        return sizes, live_to


def find_buffers(ops: Operations, kernels: Kernels, state_count: int) -> Buffers:
    """The buffers of a module; those of the new state lie in the donated ones of the old.

    Args:
      state_count: how many of the first results are the new state.
    """
    written, count = kernels.written, len(ops.sizes)
    touches: list[list[int]] = [[] for _ in range(count)]
    for v in range(count):
        if written[v] or ops.op_of[v] in _PASSES_ON:
            for i in ops.operands[v]:
                _touch(ops, touches, written, i, ops.position_of[v])
    for v in ops.returned[state_count:]:  # whoever asked for it takes it when all is done
        _touch(ops, touches, written, v, ops.length)
    buffer, last = assign(
        Values(
            position=ops.position_of,
            written=written,
            argument=[op == "" for op in ops.op_of],
            constraint=[parent >= 0 for parent in ops.parents],
            source=[
                -1
                if ops.op_of[v] == UPDATE and not updates_in_place(ops, written, v)
                else ops.source(v)
                for v in range(count)
            ],
            elementwise=[op not in HEAVY and op not in _JOINS for op in ops.op_of],
            touches=touches,
        ),
        ops.loops,
    )
    aliased = set(ops.returned[:state_count])
    for i in list(aliased):
        while ops.parents[i] >= 0 or ops.op_of[i] == MANUAL:
            i = ops.source(i)
            aliased.add(i)
    live_from, live_to = np.full(count, -1), np.full(count, -1)
    for v in range(count):
        if v in aliased or ops.op_of[v] == "" or buffer[v] != v:
            continue
        if written[v] or ops.parents[v] >= 0:
            live_from[v] = ops.position_of[v]
            live_to[v] = max(last[v], ops.position_of[v])
    return Buffers(
        buffer=np.array(buffer, dtype=int),
        live_from=live_from,
        live_to=live_to,
        parents=np.array(ops.parents, dtype=int),
        length=ops.length + 2,
    )


def _touch(
    ops: Operations, touches: list[list[int]], written: list[bool], v: int, position: int
) -> None:
    """Notes that whatever buffers a value is read from are needed at a position."""
    stack, seen = [v], set()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        touches[i].append(position)
        if not written[i] and ops.parents[i] < 0:
            stack += ops.operands[i]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What buffers depend on, for each value by number.

    Attributes:
      position: of the operation that makes it.
      written: whether it is written to memory at all.
      argument: whether it is an argument of the step.
      constraint: whether it is a constraint's: the same array as what it constrains, or another,
        as a layout decides.
      source: the value whose buffer it lies in: what a constraint, a reshape or an update in place
        is made of; -1 where it has its own.
      elementwise: whether it may be written over an operand of the same size.
      touches: positions at which it is read, in any order.
    """

    position: Sequence[int]
    written: Sequence[bool]
    argument: Sequence[bool]
    constraint: Sequence[bool]
    source: Sequence[int]
    elementwise: Sequence[bool]
    touches: Sequence[Sequence[int]]


def assign(values: Values, loops: Sequence[Loop]) -> tuple[list[int], list[int]]:
    """(buffer of each value, named by the value that makes it; position of the last need of each).

    A buffer's last need stands at the value that names it. Constraints name buffers of their own,
    whose needs are not those of what they constrain; what is decided about loops takes them for
    the same.
    """
    count = len(values.position)
    shared = list(range(count))

    def buffer_of(v: int, through_constraints: bool) -> int:
        while True:
            if values.constraint[v] and not through_constraints:
                return v
            up = values.source[v] if values.source[v] >= 0 else shared[v]
            if up == v:
                return v
            v = up

    touches: list[list[int]] = [[] for _ in range(count)]
    last = [0] * count
    for v in range(count):
        if values.touches[v]:
            touches[buffer_of(v, True)] += values.touches[v]
            own = buffer_of(v, False)
            last[own] = max(last[own], *values.touches[v])
    needed = [max(read, default=0) for read in touches]
    for read in touches:
        read.sort()
    for loop in loops:
        for carry in loop.carries:
            last[carry] = max(last[carry], loop.end)
            needed[carry] = max(needed[carry], loop.end)

    def share(v: int, other: int) -> None:
        """Puts the buffer named by v into that of another value."""
        shared[v] = buffer_of(other, False)
        last[shared[v]] = max(last[shared[v]], last[v])
        root = buffer_of(other, True)
        needed[root] = max(needed[root], needed[v])

    outer_first = sorted(loops, key=lambda loop: loop.start)
    for loop in outer_first:
        given: set[int] = set()
        for carry, initial, returned in zip(loop.carries, loop.initial, loop.returned, strict=True):
            root = buffer_of(initial, True)
            if not values.written[root]:
                continue
            if returned == carry or values.argument[root]:
                share(carry, initial)
            elif needed[root] <= loop.start and root not in given:
                given.add(root)
                share(carry, initial)
    for loop in outer_first:
        for carry, returned in zip(loop.carries, loop.returned, strict=True):
            made = buffer_of(returned, True)
            if not loop.start < values.position[made] <= loop.end or not values.written[made]:
                continue
            if made == buffer_of(carry, True):
                continue
            before = bisect.bisect_right(touches[carry], loop.end)
            until = touches[carry][before - 1] if before else 0
            at = values.position[made]
            if until < at or (until == at and values.elementwise[made]):
                share(made, carry)
            else:
                kept = buffer_of(returned, False)
                last[kept] = max(last[kept], loop.end)
    return [buffer_of(v, False) for v in range(count)], last
