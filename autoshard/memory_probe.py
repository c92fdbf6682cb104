"""How fast the memory of a host is for kernels of each size: caches, measured.

On two cores of an AMD EPYC a kernel that touches 128 KiB moves 160 GB/s, one that touches 32 MiB
moves 27. The probes are loops that scale an array in place; a loop over next to nothing is taken
off, so that what is left is the traffic of the array alone.
"""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from autoshard.probes import Run, program

ARRAYS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 24)
"""Sizes of the array on one device, bytes: within the first cache, to beyond the last."""

_TINY = 64
_MOVED = 1 << 23  # bytes that a probe walks over, so that it is not lost in the dispatch


def memory_probes(mesh: Mesh) -> dict[object, Run]:
    """For each size a loop over an array on each device, and as many turns over next to nothing.

    Returns:
      ("array", size) and ("loop", size) -> the program.
    """
    found: dict[object, Run] = {}
    for size in ARRAYS:
        for what, bytes_ in (("array", size), ("loop", _TINY)):
            found[what, size] = program(_scaled(_turns(size)), mesh, bytes_ // 4)
    return found


def bandwidths(seconds: Mapping[object, float], devices: int) -> tuple[tuple[float, float], ...]:
    """(bytes that a kernel reads and writes on one device, bytes a second of all devices).

    A smaller kernel is never slower than a larger one: where it seems so, something else ran.

    Args:
      seconds: of the probes.
      devices: that ran it together, each on an array of its own.
    """
    rates: list[float] = []
    for size in reversed(ARRAYS):
        once_s = (seconds["array", size] - seconds["loop", size]) / _turns(size)
        rate = devices * 2.0 * size / max(once_s, 1e-9)
        rates.append(max([rate, *rates[-1:]]))
    return tuple(zip((2.0 * size for size in ARRAYS), reversed(rates), strict=True))


def _turns(size: int) -> int:
    """How often a probe walks over its array."""
    return min(256, max(2, _MOVED // size))


def _scaled(turns: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.fori_loop(0, turns, lambda _, y: y * 1.0001 + 1e-9, x)
