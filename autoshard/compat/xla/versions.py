"""Versions of what compiles: part of every key and of every plan."""

import importlib.metadata


def versions() -> dict[str, str]:
    """Package -> version."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
