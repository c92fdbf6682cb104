"""What a change of the densest dimension costs a loop: elements leave their cache lines.

A loop that moves elements from one densest dimension to another takes each from a cache line of its
own, one after another. The more of these lines share a set of the cache, the farther away they have
gone until the next element of them is wanted: many do where they lie a large power of two apart, as
in arrays with powers of two for extents (`docs/decisions/0032-lines-that-share-a-set.md`). Where
few elements follow each other in one of the two dimensions, they have not gone
(`docs/decisions/0037-few-elements-in-a-row.md`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

LINE_BYTES = 64
"""Of a cache line: x86-64, and most Arm cores."""

WAY_BYTES = 4096
"""Addresses so far apart share a set of the first cache.

That of x86-64 finds a set by what a page leaves of an address.
"""

PLAIN_LINES = 12
"""Of a set, in the transpose that `Constants.transposed_s` is of: 760 x 1000 numbers of 4 bytes."""

CROWDED_LINES = 256
"""Of a set, in the transpose that `Constants.collided_s` is of: 512 x 512 numbers of 4 bytes."""


class Lines(NamedTuple):
    """What becomes of the cache lines that a loop reads.

    Attributes:
      crossed: it leaves each after one element.
      crowding: what an element costs whose line shares a set with more than the set holds, in units
        of one that shares it with `CROWDED_LINES`; else 0.
    """

    crossed: bool
    crowding: float


STAY = Lines(False, 0.0)


def lines_read(
    extents: Sequence[int], before: Sequence[int], after: Sequence[int], bytes_each: float
) -> Lines:
    """How a loop that writes in one order of dimensions reads what lies in another.

    Args:
      extents: by dimension.
      before, after: the dimensions of more than one element, the densest first.
      bytes_each: of an element.
    """
    if not after or before[0] == after[0]:
        return STAY
    if min(extents[before[0]], extents[after[0]]) * bytes_each <= LINE_BYTES:
        return Lines(True, 0.0)
    between = after[: after.index(before[0])]  # it goes over these before it comes back to a line
    lines = math.prod(extents[d] for d in between)
    strides = [
        int(bytes_each * math.prod(extents[d] for d in before[: before.index(turn)]))
        for turn in between
    ]
    of_each = math.prod(
        min(extents[d], _sets(stride)) for d, stride in zip(between, strides, strict=True)
    )
    sharing = lines / min(of_each, _sets(*strides), WAY_BYTES // LINE_BYTES)
    return Lines(True, math.sqrt(sharing / CROWDED_LINES) if sharing > PLAIN_LINES else 0.0)


def _sets(*strides: int) -> int:
    """In how many places of a way those can begin that are multiples of these apart."""
    return WAY_BYTES // math.gcd(*strides, WAY_BYTES)
