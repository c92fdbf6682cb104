"""What devices send each other for slices and pads along divided dimensions (`shifts`)."""

import math
from collections.abc import Iterator

from autoshard.analysis import Analysis
from autoshard.operations import Shift
from autoshard.rungs.shares import Shares
from autoshard.shifts import moves, pieces
from autoshard.subaxes import ways
from autoshard.trial import Collective


def shifting_collectives(analysis: Analysis, shares: Shares) -> list[Collective]:
    """Those of a step under one layout, but for branches that are not taken."""
    trips = analysis.kernels.trips
    found: list[Collective] = []
    for shift in analysis.kernels.shifts:
        if not any(shares.made_dims(shift.tag)) or not trips[shift.tag]:
            continue
        found += _sent(shift, shares, int(trips[shift.tag]))
    return found


def _sent(shift: Shift, shares: Shares, often: int) -> Iterator[Collective]:
    """Of one dimension after another: the operand is divided as the result is."""
    made, sizes, kernels = shares.made_dims(shift.tag), shares.sizes, shares.kernels
    extents = [window.data for window in shift.windows]
    element = kernels.value_bytes[shift.data] / max(kernels.value_elements[shift.data], 1)
    here = [-(-n // ways(axes, sizes)) for n, axes in zip(extents, made, strict=True)]
    for dimension, (window, axes) in enumerate(zip(shift.windows, made, strict=True)):
        devices = ways(axes, sizes)
        if devices == 1 or not moves(window) or not math.prod(here):
            continue
        each = element * math.prod(here) / here[dimension]
        found = pieces(window, devices)
        gathered = here[dimension] * devices
        for places in (gathered,) if found is None else found:
            yield Collective(
                kind="all_gather" if found is None else "collective_permute",
                group_size=devices,
                mesh_axes=tuple(axes),
                bytes=int(each * places),
                count=often,
                source=shift.source,
            )
        here[dimension] = -(-window.out // devices)
