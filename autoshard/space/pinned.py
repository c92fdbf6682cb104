"""What the user fixes: logical axes to mesh axes, state leaves to PartitionSpecs."""

import math
from collections.abc import Iterable, Mapping

from autoshard.errors import LayoutError
from autoshard.program.axes import Axes
from autoshard.program.program import Leaf, Program
from autoshard.records.layout import Spec


def _items(value: object) -> tuple[object, ...]:
    if not isinstance(value, Iterable):
        raise LayoutError(f"expected mesh axes or a PartitionSpec, got {value!r}")
    return tuple(value)


def _mesh_axes(value: object) -> tuple[str, ...]:
    """One mesh axis, several, or None; of a PartitionSpec those of all its dimensions."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(m for item in _items(value) for m in _mesh_axes(item))


def why_indivisible(leaf: Leaf, spec: Spec, sizes: Mapping[str, int]) -> str | None:
    """Why a fixed leaf cannot lie so on a mesh of these sizes, None if it can."""
    missing = sorted({m for dim in spec for m in dim} - set(sizes))
    if missing:
        return f"{leaf.path} is fixed to {', '.join(missing)}, which the mesh does not have"
    for d, (n, dim) in enumerate(zip(leaf.shape, spec, strict=True)):
        ways = math.prod(sizes[m] for m in dim)
        if n % ways:
            return f"{leaf.path}[{d}] of {n} is fixed to {', '.join(dim)}, which takes {ways} ways"
    return None


def read_fix(
    fix: Mapping[str, object] | None, program: Program, axes: Axes
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[tuple[int, Spec], ...]]:
    """Splits the user's `fix` into pinned logical axes and fixed state leaves.

    Raises:
      LayoutError: a key is neither a logical axis nor the path of a state leaf.
    """
    pinned: list[tuple[str, tuple[str, ...]]] = []
    leaves: list[tuple[int, Spec]] = []
    names = {a.name: a for a in axes.axes}
    for key, value in (fix or {}).items():
        if key in names:
            pinned.append((key, _mesh_axes(value)))
            continue
        index = next((i for i, x in enumerate(program.state) if key in (x.path, x.key)), None)
        if index is None:
            raise LayoutError(
                f"fix[{key!r}] names nothing: expected a logical axis ({', '.join(names)}) or the"
                f" path of a state leaf such as {program.state[0].path if program.state else '-'}"
            )
        dims = (value,) if value is None or isinstance(value, str) else _items(value)
        spec = [_mesh_axes(d) for d in dims]
        rank = len(program.state[index].shape)
        if len(spec) > rank:
            raise LayoutError(f"fix[{key!r}] has {len(spec)} dimensions, the leaf {rank}")
        named = [m for dim in spec for m in dim]
        if len(set(named)) < len(named):
            raise LayoutError(f"fix[{key!r}] names a mesh axis twice: {', '.join(named)}")
        leaves.append((index, (*spec, *[()] * (rank - len(spec)))))
    return tuple(pinned), tuple(leaves)
