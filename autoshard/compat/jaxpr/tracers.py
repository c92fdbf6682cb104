"""What tracers say of themselves: that they have no `sharding`, without a search for their origin.

Flax NNX asks `getattr(value, "sharding", None)` wherever a Variable changes: for each random key
that a module draws as it is made, for each batch statistic of a step. In jax 0.10.2, no more in
0.12, the AttributeError that says no lists the operations that the value comes from, for which it
goes over all that was traced so far: three quarters of the time to trace a module of 150 layers.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jax._src import core

_lock = threading.Lock()
_inside = 0
_Tracer: Any = core.Tracer
_told: Any = _Tracer.sharding


@contextlib.contextmanager
def origins_unsaid() -> Iterator[None]:
    """Inside, and in functions it decorates, the error says what is missing, of which value."""
    global _inside
    if "_origin_msg" not in _told.fget.__code__.co_names:
        yield
        return
    with _lock:
        _inside += 1
        _Tracer.sharding = property(_missing)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _Tracer.sharding = _told


def _missing(tracer: core.Tracer) -> object:
    raise AttributeError(
        f"The 'sharding' attribute is not available on {type(tracer).__name__} of {tracer.aval}."
    )
