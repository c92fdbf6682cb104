"""Which loops of XLA:CPU do their arithmetic element by element.

A fused kernel loops over the outermost dimension of what it writes, in parts for the threads of the
host, and over the others inside of that. LLVM unrolls short inner loops before it vectorizes, and
then leaves the outer one as it is where two or more were unrolled in it, or where it is checked in
each turn because the second of two parts has fewer of them:
`docs/decisions/0030-loops-that-are-not-vectorized.md`.
"""

from typing import Any

PART_BYTES = 256 << 10
"""A loop that memory bounds gets another part for so many bytes that it reads and writes.

Seen with XLA:CPU of jax 0.10.2 and 0.12.0 on two cores: two parts from 512 KiB on.
"""

_UNROLLED = 16
"""Elements in a turn of the outermost loop; with 18 to 24 it depends on what is computed."""


def is_vectorized(rows: Any, row_elements: Any, inner_loops: Any, parts: Any) -> Any:
    """Whether the arithmetic of a large loop is vectorized; of numbers, or of arrays of them.

    Args:
      rows: extent of the outermost dimension of what is written, on one device.
      row_elements: elements in each of them.
      inner_loops: how many other dimensions have more than one element.
      parts: that the rows are divided into; one part is a small loop, of which nothing is said.
    """
    unchecked = (parts != 2) | (rows % 2 == 0)
    return ((inner_loops < 2) & unchecked) | (row_elements > _UNROLLED) | (parts < 2)
