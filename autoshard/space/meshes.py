"""The mesh shapes that a number of devices can have."""

from collections.abc import Set

from autoshard.records.layout import MeshShape

MAX_MESH_AXES = 3


def factorizations(count: int, most: int = MAX_MESH_AXES) -> list[tuple[int, ...]]:
    """Ordered factorizations of `count` into at most `most` factors above one; [()] for 1."""
    if count == 1:
        return [()]
    found: list[tuple[int, ...]] = [(count,)]
    if most > 1:
        for first in range(2, count):
            if count % first == 0:
                found += [(first, *rest) for rest in factorizations(count // first, most - 1)]
    return list(dict.fromkeys(found))


def mesh_shapes(
    count: int, names: tuple[str, ...], ordered: bool, never: Set[str] = frozenset()
) -> list[MeshShape]:
    """Meshes of every factorization into up to three axes.

    Args:
      names: of the axes, major to minor; completed by x, y, z, or letters from u on.
      never: names that no axis gets.
      ordered: whether (4, 2) and (2, 4) differ: they do where links differ or names carry a
        meaning; else one of them stands for both, sizes descending.
    """
    spare = [n for n in "xyzuvw" if n not in names and n not in never]
    all_names = (*names, *spare)
    shapes = factorizations(count)
    if not ordered:
        shapes = list(dict.fromkeys(tuple(sorted(s, reverse=True)) for s in shapes))
    shapes.sort(key=lambda s: (len(s), [-n for n in s]))
    return [tuple(zip(all_names, s, strict=False)) for s in shapes]
