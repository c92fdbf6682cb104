"""Workload: a train step, its initial state and its batch, as the user hands them over."""

import dataclasses
from collections.abc import Callable
from typing import Any  # the user's own pytrees have no narrower type


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A train step, its state and its batch: `model_fn(**knobs)` returns one.

    Attributes:
      step: (state, batch) -> (new state, metrics). A JAX function without host callbacks,
        custom_partitioning or `jax.ffi`, with threefry keys. The plan's step leaves out prints
        (`jax.debug`). The new state has the structure, shapes and dtypes of the old one.
      init: () -> state. It is traced, and `Plan.init` runs it sharded: no device holds the whole
        state. A search that measures, and `Plan.check`, also make the whole state for the numerics
        check, on accelerators in the host's memory. This process runs an init that cannot be
        traced, such as one that reads files.
      batch: pytree of `jax.ShapeDtypeStruct`, the global batch.
      sample: key -> batch with real values, for measuring and for the numerics check. Without it
        floats are normal and integers are 0 or 1.
      axis_names: names of logical axes. Pytree path of a state leaf, as `jax.tree_util.keystr`
        writes it -> one name or None for each dimension.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    init: Callable[[], Any]
    batch: Any
    sample: Callable[[Any], Any] | None = None
    axis_names: dict[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
