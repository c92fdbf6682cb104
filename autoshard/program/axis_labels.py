"""Short names of logical axes for people. Files and journals keep the longer names."""

from collections.abc import Collection, Mapping, Sequence


def labels(
    places: Mapping[str, tuple[str, str]], roles: Sequence[tuple[str, Collection[str]]]
) -> dict[str, str]:
    """Name of each axis -> its label; no two are equal.

    A role names an axis if it is the only one in that role. Other axes are named by the end of
    their path, which is as long as it takes to tell them apart.

    Args:
      places: for each axis its path with dots between the words, and its dimension as `[1]`; two
        empty strings where its name is good as it is.
      roles: (role, axes in it). An axis takes the first role that it is in.

    >>> places = {"params.mlp.up[1]:64": ("params.mlp.up", "[1]"), "embed": ("", "")}
    >>> labels(places, [])["params.mlp.up[1]:64"]
    'up[1]'
    >>> labels(places, [("hidden", ["params.mlp.up[1]:64"])])["params.mlp.up[1]:64"]
    'hidden'
    """
    found = {name: name for name, place in places.items() if not any(place)}
    in_role: set[str] = set()
    for role, members in roles:
        alone = [name for name in members if name in places and name not in in_role]
        in_role.update(alone)
        if len(alone) == 1 and alone[0] not in found and role not in found.values():
            found[alone[0]] = role
    rest = {name: _endings(*place) for name, place in places.items() if name not in found}
    for name, endings in rest.items():
        others = {e for other, ends in rest.items() if other != name for e in ends}
        taken = {*others, *found.values()}
        found[name] = next((e for e in endings if e not in taken), name)
    return found


def _endings(path: str, dimension: str) -> list[str]:
    """`a.b.c` and `[1]` -> `c[1]`, `b.c[1]`, `a.b.c[1]`; none begins with a number or a star."""
    words = path.split(".")
    starts = [i for i in reversed(range(len(words))) if words[i][0].isalpha()]
    return [".".join(words[i:]) + dimension for i in starts]
