"""Which arrays of the state are too small for storing them in parts to be worth it."""

import math

from autoshard.program.axes import Axes, Dimensions
from autoshard.program.program import Program

SMALL_SHARE = 0.01
"""The largest share of the state's elements that the arrays of `Gather.SMALL_REPLICATED` hold."""


def small_leaves(program: Program, axes: Axes) -> tuple[int, ...]:
    """The leaves of the state that `Gather.SMALL_REPLICATED` speaks of, by index."""
    most = small_elements(program, axes)
    return tuple(i for i, n in enumerate(_sizes(program, axes)) if n <= most)


def small_elements(program: Program, axes: Axes) -> int:
    """The largest size of a small array of the state: elements in one turn of its loops.

    Arrays of a loop over stacked layers are as small as one layer's, so that the stack and its
    slices inside the loop are treated alike.
    """
    held: dict[int, int] = {}
    for leaf, size in zip(program.state, _sizes(program, axes), strict=True):
        held[size] = held.get(size, 0) + math.prod(leaf.shape)
    room = SMALL_SHARE * sum(held.values())
    found = 0
    for size in sorted(held):
        room -= held[size]
        if room < 0:
            break
        found = size
    return found


def _sizes(program: Program, axes: Axes) -> list[int]:
    loops = loop_axes(axes)
    return [
        elements(dims[: len(leaf.shape)], loops)
        for leaf, dims in zip(program.state, axes.inputs, strict=False)
    ]


def elements(dims: Dimensions, loops: frozenset[str]) -> int:
    """Elements of an array, its loop axes counted once."""
    return math.prod(size for dim in dims for axis, size in dim if axis not in loops)


def loop_axes(axes: Axes) -> frozenset[str]:
    """The names of the axes along which a loop goes over stacked arrays."""
    return frozenset(a.name for a in axes.axes if a.is_loop)
