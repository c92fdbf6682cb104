"""Gradients that each device computes of its part of the batch alone, and one mean of them.

As with `jax.pmap` before (flax's examples, imagenet/train.py: `lax.pmean(grads, axis_name="batch")`
behind `value_and_grad`; Goyal et al. 2017, section 3). Under `jax.jit` alone a gradient that a loop
adds up is summed over the devices at each turn.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from experiments.handwritten.layouts import Rules

Gradients = Callable[[Any, Any], Any]
"""(params, batch) -> (gradients, metrics)."""


def apart(gradients: Gradients, rules: Rules) -> Gradients:
    """The same of the whole batch, for losses and metrics that are means over examples of one size.

    Parameters are whole on every device.
    """
    axes = rules.layout.gradients_apart

    def alone(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(gradients(params, batch), axes)

    def of_all(params: Any, batch: Any) -> Any:
        specs = jax.tree.map(lambda x: rules.batch(x.shape).spec, batch)
        whole = PartitionSpec()
        # Checked, parameters would count as whole inside, and loops would sum over devices again.
        return jax.shard_map(
            alone, mesh=rules.mesh, in_specs=(whole, specs), out_specs=whole, check_vma=False
        )(params, batch)

    return of_all
