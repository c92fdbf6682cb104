"""Workload: a train step, its initial state and its batch, as the user hands them over."""

import dataclasses
from collections.abc import Callable
from typing import Any  # the user's own pytrees have no narrower type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What `model_fn(**knobs)` returns.

    Attributes:
      step: (state, batch) -> (new state, metrics); any JAX function. The new state must have the
        structure, shapes and dtypes of the old.
      init: () -> state; traced, then run sharded, so that no device ever holds the whole state.
      batch: pytree of `jax.ShapeDtypeStruct`, the global batch.
      sample: key -> batch, real values for measuring and for the numerics check. Without it
        floats are normal and integers 0 or 1.
      axis_names: for leaves of the state that carry them, logical axis names: pytree path as
        `jax.tree_util.keystr` writes it -> one name or None for each dimension.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Callable[[], Any]
    batch: Any
    sample: Callable[[Any], Any] | None = None
    axis_names: dict[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
