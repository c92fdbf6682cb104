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
      carries: its results, which also stand for what its body is given.
      initial, returned: what it starts with, and what an iteration returns, for each carry; the
        carry itself where an iteration returns what it was given.
    """

    start: int
    end: int
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
      source: the value whose buffer it lies in: what a constraint, a reshape or an update in place
        is made of; -1 where it has its own.
      elementwise: whether it may be written over an operand of the same size.
      touches: positions at which it is read, ascending not required.
    """

    position: Sequence[int]
    written: Sequence[bool]
    argument: Sequence[bool]
    source: Sequence[int]
    elementwise: Sequence[bool]
    touches: Sequence[Sequence[int]]


def assign(values: Values, loops: Sequence[Loop]) -> tuple[list[int], list[int]]:
    """(buffer of each value, named by the value that makes it; position of the last need of each).

    A buffer's last need stands at the value that names it.
    """
    count = len(values.position)
    buffer = list(range(count))

    def home(v: int) -> int:
        while True:
            up = values.source[v] if values.source[v] >= 0 else buffer[v]
            if up == v:
                return v
            v = up

    touches: list[list[int]] = [[] for _ in range(count)]
    for v in range(count):
        touches[home(v)] += values.touches[v]
    for own in touches:
        own.sort()
    last = [own[-1] if own else 0 for own in touches]
    for loop in loops:
        for carry in loop.carries:
            last[carry] = max(last[carry], loop.end)

    def share(v: int, other: int) -> None:
        buffer[v] = other
        last[other] = max(last[other], last[v])

    inside_out = sorted(loops, key=lambda loop: loop.start)
    for loop in inside_out:
        given: set[int] = set()
        for carry, initial, returned in zip(loop.carries, loop.initial, loop.returned, strict=True):
            held = home(initial)
            if not values.written[held]:
                continue
            if returned == carry or values.argument[held]:
                share(carry, held)
            elif last[held] <= loop.start and held not in given:
                given.add(held)
                share(carry, held)
    for loop in inside_out:
        for carry, returned in zip(loop.carries, loop.returned, strict=True):
            made = home(returned)
            if made == home(carry) or not values.written[made] or values.argument[made]:
                continue
            if not loop.start < values.position[made] <= loop.end:
                continue
            own = touches[carry]
            until = own[bisect.bisect_right(own, loop.end) - 1] if own else 0
            at = values.position[made]
            if until < at or (until == at and values.elementwise[made]):
                share(made, home(carry))
            else:
                last[made] = max(last[made], loop.end)
    return [home(v) for v in range(count)], last
