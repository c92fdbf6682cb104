"""The mesh that `jax.set_mesh` has set: the user's functions may need it, our programs must not."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax.sharding import AxisType, Mesh

_taken: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("taken", default=None)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Inside, and in functions it decorates, no mesh is set.

    With one, lowering takes its devices from there, and constraints on Explicit axes are but
    assertions (jax 0.10.2 to 0.12).
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty and jax.sharding.get_abstract_mesh().empty:
        yield
        return
    token = _taken.set(mesh)
    try:
        with jax.set_mesh(None):
            yield
    finally:
        _taken.reset(token)


@contextlib.contextmanager
def users_mesh() -> Iterator[None]:
    """Inside, the mesh is set that `without_mesh` has taken away, if it has."""
    mesh = _taken.get()
    if mesh is None or mesh.empty:
        yield
        return
    with jax.set_mesh(mesh):
        yield


def explicit_axes() -> tuple[str, ...]:
    """The Explicit axes of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(name) for name, kind in kinds if kind is AxisType.Explicit)
