"""Which sums of products take XLA:CPU long: those beside a degenerate dimension, of one element.

XLA:CPU hands sums to a library (YNNPACK, `ynn_fusion` in the compiled text). That of jax 0.10.2
takes 7 to 17 times as long for a product of two arrays that is summed over one dimension where
another has one element. Dividing makes such dimensions:
`docs/decisions/0038-sums-beside-a-degenerate-dimension.md`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_HANDED_OVER = 4096
"""Elements from which on XLA:CPU hands a sum to the library: jax 0.10.2 and 0.12.0.1."""


class Elements(NamedTuple):
    """Elements of products that take long to sum: of what lies densely, and of what does not."""

    along: int
    across: int


def elements(extents: Sequence[int], summed: int) -> Elements:
    """Those of a product of two arrays that is summed over one dimension; none where it is quick.

    Args:
      extents: of the product on one device, as it lies in memory, the densest last.
      summed: which of them is summed over.
    """
    count = math.prod(extents)
    beside = any(extent <= 1 for dimension, extent in enumerate(extents) if dimension != summed)
    if not beside or extents[summed] <= 1 or count < _HANDED_OVER:
        return Elements(0, 0)
    across = any(extent > 1 for extent in extents[summed + 1 :])
    return Elements(0, count) if across else Elements(count, 0)
