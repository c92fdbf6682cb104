"""Where a StableHLO slice or pad takes its elements from."""

import itertools

from autoshard.compat.stablehlo import Operation, integers, shape_of
from autoshard.convolutions import Window
from autoshard.shifts import padded, sliced

_MADE_BY = {
    "stablehlo.slice": (sliced, ("start_indices", "limit_indices", "strides")),
    "stablehlo.pad": (padded, ("edge_padding_low", "edge_padding_high", "interior_padding")),
}


def windows(operation: Operation) -> tuple[Window, ...]:
    """One for each dimension of what is moved (`shifts`); () of other operations."""
    if operation.name not in _MADE_BY:
        return ()
    window, names = _MADE_BY[operation.name]
    said = [integers(operation, name) for name in names]
    return tuple(
        itertools.starmap(window, zip(shape_of(operation.operands[0]), *said, strict=True))
    )
