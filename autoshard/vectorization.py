"""Which loops of XLA:CPU do their arithmetic element by element.

A fused kernel loops over the outermost dimension of what it writes, in parts for the threads of the
host, and over the others inside of that. LLVM unrolls short inner loops before it vectorizes, and
then leaves the outer one as it is where two or more were unrolled in it, or where it is checked in
each turn because the second of two parts has fewer of them:
`docs/decisions/0030-loops-that-are-not-vectorized.md`.
"""

import numpy as np

PART_BYTES = 256 << 10
"""A loop that memory bounds gets another part for so many bytes that it reads and writes.

Seen with XLA:CPU of jax 0.10.2 and 0.12.0 on two cores: two parts from 512 KiB on.
"""

_UNROLLED = 16
"""Elements in a turn of the outermost loop; with 18 to 24 it depends on what is computed."""

_UNROLLED_TWICE = 24
"""The same where two inner loops are unrolled: 3 x 8 elements are slow, 4 x 8 are not."""


def is_vectorized(extents: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Whether the arithmetic of large loops is vectorized, (k,).

    Args:
      extents: (k, rank) of what each writes on one device, the outermost dimension first. Those of
        one element are no loops: the first one of more is what is divided into parts.
      parts: (k,) that it is divided into; one part is a small loop, of which nothing is said.
    """
    looped = extents > 1
    first = looped.argmax(axis=1)
    rows = np.take_along_axis(extents, first[:, None], axis=1)[:, 0]
    row_elements = extents.prod(axis=1) / np.maximum(rows, 1)
    twice = looped.sum(axis=1) > 2
    checked = (parts == 2) & (rows % 2 == 1)
    slow = np.where(twice, row_elements <= _UNROLLED_TWICE, checked & (row_elements <= _UNROLLED))
    return ~slow | (parts < 2)
