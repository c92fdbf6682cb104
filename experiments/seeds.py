"""Seeds for numpy from the keys that a Workload's `sample` is given."""

import jax
import jax.numpy as jnp
import numpy as np


def seed_of(key: jax.Array) -> int:
    """A seed for numpy from a JAX key, typed or raw."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return int(np.asarray(jax.random.key_data(key) if typed else key).ravel()[-1])
