"""Where devices stand in a topology, and how mesh axes run over its slices."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a device stands.

    Attributes:
      slice: index of the slice; 0 where there is one.
      host: index of the host, over all slices.
      coords: TPU: of the chip in the torus of its slice, one for each extent of the shape; GPU:
        (host in the slice, device in the host).
      core: index among the JAX devices of the chip.
    """

    slice: int
    host: int
    coords: tuple[int, ...]
    core: int


def over_slices(slices: int, sizes: Sequence[int]) -> list[int]:
    """How many slices each mesh axis runs over: the first axes take what divides them.

    >>> over_slices(4, (2, 6, 8))
    [2, 2, 1]
    """
    found = []
    for size in sizes:
        part = math.gcd(slices, size)
        found.append(part)
        slices //= part
    return found
