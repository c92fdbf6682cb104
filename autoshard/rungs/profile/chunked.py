"""Reads large host arrays in pieces: what is made of one stays in the caches, and all cores work.

A state of gigabytes, read as a whole, would be written to memory once more, in double precision,
for each operation of a comparison.
"""

import concurrent.futures
import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

T = TypeVar("T")

PIECE = 1 << 16
"""Elements of a piece: half a megabyte in double precision."""


def chunked_map(function: Callable[..., T], *arrays: np.ndarray) -> list[T]:
    """What `function` says of each piece of some arrays, in order.

    Args:
      function: takes the same stretch of each array, flat; called from several threads at once, on
        views that it may write to.
      arrays: of one size. One that is not contiguous is copied.
    """
    flat = [array.reshape(-1) for array in arrays]
    size = flat[0].size
    if any(one.size != size for one in flat):
        raise ValueError(f"got arrays of {[one.size for one in flat]} elements, expected one size")

    def at(start: int) -> T:
        return function(*(one[start : start + PIECE] for one in flat))

    starts = range(0, size, PIECE)
    if len(starts) < 2:
        return [at(start) for start in starts]
    with concurrent.futures.ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        return list(pool.map(at, starts))
