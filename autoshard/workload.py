"""Workload: a train step, its initial state and its batch, as the user hands them over."""

import dataclasses
from collections.abc import Callable
from typing import Any  # the user's own pytrees have no narrower type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What `model_fn(**knobs)` returns.

    Attributes:
      step: (state, batch) -> (new state, metrics); a JAX function without host callbacks,
        custom_partitioning or `jax.ffi`, and with threefry keys. Prints (`jax.debug`) are left out
        of the plan's. The new state must have the structure, shapes and dtypes of the old.
      init: () -> state; traced. `Plan.init` runs it sharded, so that no device ever holds the whole
        state; a search that measures, and `Plan.check`, also make it whole (on accelerators on the
        host) to compare with the unsharded step, where that fits. One that only this process can
        run (it reads files, say) is run by it.
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
