"""Sharded checkpoints through orbax: every device writes and reads its own part."""

import pathlib
from typing import Any

import jax


def save(path: pathlib.Path, state: Any) -> None:
    """Writes `state` to `path`, where nothing may be yet, and waits until it is on disk."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), state)


def restore(path: pathlib.Path, abstract_state: Any, shardings: Any) -> Any:
    """Reads a state, born with `shardings`: never whole on one device.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct`, such as `jax.eval_shape(workload.init)`.
      shardings: the same pytree of shardings, such as `plan.state_shardings`; it may differ from
        what the state was saved with.
    """
    import orbax.checkpoint as ocp

    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_state,
        shardings,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), target)
