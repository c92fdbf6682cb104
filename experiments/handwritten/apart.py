"""Gradients that each device computes of its part of the batch alone, and one mean of them.

As with `jax.pmap` before (flax's examples, imagenet/train.py: `lax.pmean(grads, axis_name="batch")`
behind `value_and_grad`; Goyal et al. 2017, section 3). Under `jax.jit` alone a gradient that a loop
adds up is summed over the devices at each turn.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from experiments.handwritten.layouts import Rules
from experiments.handwritten.train_steps import Gradients


def apart(gradients: Gradients, rules: Rules) -> Gradients:
    """The same of the whole batch, for losses and metrics that are means over examples of one size.

    Parameters are whole on every device.

    Raises:
      ValueError: the model changes more than its parameters; devices would not agree on that.
    """
    axes = rules.layout.gradients_apart

    def alone(params: Any, extra: Any, batch: Any) -> Any:
        (value, (extra, metrics)), found = gradients(params, extra, batch)
        value, metrics, found = jax.lax.pmean((value, metrics, found), axes)
        return (value, (extra, metrics)), found

    def of_all(params: Any, extra: Any, batch: Any) -> Any:
        if jax.tree.leaves(extra):
            raise ValueError(
                f"{rules.layout.name}: expected a model that changes nothing but its parameters,"
                f" got {jax.tree.map(lambda x: x.shape, extra)} besides"
            )
        specs = jax.tree.map(lambda sharding: sharding.spec, rules.batch_of(batch))
        whole = PartitionSpec()
        # Checked, parameters would count as whole inside, and loops would sum over devices again.
        return jax.shard_map(
            alone,
            mesh=rules.mesh,
            in_specs=(whole, whole, specs),
            out_specs=whole,
            check_vma=False,
        )(params, extra, batch)

    return of_all
