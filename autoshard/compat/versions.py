"""Versions of what compiles: part of every key and of every plan."""

import jax
import jaxlib
import numpy as np


def versions() -> dict[str, str]:
    """Package -> version."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}
