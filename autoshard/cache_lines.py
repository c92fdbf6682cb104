"""What a change of the densest dimension costs a loop: elements leave their cache lines.

A loop that moves elements from one densest dimension to another touches a cache line for each of
them. Where few elements follow each other in one of the two, their lines stay in the cache until
the others are wanted, and little is lost. Where the lines lie a large power of two apart, as in
arrays with powers of two for extents, they share a few places in the cache and push each other out.
"""

import enum
import math
from collections.abc import Sequence

LINE_BYTES = 64
"""Of a cache line: x86-64, and most Arm cores."""

WAY_BYTES = 4096
"""Addresses so far apart share a set of the first cache.

That of x86-64 finds a set by what a page leaves of an address.
"""

_FEW_SETS, _LINES_OF_A_SET = 4, 32
"""From where on copies took several times as long (docs/decisions/0029)."""


class Lines(enum.Enum):
    """What becomes of cache lines: they stay, elements cross them, they collide besides."""

    STAY = 0
    CROSS = 1
    COLLIDE = 2


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
        return Lines.STAY
    if min(extents[before[0]], extents[after[0]]) * bytes_each <= LINE_BYTES:
        return Lines.STAY
    apart = bytes_each * math.prod(extents[d] for d in before[: before.index(after[0])])
    sets = WAY_BYTES // math.gcd(int(apart), WAY_BYTES)
    touched = math.prod(extents[d] for d in after[: after.index(before[0])])
    collides = sets <= _FEW_SETS and touched > _LINES_OF_A_SET * sets
    return Lines.COLLIDE if collides else Lines.CROSS
