"""Models made quickly, and how large they are."""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tests.compiled import split


def made(module_type: type[nnx.Module], config: Any) -> Any:
    """`module_type(config)`, but sooner."""
    return nnx.merge(*split(module_type, config))


def parameter_count(make_model: Callable[[], nnx.Module]) -> int:
    """Numbers in the model's `nnx.Param`s; allocates none of them."""
    params = nnx.state(nnx.eval_shape(make_model), nnx.Param)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
