"""Layouts: a mesh shape with activation rules and state rules, their canonical form and JSON."""

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


class Constraints(enum.StrEnum):
    """How many sharding constraints say a layout to the partitioner; each gives the same partition.

    They are other programs to the compiler, and may be some percent faster or slower. They are
    autoshard's own constraints; the user's are another matter (`Layout.as_annotated`).
    """

    USUAL = "usual"  # at the state, at parameters where they are used, and what more is needed
    MINIMAL = "minimal"  # such that no single one can be spared
    ALL = "all"  # at every site


class Gather(enum.StrEnum):
    """When a parameter that only state rules divide is brought together, in order of memory.

    Leaves that the user fixes stay as they are fixed.
    """

    PER_USE = "per_use"  # where it is used, in each iteration of a loop
    SMALL_REPLICATED = (
        "small_replicated"  # the smallest arrays, at most 1 % of the state, never cut
    )
    PER_STEP = "per_step"  # once a step, before the loops that use it
    PARAMS_REPLICATED = "params_replicated"  # state rules cut moments alone (ZeRO-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a program is spread over devices.

    Attributes:
      mesh: (mesh axis, size) pairs, major to minor over the target's device order.
      activation_rules: for activations and their cotangents, and parameters where they are used.
      state_rules: for the stored state, gradients and the optimizer's arithmetic.
      conflict_losers: logical axes that give a mesh axis up where several dimensions of one array
        claim it, whether these hold the same logical axis or another; without order.
      gather: when parameters that are stored in parts are brought together.
      small_replicated: no rule divides the small arrays of the state (`Gather.SMALL_REPLICATED`),
        neither where they are stored nor where they are used.
      gather_loop_inputs: activations that a loop's products use and that the loop does not change
        are divided along the batch alone before the loop: gathered once, not in each iteration.
      as_annotated: keep the user's own sharding constraints and add none; the rules are then empty.
      constraints: how many constraints put the layout into the program.
    """

    mesh: tuple[tuple[str, int], ...]
    activation_rules: Rules = ()
    state_rules: Rules = ()
    conflict_losers: tuple[str, ...] = ()
    gather: Gather = Gather.PER_USE
    small_replicated: bool = False
    gather_loop_inputs: bool = False
    as_annotated: bool = False
    constraints: Constraints = Constraints.USUAL

    def __post_init__(self) -> None:
        names = [name for name, _ in self.mesh]
        if len(set(names)) != len(names):
            raise LayoutError(f"mesh axes must have distinct names, got {names}")
        for kind, table in (("activation", self.activation_rules), ("state", self.state_rules)):
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
          apart: mesh axes that something other than the rules names. They never merge.
        """
        keep = [(name, size) for name, size in self.mesh if size > 1]
        alive = {name for name, _ in keep}
        compute = {a: tuple(m for m in to if m in alive) for a, to in self.activation_rules}
        storage = {a: tuple(m for m in to if m in alive) for a, to in self.state_rules}
        tables = (compute, storage)
        i = 0
        while i + 1 < len(keep) and not self.as_annotated:
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
            activation_rules=rules(compute),
            state_rules=rules(storage),
            conflict_losers=tuple(sorted(set(self.conflict_losers))),
            gather=self.gather if rules(storage) != rules(compute) else Gather.PER_USE,
            small_replicated=self.small_replicated and any({**compute, **storage}.values()),
            gather_loop_inputs=self.gather_loop_inputs and bool(keep) and not self.as_annotated,
            as_annotated=self.as_annotated,
            constraints=Constraints.USUAL if self.as_annotated or not keep else self.constraints,
        )

    def spread_over(self, mesh: tuple[tuple[str, int], ...]) -> "Layout | None":
        """The same layout on `mesh`, before `canonical` merged axes; None on another mesh."""
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
            activation_rules=rules(
                {a: [x for m in to for x in wide[m]] for a, to in self.activation_rules}
            ),
            state_rules=rules({a: [x for m in to for x in wide[m]] for a, to in self.state_rules}),
        )

    def to_json(self) -> dict[str, object]:
        """Plain JSON: names, never positions; `mesh` is a list of pairs because order matters."""
        return {
            "mesh": [[name, size] for name, size in self.mesh],
            "activation_rules": {axis: list(to) for axis, to in self.activation_rules},
            "state_rules": {axis: list(to) for axis, to in self.state_rules},
            "conflict_losers": list(self.conflict_losers),
            **({"gather": str(self.gather)} if self.gather != Gather.PER_USE else {}),
            **({"small_replicated": True} if self.small_replicated else {}),
            **({"gather_loop_inputs": True} if self.gather_loop_inputs else {}),
            "as_annotated": self.as_annotated,
            **(
                {"constraints": str(self.constraints)}
                if self.constraints != Constraints.USUAL
                else {}
            ),
        }

    @staticmethod
    def from_json(data: object) -> "Layout":
        """Reads what `to_json` wrote.

        Raises:
          LayoutError: `data` is not a layout, or has a field that this version does not know. The
            message names the field.
        """
        if not isinstance(data, dict):
            raise LayoutError(f"a layout is a JSON object, got {type(data).__name__}")
        data = _in_new_words(data)
        if unknown := sorted(set(data) - _FIELDS):
            raise LayoutError(
                f"a layout has the fields {unknown}, this version knows {sorted(_FIELDS)}: use the"
                " autoshard that wrote it, or search again"
            )
        try:
            if not isinstance(data["conflict_losers"], list):
                raise TypeError("conflict_losers is a list of axes")
            return Layout(
                mesh=tuple((str(name), int(size)) for name, size in data["mesh"]),
                activation_rules=rules(data["activation_rules"]),
                state_rules=rules(data["state_rules"]),
                conflict_losers=tuple(sorted(map(str, data["conflict_losers"]))),
                gather=Gather(data.get("gather", Gather.PER_USE)),
                small_replicated=bool(data.get("small_replicated", False)),
                gather_loop_inputs=bool(data.get("gather_loop_inputs", False)),
                as_annotated=bool(data["as_annotated"]),
                constraints=Constraints(data.get("constraints", Constraints.USUAL)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(f"not a layout: {error!r} in {json.dumps(data)[:200]}") from error


_FIELDS = {field.name for field in dataclasses.fields(Layout)}
_OLD_NAMES = {
    "compute": "activation_rules",
    "storage": "state_rules",
    "giving_way": "conflict_losers",
    "whole": "gather",
    "whole_into_loops": "gather_loop_inputs",
    "as_written": "as_annotated",
    "wording": "constraints",
}
_OLD_VALUES = {
    "gather": {
        "nothing": "per_use",
        "small": "small_replicated",
        "once": "per_step",
        "used": "params_replicated",
    },
    "constraints": {"lean": "usual", "least": "minimal"},
}


def _in_new_words(data: Mapping[str, Any]) -> dict[str, Any]:
    """A layout's JSON as this version writes it, from that of 0.1 or before."""
    found = {_OLD_NAMES.get(name, name): value for name, value in data.items()}
    for name, words in _OLD_VALUES.items():
        if name in found:
            found[name] = words.get(found[name], found[name])
    # Before 0.1: 1 for each axis that loses, and whether small arrays are whole.
    if isinstance(given := found.pop("occurrences", None), dict):
        losers = [str(axis) for axis, lost in given.items() if lost]
        found.setdefault("conflict_losers", losers)
    if found.pop("small_whole", False):
        found.setdefault("gather", Gather.SMALL_REPLICATED)
    return found


def _adjacent(to: tuple[str, ...], first: str, second: str) -> bool:
    """Whether a rule uses the two mesh axes together, in order, or not at all."""
    if first not in to and second not in to:
        return True
    return first in to and second in to and to.index(second) == to.index(first) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout plus one value for each knob: what a search judges and plans.

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

    def with_constraints(self, constraints: Constraints) -> "Candidate":
        """The same layout with another constraint density."""
        layout = dataclasses.replace(self.layout, constraints=constraints)
        return dataclasses.replace(self, layout=layout)

    @property
    def key(self) -> str:
        """One line of JSON, equal exactly for equal candidates."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
