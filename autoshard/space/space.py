"""The space of one program on one target: enumerate, sample, contains."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping

from autoshard.errors import LayoutError
from autoshard.program.axes import Axes, Dimensions, LogicalAxis
from autoshard.program.program import Program
from autoshard.program.sites import LoopPosition, ParamUse, Site
from autoshard.records.layout import Candidate, Gather, Layout, MeshShape, Spec, rules
from autoshard.space.annotated import AnnotatedStep
from autoshard.space.pinned import why_indivisible
from autoshard.space.small_parameters import small_leaves
from autoshard.space.specs import Idle, SiteGroups, Specs, grouped, resolve

_KEPT_SPECS = 64

Knobs = tuple[tuple[str, str | int | float | bool | None], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All candidates for one program (one value of every knob).

    Attributes:
      meshes: allowed mesh shapes.
      pinned: logical axis -> mesh axes, for compute and storage, as the user fixed them.
      used_leaves: the state leaves that `Gather.PARAMS_REPLICATED` speaks of, by index.
      fixed_leaves: state leaf index -> spec, as the user fixed them.
      annotated: the step with the user's annotations, where they name a mesh of this size.
    """

    program: Program
    axes: Axes
    sites: tuple[Site, ...]
    meshes: tuple[MeshShape, ...]
    used_leaves: frozenset[int] = frozenset()
    pinned: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fixed_leaves: tuple[tuple[int, Spec], ...] = ()
    annotated: AnnotatedStep | None = None
    # The logical axes of each array to which a level of `Layout.gather` gives other rules.
    _held: dict[Gather, frozenset[frozenset[str]]] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    # The logical axes that lie along an array which rules divide: not the words of a PRNG key.
    _ruled: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    # The logical axes of the small arrays of the state that do not hold examples.
    _small: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    # The logical axes that lie along an array of the state.
    _stored: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    # The logical axes, but for the batch's, of what `Layout.gather_loop_inputs` speaks of.
    _looped: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    # Of `Axes.meetings` those in which the first may give way; the batch does to others anyway.
    _rivals: frozenset[tuple[str, str]] = dataclasses.field(init=False, repr=False, compare=False)
    _groups: SiteGroups = dataclasses.field(init=False, repr=False, compare=False)
    # Of the layouts last asked for: a layout is asked about several times in a row.
    _specs: dict[Layout, Specs] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        fixed = {i for i, _ in self.fixed_leaves}
        small = frozenset(small_leaves(self.program, self.axes))
        used: dict[ParamUse, list[Dimensions]] = {where: [] for where in ParamUse}
        for site in self.sites:
            used[site.used].append(self.axes.sites.get(site.index, ()))
        held = {
            Gather.SMALL_REPLICATED: [self.axes.inputs[i] for i in small - fixed],
            Gather.PER_STEP: used[ParamUse.ENTERING],
            Gather.PARAMS_REPLICATED: [
                self.axes.inputs[i] for i in self.used_leaves - small - fixed
            ]
            + used[ParamUse.OUTSIDE]
            + used[ParamUse.INSIDE],
        }
        found = {whole: _axes_of(arrays) for whole, arrays in held.items()}
        object.__setattr__(self, "_held", found)
        inputs = zip(self.program.inputs, self.axes.inputs, strict=True)
        ruled = [*(dims[: len(leaf.shape)] for leaf, dims in inputs), *self.axes.sites.values()]
        object.__setattr__(self, "_ruled", frozenset().union(*_axes_of(ruled)))
        stored = _axes_of(self.axes.inputs[: len(self.program.state)])
        object.__setattr__(self, "_stored", frozenset().union(*stored))
        batch = {axis.name for axis in self.axes.axes if axis.is_batch}
        replicable = [held for held in found[Gather.SMALL_REPLICATED] if not held & batch]
        object.__setattr__(self, "_small", frozenset().union(*replicable))
        looped = [
            self.axes.sites.get(site.index, ())
            for site in self.sites
            if site.looped is LoopPosition.BEFORE
        ]
        object.__setattr__(self, "_looped", frozenset().union(*_axes_of(looped)) - batch)
        rivals = frozenset(
            (first, second)
            for first, second in self.axes.meetings
            if (first in batch) == (second in batch)
        )
        object.__setattr__(self, "_rivals", rivals)
        object.__setattr__(self, "_groups", grouped(self.axes, self.sites))

    @property
    def knobs(self) -> Knobs:
        return self.program.knobs

    def shardable(self) -> tuple[LogicalAxis, ...]:
        """The axes a rule may name: no loop axes, of an array, and some mesh axis divides them."""
        sizes = {size for mesh in self.meshes for _, size in mesh}
        pinned = {axis for axis, _ in self.pinned}
        return tuple(
            a
            for a in self.axes.axes
            if not a.is_loop
            and a.name not in pinned
            and a.name in self._ruled
            and any(size % n == 0 for size in a.sizes for n in sizes)
        )

    def specs(self, layout: Layout) -> Specs:
        """Every sharding of a layout."""
        if layout.as_annotated:
            if self.annotated is None:
                raise LayoutError("the step has no constraints of its own to keep")
            return self.annotated.specs
        if layout not in self._specs:
            if len(self._specs) >= _KEPT_SPECS:
                del self._specs[next(iter(self._specs))]
            self._specs[layout] = resolve(
                self.program,
                self.axes,
                self._groups,
                layout,
                used_leaves=self.used_leaves,
                fixed_leaves=dict(self.fixed_leaves),
            )
        return self._specs[layout]

    def canonical(self, layout: Layout) -> Layout:
        """The one form a layout has in this space.

        Mesh axes that a step or `fix` names do not merge, nor do those of a rule of which some
        dimension takes only the first; the only mesh there is keeps its shape.
        """
        fixed = {m for _, to in self.pinned for m in to}
        fixed |= {m for _, spec in self.fixed_leaves for dim in spec for m in dim}
        fixed |= self._taken_in_part(layout)
        if layout.small_replicated and not self.divides_small(layout):
            least = Gather.SMALL_REPLICATED if layout.gather is Gather.PER_USE else layout.gather
            layout = dataclasses.replace(layout, small_replicated=False, gather=least)
        layout = dataclasses.replace(layout, gather=self._least_gather(layout))
        found = layout.canonical(frozenset(fixed))
        contested = self.contested(dict(found.activation_rules), dict(found.state_rules))
        chosen = tuple(a for a in found.conflict_losers if a in contested)
        into_loops = found.gather_loop_inputs and self.enters_loops(found)
        found = dataclasses.replace(found, conflict_losers=chosen, gather_loop_inputs=into_loops)
        only = self.meshes[0] if len(self.meshes) == 1 else self.program.pinned_mesh
        if only is None or layout.as_annotated:
            return found
        return found.spread_over(only) or found

    def _least_gather(self, layout: Layout) -> Gather:
        """The level itself where it gives some array other rules, else the first that says so much.

        Every other level includes `Gather.SMALL_REPLICATED`.
        """
        compute, storage = dict(layout.activation_rules), dict(layout.state_rules)
        other = {a for a in {*compute, *storage} if compute.get(a) != storage.get(a)}

        def matters(gather: Gather) -> bool:
            if gather is Gather.SMALL_REPLICATED and layout.small_replicated:
                return False
            return any(held & other for held in self._held[gather])

        if layout.gather is Gather.PER_USE or matters(layout.gather):
            return layout.gather
        return Gather.SMALL_REPLICATED if matters(Gather.SMALL_REPLICATED) else Gather.PER_USE

    def divides_small(self, layout: Layout) -> bool:
        """Whether `Layout.small_replicated` could say something: compute rules divide small arrays.

        Not where the user fixed such a rule.
        """
        pinned = {axis for axis, _ in self.pinned}
        ruled = self._small.intersection(axis for axis, to in layout.activation_rules if to)
        return bool(ruled) and not ruled & pinned

    def enters_loops(self, layout: Layout) -> bool:
        """Whether `Layout.gather_loop_inputs` could say something: a rule divides what it names."""
        return any(to and axis in self._looped for axis, to in layout.activation_rules)

    def _taken_in_part(self, layout: Layout) -> set[str]:
        """Mesh axes of rules that divide some dimension only by a prefix: 6 by x=2 of x=2, y=4."""
        found: set[str] = set()
        several = [
            (a, to) for a, to in (*layout.activation_rules, *layout.state_rules) if len(to) > 1
        ]
        if not several:
            return found
        extents = {a.name: a.sizes for a in self.axes.axes}
        sizes = layout.sizes
        for axis, to in several:
            ways = math.prod(sizes[m] for m in to)
            if any(n % ways and n % sizes[to[0]] == 0 for n in extents.get(axis, ())):
                found |= set(to)
        return found

    def candidate(self, layout: Layout) -> Candidate:
        return Candidate(layout=self.canonical(layout), knobs=self.knobs)

    def layout(
        self,
        mesh: MeshShape,
        compute: Mapping[str, tuple[str, ...]],
        storage: Mapping[str, tuple[str, ...]],
        conflict_losers: Iterable[str] = (),
        gather: Gather = Gather.PER_USE,
        small_replicated: bool = False,
        gather_loop_inputs: bool = False,
    ) -> Layout:
        """A canonical layout with the pinned rules put in."""
        names = {name for name, _ in mesh}
        pinned = {a: to for a, to in self.pinned if set(to) <= names}
        return self.canonical(
            Layout(
                mesh=mesh,
                activation_rules=rules({**compute, **pinned}),
                state_rules=rules(
                    {**storage, **{a: to for a, to in pinned.items() if a in self._stored}}
                ),
                conflict_losers=tuple(conflict_losers),
                gather=gather,
                small_replicated=small_replicated,
                gather_loop_inputs=gather_loop_inputs,
            )
        )

    def effective(self, layout: Layout) -> Layout:
        """The layout without the rules that shard nothing, but for those that the user fixed."""
        idle = self._idle(layout)
        spared = {
            storage: {axis for of_storage, axis, _ in idle if of_storage == storage}
            for storage in (False, True)
        }
        return self.canonical(
            dataclasses.replace(
                layout,
                activation_rules=tuple(
                    rule for rule in layout.activation_rules if rule[0] not in spared[False]
                ),
                state_rules=tuple(
                    rule for rule in layout.state_rules if rule[0] not in spared[True]
                ),
            )
        )

    def _idle(self, layout: Layout) -> list[Idle]:
        """The rules that shard nothing; storage rules that the user fixed may, on higher levels."""
        idle = self.specs(layout).idle
        if layout.gather is Gather.PER_USE:
            return list(idle)
        pinned = {axis for axis, _ in self.pinned}
        return [rule for rule in idle if not rule.storage or rule.axis not in pinned]

    def contains(self, candidate: Candidate) -> str | None:
        """None if the candidate belongs to the space, else the reason why not."""
        layout = candidate.layout
        if candidate.knobs != self.knobs:
            return f"knobs are {dict(candidate.knobs)}, this space has {dict(self.knobs)}"
        count = math.prod(n for _, n in self.meshes[0]) if self.meshes else 1
        if layout.as_annotated:
            return self._why_not_as_annotated()
        if layout.device_count != count:
            return f"the mesh has {layout.device_count} devices, the target {count}"
        own = self.program.pinned_mesh
        if own is not None and layout.mesh != own:
            return (
                f"the step names the mesh axes of {dict(own)} itself, at"
                f" {', '.join(self.program.pins[:3])}: no other mesh can run it"
            )
        if len(self.meshes) == 1 and layout.mesh != self.meshes[0]:
            return f"the mesh is fixed to {dict(self.meshes[0])}"
        known = {a.name: a for a in self.axes.axes}
        for axis, to in (*layout.activation_rules, *layout.state_rules):
            if axis not in known:
                return f"no logical axis {axis!r}; the axes are {', '.join(known)}"
            if known[axis].is_loop:
                return f"{axis} is a loop axis: a loop takes one slice of it at a time"
            del to
        for axis, to in self.pinned:
            tables = [layout.activation_rules, *[layout.state_rules] * (axis in self._stored)]
            if any(dict(table).get(axis, ()) != to for table in tables):
                return f"{axis} is fixed to {', '.join(to)}"
        for i, spec in self.fixed_leaves:
            reason = why_indivisible(self.program.state[i], spec, layout.sizes)
            if reason is not None:
                return reason
        specs = self.specs(layout)
        if idle := self._idle(layout):
            return str(idle[0])
        sizes = layout.sizes
        batch_rules = {
            a.name: dict(layout.activation_rules)[a.name]
            for a in self.axes.axes
            if a.is_batch and a.name in dict(layout.activation_rules)
        }
        first = len(self.program.state)  # the state is stored as it is, whatever lies along it
        for leaf, dims, spec in zip(
            self.program.inputs[first:],
            self.axes.inputs[first:],
            specs.inputs[first:],
            strict=True,
        ):
            wanted = {m for dim in dims for axis, _ in dim for m in batch_rules.get(axis or "", ())}
            got = {m for dim in spec for m in dim}
            if wanted - got:
                return (
                    f"{leaf.path}{list(leaf.shape)} cannot be divided by"
                    f" {', '.join(f'{m}={sizes[m]}' for m in sorted(wanted - got))}"
                )
        return None

    def _why_not_as_annotated(self) -> str | None:
        """What the user fixed holds for the author's own layout too."""
        if self.annotated is None:
            return "the step has no constraints of its own to keep"
        specs = self.annotated.specs
        sizes = dict(specs.mesh)
        wide = [n for n in sizes.values() if n > 1]
        if len(self.meshes) == 1 and wide != [n for _, n in self.meshes[0] if n > 1]:
            return (
                f"the mesh is fixed to {dict(self.meshes[0])}, and the step's own constraints are"
                f" for {sizes}"
            )
        for i, spec in self.fixed_leaves:
            if specs.inputs[i] != spec:
                return f"the step's own constraints put {self.program.state[i].path} elsewhere"
        for axis, to in self.pinned:
            if not sizes.keys() >= set(to):
                return (
                    f"{axis} is fixed to {', '.join(to)}, the step's own constraints name {sizes}"
                )
            ways = math.prod(sizes[m] for m in to)
            for leaf, dims, placed in zip(
                self.program.inputs, self.axes.inputs, specs.inputs, strict=True
            ):
                holding = [
                    set(got) >= set(to)
                    for dim, got in zip(dims, placed, strict=False)  # a key's words have no spec
                    if any(name == axis and size % ways == 0 for name, size in dim)
                ]
                if holding and not any(holding):  # of two such dimensions one takes it
                    return f"{axis} is fixed to {', '.join(to)}, not so {leaf.path} as written"
        return None

    def options(self, axis: LogicalAxis, mesh: MeshShape) -> list[tuple[str, ...]]:
        """Rules an axis may take on a mesh: none, one mesh axis, or two or three in mesh order."""
        names = [name for name, size in mesh]
        sizes = dict(mesh)
        found: list[tuple[str, ...]] = [()]
        for length in range(1, len(names) + 1):
            for to in itertools.combinations(names, length):
                ways = math.prod(sizes[m] for m in to)
                if any(n % ways == 0 for n in axis.sizes):
                    found.append(to)
        return found

    def contested(self, *tables: Mapping[str, tuple[str, ...]]) -> list[str]:
        """The axes that may give way (`Layout.conflict_losers`), in the order of `axes`.

        Those that stand in some array before another, or before themselves, that claims a mesh axis
        which they claim too.

        Args:
          tables: rules by axis; those that the user fixed may be left out.
        """
        found: set[str] = set()
        for table in tables:
            ruled = {axis: set(to) for axis, to in (dict(self.pinned) | dict(table)).items() if to}
            found |= {
                first
                for first, second in itertools.product(ruled, repeat=2)
                if (first, second) in self._rivals and ruled[first] & ruled[second]
            }
        return [axis.name for axis in self.axes.axes if axis.name in found]

    def size(self) -> int:
        """How many layouts `enumerate` goes through at most (before equal ones are told)."""
        total = 0
        giving = {first for first, _ in self._rivals}
        for mesh in self.meshes:
            one: int = 2 ** len(giving.intersection(axis for axis, _ in self.pinned))
            for axis in self.shardable():
                n = len(self.options(axis, mesh))
                ways = n if axis.is_data else n * n
                # All but the one without a rule may leave a choice of giving way.
                one *= 2 * ways - 1 if axis.name in giving else ways
            total += one
        levels = 1 + sum(bool(held) for held in self._held.values())
        return total * levels * (2 if self._small else 1) * (2 if self._looped else 1)

    def enumerate(self) -> Iterator[Candidate]:
        """Every candidate of the space, each once."""
        seen: set[Layout] = set()
        for mesh in self.meshes:
            axes = self.shardable()
            choices = [
                [(c, s) for c in opts for s in ([c] if a.is_data else opts)]
                for a in axes
                for opts in [self.options(a, mesh)]
            ]
            for picked in itertools.product(*choices):
                compute = {a.name: c for a, (c, _) in zip(axes, picked, strict=True)}
                pairs = zip(axes, picked, strict=True)
                storage = {a.name: s for a, (_, s) in pairs if not a.is_data}
                contested = self.contested(compute, storage)
                flips = itertools.product((False, True), repeat=len(contested))
                small = (False, True) if self._small else (False,)
                into_loops = (False, True) if self._looped else (False,)
                for flipped, gather, replicated, into in itertools.product(
                    flips, Gather, small, into_loops
                ):
                    way = itertools.compress(contested, flipped)
                    layout = self.layout(mesh, compute, storage, way, gather, replicated, into)
                    if layout not in seen:
                        seen.add(layout)
                        candidate = self.candidate(layout)
                        if self.contains(candidate) is None:
                            yield candidate

    def sample(self, rng: random.Random, tries: int = 100) -> Candidate | None:
        """A random candidate, None if none of `tries` draws belongs to the space."""
        for _ in range(tries):
            mesh = rng.choice(self.meshes)
            compute: dict[str, tuple[str, ...]] = {}
            storage: dict[str, tuple[str, ...]] = {}
            for axis in self.shardable():
                options = self.options(axis, mesh)
                to = rng.choice(options) if axis.is_batch or rng.random() < 0.4 else ()
                compute[axis.name] = to
                if not axis.is_data:
                    storage[axis.name] = to if rng.random() < 0.6 else rng.choice(options)
            gather = rng.choice(list(Gather))
            contested = self.contested(compute, storage)
            conflict_losers = [axis for axis in contested if rng.randrange(2)]
            small = bool(self._small) and rng.random() < 0.5
            into_loops = bool(self._looped) and rng.random() < 0.5
            layout = self.layout(mesh, compute, storage, conflict_losers, gather, small, into_loops)
            candidate = self.candidate(layout)
            if self.contains(candidate) is None:
                return candidate
        return None


def _axes_of(arrays: Iterable[Dimensions]) -> frozenset[frozenset[str]]:
    """The logical axes of each array, equal ones once."""
    return frozenset(
        frozenset(axis for dim in dims for axis, _ in dim if axis is not None) for dims in arrays
    ) - {frozenset()}
