"""Mixed precision: float32 parameters in the state, a copy of another dtype in the step."""

from typing import Literal, TypeVar

import jax
from flax import nnx

Dtype = Literal["float32", "bfloat16"]
Module = TypeVar("Module", bound=nnx.Module)

FLOAT32 = frozenset({"embedding", "router"})
"""Never cast: what adds up many small terms (a word's gradient), or decides (which expert)."""


def cast(module: Module, dtype: Dtype) -> Module:
    """The module with its parameters in `dtype`, but for those named in `FLOAT32`.

    Differentiating through the cast hands gradients back in the parameters' own dtype.
    """
    if dtype == "float32":
        return module
    graphdef, params = nnx.split(module)
    cast_params = jax.tree_util.tree_map_with_path(
        lambda path, x: x if _name(path) in FLOAT32 else x.astype(dtype), params
    )
    return nnx.merge(graphdef, cast_params)


def _name(path: tuple[object, ...]) -> str:
    """The attribute that holds the parameter: the last word of its path."""
    words = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next(word for word in reversed(words) if word not in ("", "value"))
