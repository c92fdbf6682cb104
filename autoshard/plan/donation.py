"""Deleted arrays, named before they reach a compiled step.

XLA:CPU on several devices ends the process on them (jax 0.10.2: `Invalid buffer passed to
Execute`), and what it says on one device names no array.
"""

from collections.abc import Sequence
from typing import Any

import jax

from autoshard.errors import PlanError
from autoshard.program.program import Leaf


def refuse_deleted(arrays: Sequence[Any], leaves: Sequence[Leaf]) -> None:
    """Looks at each of `arrays`, which are `leaves` of a state and a batch, in order.

    Raises:
      PlanError: one was deleted, as by the step that it was donated to.
    """
    for x, leaf in zip(arrays, leaves, strict=True):
        # What has no such method is no array of JAX's; to ask for that type takes longer.
        is_deleted = getattr(x, "is_deleted", None)
        if is_deleted and not isinstance(x, jax.core.Tracer) and is_deleted():
            raise PlanError(
                f"{leaf.path}: got an array that is deleted. A step donates its state: go on with"
                " the one that it returned, or make one anew by plan.init() or plan.place(state)"
            )
