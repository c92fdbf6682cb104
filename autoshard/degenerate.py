"""Which sums of products take XLA:CPU long: those beside a degenerate dimension, of one element.

XLA:CPU hands sums to a library (YNNPACK, `ynn_fusion` in the compiled text). That of jax 0.10.2
takes 7 to 15 times as long for a product of two arrays that is summed over one dimension where
another has one element. Dividing makes such dimensions:
`docs/decisions/0038-sums-beside-a-degenerate-dimension.md`.
"""

import math
from collections.abc import Sequence

_HANDED_OVER = 4096
"""Elements from which on XLA:CPU hands a sum to the library: jax 0.10.2 and 0.12.0.1."""


def is_degenerate(extents: Sequence[int], summed: int) -> bool:
    """Whether a product of two arrays that is summed over one dimension takes long.

    Args:
      extents: of the product on one device, as it lies in memory, the densest last.
      summed: which of them is summed over.
    """
    beside = any(extent <= 1 for dimension, extent in enumerate(extents) if dimension != summed)
    return beside and extents[summed] > 1 and math.prod(extents) >= _HANDED_OVER


def is_across(extents: Sequence[int], summed: int) -> bool:
    """Whether what is added up does not lie densely; takes the same as `is_degenerate`."""
    return any(extent > 1 for extent in extents[summed + 1 :])
