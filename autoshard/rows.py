"""How many rows the result of a product has: of few, each takes longer.

XLA:CPU's library multiplies some rows at a time by what it has loaded of the right operand. Where
the result has fewer rows than that, loading is what takes the time, and one row takes as long as
several. The rows of a convolution are the places along the last dimension of space, of one image
and one line: gradients by kernels of 1 x 1 have one of them:
`docs/decisions/0048-products-of-few-rows.md`.
"""

import math

MANY = math.inf
"""Rows where there are enough, or where nothing is said of them."""
