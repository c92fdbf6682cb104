"""Layouts: a mesh shape with compute rules and storage rules, their canonical form and JSON."""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import LayoutError

Rules = tuple[tuple[str, tuple[str, ...]], ...]
"""Logical axis -> mesh axes (major to minor), sorted by axis; axes with no rule are absent."""

MeshShape = tuple[tuple[str, int], ...]
"""(mesh axis, size) pairs, major to minor."""

Spec = tuple[tuple[str, ...], ...]
"""The canonical PartitionSpec: for each dimension the mesh axes that shard it, major to minor."""


def rules(mapping: Mapping[str, str | Sequence[str]]) -> Rules:
    """Returns `mapping` as canonical Rules; one mesh axis may be given as a plain string."""
    items = ((axis, (to,) if isinstance(to, str) else tuple(to)) for axis, to in mapping.items())
    return tuple(sorted((axis, to) for axis, to in items if to))


class Wording(enum.StrEnum):
    """How many constraints say a layout to the partitioner; each gives the same partition.

    They are other programs to the compiler, which may be some percent faster or slower. The
    constraints are autoshard's own; those of the user's step are another matter (`as_written`).
    """

    LEAN = "lean"  # what is stored, parameters where they are used, and what more is needed
    LEAST = "least"  # such that no single one can be spared
    ALL = "all"  # at every site


class Whole(enum.StrEnum):
    """What takes compute rules before it is used, in the order of the memory it takes.

    Where only storage rules divide an array it is whole then: it is gathered less often, and takes
    memory for longer. *Used* is what compute values are made of: parameters. Leaves that the user
    fixes stay as they are fixed.
    """

    NOTHING = "nothing"  # everything is gathered where it is used, in each turn of a loop
    SMALL = "small"  # the smallest arrays, a hundredth of the state at most: at rest too
    ONCE = "once"  # used arrays from before the loops they go into: gathered once a step
    USED = "used"  # used arrays at rest too: moments alone are divided (ZeRO-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a program is spread over devices.

    Attributes:
      mesh: (mesh axis, size) pairs, major to minor over the target's device order.
      compute: rules for compute sites (activations and their cotangents, parameters where used).
      storage: rules for storage sites (state, gradients, optimizer arithmetic).
      giving_way: logical axes that leave a mesh axis which several dimensions of an array claim to
        the later ones, whether they hold the same axis or another; without order.
      whole: what takes compute rules before it is used.
      small_replicated: no rule divides small arrays of the state (those of `Whole.SMALL`), neither
        at rest nor where they are used: what is computed of them is divided as other operands are.
      whole_into_loops: activations that products in a loop use, and that it does not change, are
        divided along the batch alone from before the loop: gathered once, not in each turn.
      as_written: keep the user's own sharding constraints and add none; the rules are then empty.
      wording: how many constraints put it into the program.
    """

    mesh: tuple[tuple[str, int], ...]
    compute: Rules = ()
    storage: Rules = ()
    giving_way: tuple[str, ...] = ()
    whole: Whole = Whole.NOTHING
    small_replicated: bool = False
    whole_into_loops: bool = False
    as_written: bool = False
    wording: Wording = Wording.LEAN

    def __post_init__(self) -> None:
        names = [name for name, _ in self.mesh]
        if len(set(names)) != len(names):
            raise LayoutError(f"mesh axes must have distinct names, got {names}")
        for kind, table in (("compute", self.compute), ("storage", self.storage)):
            for axis, to in table:
                unknown = [m for m in to if m not in names]
                if unknown or len(set(to)) != len(to):
                    raise LayoutError(
                        f"{kind} rule {axis!r} -> {to}: expected distinct mesh axes out of {names}"
                    )

    @property
    def device_count(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    def canonical(self, apart: frozenset[str] = frozenset()) -> "Layout":
        """The one form of all layouts that differ only in spelling.

        Mesh axes of size one go, mesh axes that no rule separates merge into the first of them
        (only when adjacent, so that device order is unchanged), and every table is sorted.

        Args:
          apart: mesh axes that something else than the rules names: they never merge.
        """
        keep = [(name, size) for name, size in self.mesh if size > 1]
        alive = {name for name, _ in keep}
        compute = {a: tuple(m for m in to if m in alive) for a, to in self.compute}
        storage = {a: tuple(m for m in to if m in alive) for a, to in self.storage}
        tables = (compute, storage)
        i = 0
        while i + 1 < len(keep) and not self.as_written:
            (first, m), (second, n) = keep[i], keep[i + 1]
            if not {first, second} & apart and all(
                _adjacent(to, first, second) for table in tables for to in table.values()
            ):
                keep[i : i + 2] = [(first, m * n)]
                for table in tables:
                    for axis, to in table.items():
                        table[axis] = tuple(x for x in to if x != second)
            else:
                i += 1
        return Layout(
            mesh=tuple(keep),
            compute=rules(compute),
            storage=rules(storage),
            giving_way=tuple(sorted(set(self.giving_way))),
            whole=self.whole if rules(storage) != rules(compute) else Whole.NOTHING,
            small_replicated=self.small_replicated and any({**compute, **storage}.values()),
            whole_into_loops=self.whole_into_loops and bool(keep) and not self.as_written,
            as_written=self.as_written,
            wording=Wording.LEAN if self.as_written or not keep else self.wording,
        )

    def spread_over(self, mesh: tuple[tuple[str, int], ...]) -> "Layout | None":
        """The same layout on `mesh`, of which `canonical` dropped axes; None if on another mesh."""
        rest = [(name, size) for name, size in mesh if size > 1]
        wide: dict[str, tuple[str, ...]] = {}
        for name, size in self.mesh:
            group: list[str] = []
            while size > 1 and rest and size % rest[0][1] == 0:
                size //= rest[0][1]
                group.append(rest.pop(0)[0])
            if size > 1 or (group and group[0] != name):
                return None
            wide[name] = tuple(group)
        if rest:
            return None
        return dataclasses.replace(
            self,
            mesh=mesh,
            compute=rules({a: [x for m in to for x in wide[m]] for a, to in self.compute}),
            storage=rules({a: [x for m in to for x in wide[m]] for a, to in self.storage}),
        )

    def to_json(self) -> dict[str, object]:
        """Plain JSON: names, never positions; `mesh` is a list of pairs because order matters."""
        return {
            "mesh": [[name, size] for name, size in self.mesh],
            "compute": {axis: list(to) for axis, to in self.compute},
            "storage": {axis: list(to) for axis, to in self.storage},
            "giving_way": list(self.giving_way),
            **({"whole": str(self.whole)} if self.whole != "nothing" else {}),
            **({"small_replicated": True} if self.small_replicated else {}),
            **({"whole_into_loops": True} if self.whole_into_loops else {}),
            "as_written": self.as_written,
            **({"wording": str(self.wording)} if self.wording != "lean" else {}),
        }

    @staticmethod
    def from_json(data: object) -> "Layout":
        """Reads what `to_json` wrote.

        Raises:
          LayoutError: `data` is not a layout, or says what this version does not know, without
            which it would be another; the message names the field.
        """
        if not isinstance(data, dict):
            raise LayoutError(f"a layout is a JSON object, got {type(data).__name__}")
        if unknown := sorted(set(data) - _FIELDS):
            raise LayoutError(
                f"a layout has the fields {unknown}, this version knows {sorted(_FIELDS)}: use the"
                " autoshard that wrote it, or search again"
            )
        try:
            return Layout(
                mesh=tuple((str(name), int(size)) for name, size in data["mesh"]),
                compute=rules(data["compute"]),
                storage=rules(data["storage"]),
                giving_way=_giving_way(data),
                whole=_whole(data),
                small_replicated=bool(data.get("small_replicated", False)),
                whole_into_loops=bool(data.get("whole_into_loops", False)),
                as_written=bool(data["as_written"]),
                wording=Wording(data.get("wording", "lean")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(f"not a layout: {error!r} in {json.dumps(data)[:200]}") from error


_FIELDS = {
    *(field.name for field in dataclasses.fields(Layout)),
    *("occurrences", "small_whole"),  # until 0.1
}


def _giving_way(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a layout's JSON; until 0.1 it said `occurrences`, with 1 for each that does."""
    if "giving_way" in data:
        if not isinstance(data["giving_way"], list):
            raise TypeError("giving_way is a list of axes")
        return tuple(sorted(map(str, data["giving_way"])))
    return tuple(sorted(str(axis) for axis, given in data["occurrences"].items() if int(given)))


def _whole(data: Mapping[str, object]) -> Whole:
    """Of a layout's JSON; until 0.1 it said `small_whole`, true or false."""
    return Whole(str(data.get("whole", "small" if data.get("small_whole") else "nothing")))


def _adjacent(to: tuple[str, ...], first: str, second: str) -> bool:
    """Whether a rule uses the two mesh axes together, in order, or not at all."""
    if first not in to and second not in to:
        return True
    return first in to and second in to and to.index(second) == to.index(first) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout plus one value for each knob: what is asked for, judged and planned.

    Attributes:
      layout: a canonical layout.
      knobs: (name, value) sorted by name; values are JSON scalars.
    """

    layout: Layout
    knobs: tuple[tuple[str, str | int | float | bool | None], ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"layout": self.layout.to_json(), "knobs": dict(self.knobs)}

    @staticmethod
    def from_json(data: object) -> "Candidate":
        if not isinstance(data, dict) or not isinstance(data.get("knobs"), dict):
            raise LayoutError(f"not a candidate: {json.dumps(data)[:200]}")
        return Candidate(
            layout=Layout.from_json(data.get("layout")), knobs=tuple(sorted(data["knobs"].items()))
        )

    def worded(self, wording: Wording) -> "Candidate":
        """The same layout, put into the program by other constraints."""
        layout = dataclasses.replace(self.layout, wording=wording)
        return dataclasses.replace(self, layout=layout)

    @property
    def key(self) -> str:
        """One line of JSON, equal exactly for equal candidates."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
