"""Factor identity: which parts of which array dimensions the program ties together.

A dimension is an ordered list of factors, major to minor. Operations view dimensions in different
ways (`[B]` here, `[accumulate, B/accumulate]` there), so a dimension starts as one factor and is
split when an operation needs it finer; all dimensions tied to it are split with it. This is a
union-find whose classes can be divided.
"""

import math


class Factor:
    """A node of the divisible union-find; read it through `leaves`."""

    __slots__ = ("_parent", "_parts", "is_loop", "size")

    def __init__(self, size: int):
        self.size = size
        self.is_loop = False
        self._parent: Factor | None = None
        self._parts: tuple[Factor, Factor] | None = None

    def root(self) -> "Factor":
        node = self
        while node._parent is not None:
            if node._parent._parent is not None:
                node._parent = node._parent._parent
            node = node._parent
        return node

    def leaves(self) -> list["Factor"]:
        """The finest factors of this dimension, major to minor, each the root of its class."""
        node = self.root()
        if node._parts is None:
            return [node]
        return [leaf for part in node._parts for leaf in part.leaves()]

    def _divide(self, minor: int) -> tuple["Factor", "Factor"]:
        parts = (Factor(self.size // minor), Factor(minor))
        parts[0].is_loop = self.is_loop  # a loop runs over the major part
        self._parts = parts
        return parts


def tie(left: list[Factor], right: list[Factor]) -> bool:
    """Ties two views of one dimension, minor factors first; splits where one view is finer.

    Returns:
      False where the views do not line up (such as 2 x 3 and 3 x 2); what lies minor of that
      place is tied, the rest is left alone.
    """
    a = [leaf for f in left for leaf in f.leaves() if leaf.size > 1]
    b = [leaf for f in right for leaf in f.leaves() if leaf.size > 1]
    while a and b:
        # Splitting a factor may split one that the other list also holds: look again.
        if len(a[-1].leaves()) > 1 or a[-1].root() is not a[-1]:
            a[-1:] = a[-1].leaves()
            continue
        if len(b[-1].leaves()) > 1 or b[-1].root() is not b[-1]:
            b[-1:] = b[-1].leaves()
            continue
        x, y = a[-1], b[-1]
        if x is y:
            a.pop(), b.pop()
        elif x.size == y.size:
            y._parent = x
            x.is_loop |= y.is_loop
            a.pop(), b.pop()
        elif x.size % y.size == 0:
            a[-1:] = x._divide(y.size)
        elif y.size % x.size == 0:
            b[-1:] = y._divide(x.size)
        else:
            return False
    return True


def tie_unequal(big: Factor, small: Factor, major: bool = False) -> bool:
    """Ties dimensions of different sizes that hold the same thing (slices, pads, concatenations).

    A slice of one part in n (queries out of a fused projection) is tied to the minor part.

    Args:
      major: the small one has an element for each n neighbours of the big one (strided slices,
        pooling): it is tied to the major part.

    Returns:
      False if the sizes do not divide: the caller may name both the same, but cannot tie factors.
    """
    if small.size > big.size:
        big, small = small, big
    if small.size <= 1 or big.size % small.size:
        return False
    rest = Factor(big.size // small.size)
    return tie([big], [small, rest] if major else [rest, small])


def size_of(factors: list[Factor]) -> int:
    return math.prod(f.size for f in factors)
