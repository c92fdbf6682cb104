"""Which values of a step share a buffer, and from where to where each buffer is needed.

Models what XLA's buffer assignment does with loops (`xla/hlo/analysis/alias_analysis`,
`xla/service/copy_insertion`): the operand, the carried value inside and the result of a `while` are
one buffer. A value handed to a loop and not used afterwards gives its buffer away; one that the
loop only reads is not copied at all. What an iteration returns is written over what it was given,
where that is not needed any more.

Not modelled: packing (fragmentation), and copies that XLA inserts and then fails to remove.
"""

import bisect
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One `while`, by value numbers.

    Attributes:
      start, end: its own position and that of the last operation of its body.
      turns: how many it takes in a step, those of loops around it counted.
      carries: its results, which also stand for what its body is given.
      initial, returned: what it starts with, and what an iteration returns, for each carry; the
        carry itself where an iteration returns what it was given.
    """

    start: int
    end: int
    turns: float
    carries: tuple[int, ...]
    initial: tuple[int, ...]
    returned: tuple[int, ...]


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


def innermost(loops: Sequence[Loop], position: int) -> int:
    """Number of the innermost loop whose body has this position; -1 where there is none."""
    around = [i for i, loop in enumerate(loops) if loop.start < position <= loop.end]
    return max(around, key=lambda i: loops[i].start, default=-1)


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
