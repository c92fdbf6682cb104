"""Whether a change of the densest dimension takes elements out of their cache lines.

A loop that moves elements from one densest dimension to another reads or writes one element of a
cache line at a time. Where few elements follow each other in one of the two, their lines stay in
the cache until the others are wanted, and little is lost.
"""

LINE_BYTES = 64
"""Of a cache line: x86-64, and most Arm cores."""


def crosses_lines(before: int, after: int, bytes_each: float) -> bool:
    """Whether elements of so many bytes leave their lines.

    Args:
      before, after: extents of the densest dimension before and after.
    """
    return min(before, after) * bytes_each > LINE_BYTES
