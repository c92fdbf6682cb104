"""A layout applied to a program: the PartitionSpec of every input, output and site."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autoshard.program.axes import Axes, Dimensions
from autoshard.program.program import Program
from autoshard.program.sites import LoopPosition, ParamUse, Site
from autoshard.records.layout import Constraints, Gather, Layout, Spec
from autoshard.space.small_parameters import elements, loop_axes, small_elements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpec:
    """The sharding of a site: mesh axes of each dimension, and which dimensions stay open."""

    spec: Spec
    open: tuple[bool, ...]


class Idle(NamedTuple):
    """A rule of a layout that shards nothing."""

    storage: bool
    axis: str
    to: tuple[str, ...]

    def __str__(self) -> str:
        kind = "storage" if self.storage else "compute"
        return f"{kind} rule {self.axis} -> {', '.join(self.to)} shards nothing"


class Lost(NamedTuple):
    """A mesh axis that a rule asks a dimension for in vain, and why, after the array's path."""

    mesh_axis: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """Every sharding of one layout of one program.

    Attributes:
      inputs, outputs: per flat input and output (new state, then metrics).
      sites: per site index; sites left out get no constraint.
      dropped: sentences on inputs that a mesh axis does not divide though a rule asks for it, by
        divisibility or the order of factors, each once.
      idle: rules that shard nothing.
      constraints: how many of the sites are constrained in the program.
    """

    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    sites: dict[int, SiteSpec]
    dropped: tuple[str, ...]
    idle: tuple[Idle, ...]
    constraints: Constraints = Constraints.USUAL

    def key(self) -> tuple[object, ...]:
        """Equal for layouts that put the same shardings everywhere, in the same words."""
        sites = tuple(sorted((i, s.spec, s.open) for i, s in self.sites.items()))
        return (self.mesh, self.inputs, self.outputs, sites, self.constraints)


class Asked(NamedTuple):
    """All that a layout's rules ask of a site.

    Attributes:
      storage, of_state, used, looped, batch_first, passing: as of the `Site`.
      looked_up: for a table on its way into a lookup, the dimensions of what is found; else ().
    """

    dims: Dimensions
    storage: bool
    of_state: bool
    used: ParamUse
    looped: LoopPosition
    batch_first: bool
    passing: bool
    looked_up: Dimensions


SiteGroups = dict[Asked, tuple[int, ...]]
"""The sites that a layout's rules treat alike."""


def grouped(axes: Axes, sites: Iterable[Site]) -> SiteGroups:
    """The sites that take constraints, those together that every layout treats alike."""
    by_index = {site.index: site for site in sites}
    found: dict[Asked, list[int]] = {}
    for i, dims in axes.sites.items():
        site = by_index[i]
        looked_up = axes.sites.get(site.found, ())
        asked = Asked(
            dims=dims,
            storage=site.storage,
            of_state=site.of_state,
            used=site.used,
            looped=site.looped,
            batch_first=site.batch_first,
            passing=site.passing,
            looked_up=looked_up,
        )
        found.setdefault(asked, []).append(i)
    return {asked: tuple(indices) for asked, indices in found.items()}


_WHOLE_SITES: dict[Gather, frozenset[ParamUse]] = {
    Gather.PER_USE: frozenset(),
    Gather.SMALL_REPLICATED: frozenset(),
    Gather.PER_STEP: frozenset({ParamUse.INSIDE}),
    Gather.PARAMS_REPLICATED: frozenset({ParamUse.OUTSIDE, ParamUse.INSIDE}),
}
"""Sites that take compute rules though they are storage."""


class _Resolver:
    """Turns rules into specs; remembers which rules did anything."""

    def __init__(self, layout: Layout, small: int, axes: Axes):
        self.layout = layout
        self.small = small
        self.loops = loop_axes(axes)
        self.batch = frozenset(a.name for a in axes.axes if a.is_batch)
        self.sizes = layout.sizes
        # Mesh axes as the canonical layout has them: all spellings of one say the same.
        self.counted = frozenset(name for name, _ in layout.canonical().mesh)
        self.tables = {True: dict(layout.state_rules), False: dict(layout.activation_rules)}
        self.conflict_losers = frozenset(layout.conflict_losers)
        self.used: set[tuple[bool, str]] = set()
        self._memo: dict[
            tuple[Dimensions, bool, bool, bool], tuple[SiteSpec, tuple[Lost, ...]]
        ] = {}

    def site(self, asked: Asked) -> SiteSpec | None:
        """None for a value that passes from one sharding to the same.

        None too for a table of which a device looks up less than it would have to hold: there the
        compiler may send what is found, not the table. What is made of the state alone for each
        example takes compute rules: keys of the state draw it, but it meets the batch.
        """
        dims, storage, of_state, used, looped, batch_first, passing, looked_up = asked
        drawn = self._of_examples(dims)  # noise, masks
        if (storage or of_state) and self._is_replicated(dims):
            return None if used is ParamUse.ENTERING else _replicated(dims)
        if used is ParamUse.ENTERING:
            if self.layout.gather is not Gather.PER_STEP:
                return None
            once, stored = (self._known(dims, of, batch_first)[0] for of in (False, True))
            return once if once != stored else None
        if self.layout.gather_loop_inputs and looped is not LoopPosition.NOT:
            divided, batch_alone = (
                self._known(dims, False, batch_first, alone)[0] for alone in (False, True)
            )
            # Before the loop there is nothing to say of what no rule but the batch's divides.
            return batch_alone if looped is LoopPosition.INSIDE or batch_alone != divided else None
        if looped is LoopPosition.BEFORE:
            return None
        storage = storage and not drawn and used not in _WHOLE_SITES[self.layout.gather]
        found, _ = self._known(dims, storage, batch_first)
        if passing and found == self._known(dims, storage, not batch_first)[0]:
            return None
        if looked_up and self._here(looked_up) < self._here(dims):
            return None
        return found

    def _here(self, dims: Dimensions) -> float:
        """How many elements a device has of a value that takes compute rules."""
        found, _ = self._known(dims, False, True)
        whole = math.prod(size for dim in dims for _, size in dim)
        return whole / math.prod(self.sizes[m] for axes in found.spec for m in axes)

    def _of_examples(self, dims: Dimensions) -> bool:
        return any(axis in self.batch for dim in dims for axis, _ in dim)

    def _is_replicated(self, dims: Dimensions) -> bool:
        """Whether no rule divides an array that is of the state, or made of it alone."""
        if not self.layout.small_replicated or self._of_examples(dims):
            return False
        return elements(dims, self.loops) <= self.small

    def leaf(
        self, dims: Dimensions, of_state: bool, storage: bool
    ) -> tuple[Spec, tuple[Lost, ...]]:
        """The spec of an input, and what its rules ask for in vain."""
        if of_state and self._is_replicated(dims):
            return _replicated(dims).spec, ()
        found, lost = self._known(dims, storage, False)
        return found.spec, lost

    def _known(
        self, dims: Dimensions, storage: bool, batch_first: bool, batch_alone: bool = False
    ) -> tuple[SiteSpec, tuple[Lost, ...]]:
        key = (dims, storage, batch_first, batch_alone)
        if key not in self._memo:
            self._memo[key] = self._resolve(*key)
        return self._memo[key]

    def _resolve(
        self, dims: Dimensions, storage: bool, batch_first: bool, batch_alone: bool
    ) -> tuple[SiteSpec, tuple[Lost, ...]]:
        """The spec of a value, and what its rules ask for in vain.

        Args:
          batch_alone: whether the rules of batch axes alone count.
        """
        storage = storage and elements(dims, self.loops) > self.small
        table = self.tables[storage]
        if batch_alone:
            table = {axis: to for axis, to in table.items() if axis in self.batch}
        claims = [[table.get(axis, ()) if axis is not None else () for axis, _ in d] for d in dims]
        taken: set[str] = set()
        spec: list[tuple[str, ...]] = [() for _ in dims]
        is_open = [False for _ in dims]
        dropped: list[Lost] = []
        for d in self._in_turn(dims, claims, storage, batch_first):
            here: list[str] = []
            blocked = False
            lost = False
            for (axis, size), rule in zip(dims[d], claims[d], strict=True):
                if rule and blocked:
                    lost = True
                    why = f"[{d}]: {axis} lies inside a larger part"
                    dropped += [Lost(m, why) for m in rule]
                    rule = ()
                got: list[str] = []
                for m in rule:
                    if m in taken:
                        continue
                    if size % (math.prod(self.sizes[x] for x in got) * self.sizes[m]):
                        why = f"[{d}]: {axis} of {size} is not divisible by {m}={self.sizes[m]}"
                        dropped.append(Lost(m, why))
                        break
                    got.append(m)
                if got and axis is not None:
                    self.used.add((storage, axis))
                taken.update(got)
                here += got
                if math.prod(self.sizes[x] for x in got) < size:
                    blocked = True
            spec[d] = tuple(here)
            is_open[d] = not _is_known(dims[d]) or (lost and not here)
        return SiteSpec(spec=tuple(spec), open=tuple(is_open)), tuple(dropped)

    def _in_turn(
        self,
        dims: Dimensions,
        claims: list[list[tuple[str, ...]]],
        storage: bool,
        batch_first: bool,
    ) -> list[int]:
        """The dimensions in the order in which they take mesh axes.

        By compute rules, where the batch is not first, who asks for fewer comes first, and the
        batch last among equals: batch over x+y and experts over y give experts y and the batch x.
        Else the dimensions stand as they are, but for those that give way to later ones.
        """

        def turn(d: int) -> tuple[int, bool, int]:
            ruled = [
                (axis, rule) for (axis, _), rule in zip(dims[d], claims[d], strict=True) if rule
            ]
            way = -d if any(axis in self.conflict_losers for axis, _ in ruled) else -len(dims)
            if storage:
                return 0, False, way
            asked = [
                (
                    0 if batch_first else len(self.counted.intersection(rule)),
                    (axis in self.batch) != batch_first,
                )
                for axis, rule in ruled
            ]
            return *min(asked, default=(0, False)), way

        return sorted(range(len(dims)), key=turn)


def _replicated(dims: Dimensions) -> SiteSpec:
    return SiteSpec(spec=tuple(() for _ in dims), open=tuple(not _is_known(dim) for dim in dims))


def _is_known(dim: tuple[tuple[str | None, int], ...]) -> bool:
    """Whether a dimension has a logical axis, or is of one element."""
    return not dim or any(axis is not None for axis, _ in dim)


def resolve(
    program: Program,
    axes: Axes,
    sites: SiteGroups,
    layout: Layout,
    used_leaves: frozenset[int] = frozenset(),
    fixed_leaves: Mapping[int, Spec] | None = None,
) -> Specs:
    """Applies a layout.

    State leaves take storage rules (where the layout says so small and used ones compute rules, or
    small ones none), batch leaves compute rules. A batch leaf whose batch axis lies inside a larger
    dimension (gradient accumulation splits it) is sharded along that dimension as a whole, so that
    each process feeds its part.

    Args:
      sites: as `grouped` says them.
      used_leaves: the state leaves that `Gather.PARAMS_REPLICATED` speaks of, by index.
      fixed_leaves: the user's own spec for some state leaves, by index.
    """
    fixed = fixed_leaves or {}
    asks = layout.gather is not Gather.PER_USE or layout.small_replicated
    small = small_elements(program, axes) if asks else 0
    whole = used_leaves if layout.gather is Gather.PARAMS_REPLICATED else frozenset()
    resolver = _Resolver(layout, small, axes)
    count = len(program.state)
    inputs: list[Spec] = []
    dropped: dict[str, None] = {}
    for i, (leaf, dims) in enumerate(zip(program.inputs, axes.inputs, strict=True)):
        if i in fixed:
            inputs.append(fixed[i])
            continue
        dims = dims[: len(leaf.shape)]  # a PRNG key has one more dimension, of its words
        spec, lost = resolver.leaf(dims, i < count, i < count and i not in whole)
        if i >= count:
            spec = _with_whole_batch(resolver, axes, dims, spec)
        divided = {m for to in spec for m in to}
        dropped.update((leaf.path + x.why, None) for x in lost if x.mesh_axis not in divided)
        inputs.append(spec)
    outputs = [*inputs[:count], *(tuple(() for _ in leaf.shape) for leaf in program.metrics)]
    placed: dict[int, SiteSpec] = {}
    for asked, indices in sites.items():
        at_site = resolver.site(asked)
        if at_site and not all(at_site.open):
            placed.update(dict.fromkeys(indices, at_site))
    idle = [
        Idle(storage, axis, to)
        for storage, table in ((False, layout.activation_rules), (True, layout.state_rules))
        for axis, to in table
        if (storage, axis) not in resolver.used
    ]
    return Specs(
        mesh=layout.mesh,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sites=placed,
        dropped=tuple(dropped),
        idle=tuple(idle),
        constraints=layout.constraints,
    )


def _with_whole_batch(resolver: _Resolver, axes: Axes, dims: Dimensions, spec: Spec) -> Spec:
    """Shards the first dimension that holds a batch axis as one piece, where none is taken yet."""
    batch = {a.name for a in axes.axes if a.is_batch}
    taken = {m for to in spec for m in to}
    for d, dim in enumerate(dims):
        whole = math.prod(n for _, n in dim)
        for axis, _ in dim:
            rule = resolver.tables[False].get(axis, ()) if axis in batch and axis else ()
            fits = rule and whole % math.prod(resolver.sizes[m] for m in rule) == 0
            if fits and not spec[d] and not taken & set(rule):
                return (*spec[:d], rule, *spec[d + 1 :])
    return spec
