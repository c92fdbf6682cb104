"""What a change of the densest dimension costs a loop: elements leave their cache lines.

A loop that moves elements from one densest dimension to another takes each from a cache line of its
own, one after another. Where it comes back to a line before the cache needed its place it costs
little; else the line is fetched again for its next element. Lines that lie a large power of two
apart share a few sets of the cache, as those of arrays with powers of two for extents do: a set
gives its lines away the sooner, and fetches one line after another
(`docs/decisions/0040-lines-that-a-set-fetches-again.md` and `0048-products-of-few-rows.md`).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

LINE_BYTES = 64
"""Of a cache line: x86-64, and most Arm cores."""

WAY_BYTES = 4096
"""Addresses so far apart share a set of the first cache.

That of x86-64 finds a set by what a page leaves of an address.
"""

WAYS = 8
"""Lines that a set of the first cache holds: AMD's before Zen 5. There, and in newer Intels, 12."""

FEW_LINES = 64
"""So many that the cache holds cost less than those that it does not; more, no less."""

KEPT = 0.5
"""What an element of such lines costs, where one of lines that the cache does not hold costs 1."""

CROWDING = {1: 1.5, 2: 1.0, 4: 0.25}
"""Of lines that all lie in so many sets: how much they crowd.

In units of those of the transpose that `Constants.collided_s` is of, 512 x 512 numbers of 4 bytes,
256 of which share each of two sets.
"""

CROWDED_LINES = 64
"""Of one set, from which on they crowd it fully; not at all with a fourth of them."""


class Lines(NamedTuple):
    """What becomes of the cache lines that a loop reads.

    Attributes:
      crossed: what an element costs that is the only one it takes of a line at a time, in units of
        `Constants.transposed_s`; 0 where it takes line by line, or so few that it costs no more.
      crowding: what it costs beyond, in units of what `Constants.collided_s` is beyond that.
    """

    crossed: float
    crowding: float


STAY = Lines(0.0, 0.0)


class Turn(NamedTuple):
    """The order that an array lies in, and the one that a loop reads it in, as it writes.

    Attributes:
      before, after: dimensions, the densest first; those of one element may be left out.
      bytes_each: of an element.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    bytes_each: float

    def lines(self, extents: Sequence[int], arrays: int = 1) -> Lines:
        """What becomes of the cache lines of arrays of these extents, by dimension.

        Args:
          arrays: so many that one loop reads so, whose lines share the cache.
        """
        return lines_read(self, tuple(extents), arrays)


@functools.lru_cache(maxsize=1 << 14)
def lines_read(turn: Turn, extents: tuple[int, ...], arrays: int) -> Lines:
    """`Turn.lines`, which many layouts ask of the same extents."""
    before, after = ([d for d in o if extents[d] > 1] for o in (turn.before, turn.after))
    if not after or before[0] == after[0]:
        return STAY
    # It goes over these before it comes back to a line.
    between = after[: after.index(before[0])]
    strides = (math.prod(extents[e] for e in before[: before.index(d)]) for d in between)
    loops = [
        (extents[d], int(turn.bytes_each * stride))
        for d, stride in zip(between, strides, strict=True)
    ]
    lines = _lines(loops)
    if lines <= WAYS:  # one loop that short is unrolled; of two the arithmetic is not vectorized
        return STAY if len(loops) == 1 else Lines(1.0, 0.0)
    sets = _sets(loops)
    if arrays * lines / sets <= WAYS and lines <= FEW_LINES:
        return Lines(KEPT, 0.0)
    return Lines(1.0, max(_crowding(loops, arrays), _crowding(_in_a_row(loops), arrays)))


def _crowding(loops: Sequence[tuple[int, int]], arrays: int) -> float:
    """How much the lines crowd that loops read, by how many share a set and how many sets."""
    sets = _sets(loops)
    most = next((crowding for few, crowding in CROWDING.items() if sets <= few), 0.0)
    part = max(0.0, 1.0 + math.log2(arrays * _lines(loops) / sets / CROWDED_LINES) / 2)
    return min(CROWDING[1] * part, most)


def _in_a_row(loops: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of some loops, the innermost first, those that read so many lines as crowd a set.

    Lines that one after another are of one set wait for each other, wherever the next ones lie.
    """
    found: list[tuple[int, int]] = []
    for extent, stride in loops:
        lines = _lines(found)
        if lines >= CROWDED_LINES:
            break
        found.append((min(extent, math.ceil(CROWDED_LINES / lines)) if found else extent, stride))
    return found


def _lines(loops: Sequence[tuple[int, int]]) -> int:
    """How many lines are read by loops over dimensions of these extents and strides, bytes."""
    within = [extent * stride for extent, stride in loops if stride < LINE_BYTES]
    apart = math.prod(extent for extent, stride in loops if stride >= LINE_BYTES)
    return apart * math.ceil(max(within, default=1) / LINE_BYTES)


def _sets(loops: Sequence[tuple[int, int]]) -> int:
    """In how many sets these lines lie."""
    begins = {0}
    for extent, stride in loops:
        places = min(extent, WAY_BYTES // math.gcd(stride, WAY_BYTES))
        begins = {(begin + i * stride) % WAY_BYTES for begin in begins for i in range(places)}
        if len({begin // LINE_BYTES for begin in begins}) == WAY_BYTES // LINE_BYTES:
            break
    return len({begin // LINE_BYTES for begin in begins})
