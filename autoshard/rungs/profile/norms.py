"""Norms of large host arrays and of their differences, in double precision."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from autoshard.rungs.profile.chunked import chunked_map


def wide(value: np.ndarray) -> np.ndarray:
    """As float64 or complex128."""
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)


def minus(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The change in double precision: 0 where both are equal, infinities too.

    From a value that was not finite all of the new one is the change.
    """
    before = wide(old)
    with np.errstate(invalid="ignore"):
        return np.where(new == old, 0, wide(new) - np.where(np.isfinite(before), before, 0))


def second(new: np.ndarray, old: np.ndarray, then: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The difference of two changes."""
    return minus(minus(new, old), minus(then, before))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """L2 norm of the difference of floats; else the share of elements that differ."""
    if jnp.issubdtype(a.dtype, jnp.inexact):
        return norm(minus, a, b)
    return sum(chunked_map(_differing, a, b)) / a.size if a.size else 0.0


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(a != b))


def largest(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> float:
    """The largest size of what a function makes of arrays; what is not finite is 0."""

    def of_piece(*pieces: np.ndarray) -> float:
        value = np.abs(function(*pieces))
        return float(np.max(value, initial=0, where=np.isfinite(value)))

    return max(chunked_map(of_piece, *arrays), default=0.0)


def norm(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> float:
    """L2 norm of what a function makes of arrays, element by element; what is not finite is 0."""

    def squares(*pieces: np.ndarray) -> float:
        value = np.abs(function(*pieces))
        with np.errstate(over="ignore"):
            return float(np.sum(np.square(value), where=np.isfinite(value)))

    with np.errstate(over="ignore"):
        return float(np.sqrt(np.sum(chunked_map(squares, *arrays))))
