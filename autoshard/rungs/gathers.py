"""What XLA:CPU copies to gather along another dimension than the outermost.

Its all-gather joins the parts of devices one behind another. So what is sent is copied to an order
in which the dimension that is gathered along is the outermost, and what is made back to the order
that is usual: `docs/decisions/0039-gathers-along-inner-dimensions.md`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from autoshard.cache_lines import Turn
from autoshard.compat.judged import Communication
from autoshard.cost import CostModel
from autoshard.subaxes import ways


class Copy(NamedTuple):
    """One copy that a device makes.

    Attributes:
      bytes: read and written beyond what those that make and take the array do.
      transposed: elements that it reads across cache lines, each by what it costs.
      collided: those whose lines push each other out of the cache, each by its crowding.
    """

    bytes: float
    transposed: float
    collided: float


def copying_s(
    communication: Iterable[Communication],
    trips: Mapping[int, float],
    sizes: Mapping[str, int],
    peak: float,
    cost: CostModel,
) -> float:
    """Seconds of the copies that the gathers of a step need.

    Args:
      trips: executions of each block in a step.
      peak: bytes of a device in the step.
    """
    if not cost.constants.gathers_outermost:
        return 0.0
    copies = [
        (*copy, trips.get(one.block, 1.0))
        for one in communication
        for copy in copies_of(one, sizes)
    ]
    bytes_, transposed, collided, turns = np.array(copies).reshape(-1, 4).T
    return cost.kernels_s(
        np.zeros(len(copies)),
        bytes_,
        turns,
        [""] * len(copies),
        transposed=transposed,
        collided=collided,
        touched=np.full(len(copies), peak),
    )


def copies_of(one: Communication, sizes: Mapping[str, int]) -> list[Copy]:
    """The copies before and after each gather of a collective, one dimension after another."""
    extents = list(one.extents)
    found = []
    bytes_each = one.before / max(math.prod(extents), 1)
    for dimension in reversed(range(len(one.gathered))):
        if not one.gathered[dimension]:
            continue
        found.append(_copy(extents, dimension, bytes_each, back=False, written=True))
        extents[dimension] *= ways(one.gathered[dimension], sizes)
        found.append(_copy(extents, dimension, bytes_each, back=True, written=one.to_product))
    return [copy for copy in found if copy is not None]


def _copy(
    extents: list[int], dimension: int, bytes_each: float, *, back: bool, written: bool
) -> Copy | None:
    """A copy to the order in which a dimension is the outermost, or back; None where it is.

    Args:
      written: it is an array of its own; else whatever takes it reads across lines.
    """
    usual = tuple(d for d in reversed(range(len(extents))) if extents[d] > 1)
    turned = tuple(sorted(usual, key=lambda d: d == dimension))
    if usual == turned:
        return None
    turn = Turn(turned, usual, bytes_each) if back else Turn(usual, turned, bytes_each)
    how = turn.lines(extents)
    elements = math.prod(extents)
    copied = 2.0 * elements * bytes_each * written
    return Copy(copied, elements * how.crossed, elements * how.crowding)
