"""From tied factors to logical axes with names: repeated layers share theirs."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from autoshard.compat.shardy import factor_rules, stablehlo
from autoshard.program.axes import Axes, Dimensions, LogicalAxis, owned
from autoshard.program.axis_labels import labels
from autoshard.program.factors import Factor
from autoshard.program.program import Leaf, Program
from autoshard.program.sites import Site
from autoshard.program.ties import Ties


def find_axes(program: Program, module: stablehlo.Operation, sites: list[Site]) -> Axes:
    """Reads the logical axes of a flattened, sited module of `program`.

    Args:
      module: from `flattening.flatten`, its constraint operations carrying the tags of `sites`.
    """
    ruled = factor_rules.with_rules(module)
    main = stablehlo.main_function(ruled).regions[0].blocks[0]
    ties = Ties()
    arguments = [ties.of(value) for value in main.arguments]
    ties.block(main, in_loop=False)
    returned = [ties.of(v) for v in list(main.operations)[-1].operation.operands]
    for i in range(len(program.state) if program.returns_state else 0):
        for x, y in zip(arguments[i], returned[i], strict=True):
            ties.pair(x, y)  # the new state is the next step's old one
    return _Namer(program, sites, ties, arguments, returned).axes()


def _normal(path: str) -> str:
    """A path with its numbers replaced, so that repeated layers look alike."""
    return re.sub(r"\d+", "*", path)


def _short(path: str) -> str:
    """`state['params']['w'].value` -> `params.w`."""
    words = re.findall(r"[A-Za-z0-9_*]+", path)
    return ".".join(w for w in words[1:] if w != "value") or path


class _Namer:
    """Groups alike factors of repeated layers into logical axes, and names them."""

    def __init__(
        self,
        program: Program,
        sites: list[Site],
        ties: Ties,
        arguments: list[list[Factor]],
        returned: list[list[Factor]],
    ):
        self.program = program
        self.sites = sites
        self.ties = ties
        self.arguments = arguments
        self.returned = returned
        self.kin = ties.kin()
        self.order: list[Factor] = []
        self.marks: dict[Factor, list[tuple[str, int, int]]] = {}
        self.tensors: list[list[Factor]] = []
        self.weight = {leaf.path: leaf.bytes for leaf in program.state}
        self.on_state: set[Factor] = set()
        self.on_batch: set[Factor] = set()

    def axes(self) -> Axes:
        self._collect()
        batch = self._batch_factors()
        groups = self._groups(batch)
        places = self._names(groups, batch)
        names = list(places)
        axis_of = {f: name for name, group in zip(names, groups, strict=True) for f in group}
        selected = {leaf for f in self.ties.selected for leaf in f.leaves()}
        contracted = {leaf for f in self.ties.contracted for leaf in f.leaves()}
        produced = {leaf for f in self.ties.produced for leaf in f.leaves()}
        axes = tuple(
            LogicalAxis(
                name=name,
                size=max(f.size for f in group),
                sizes=tuple(sorted({f.size for f in group})),
                is_batch=any(f in batch for f in group),
                is_data=any(f in self.on_batch for f in group)
                and not any(f in self.on_state for f in group),
                is_loop=any(f.is_loop for f in group),
                is_contracted=any(f in contracted for f in group),
                is_selected=any(f in selected for f in group),
                where=tuple(
                    dict.fromkeys(
                        f"{path}[{dim}]" for f in group for path, dim, _ in self.marks.get(f, ())
                    )
                )[:8],
                repeats=len({self.kin.get(f, f) for f in group}),
            )
            for name, group in zip(names, groups, strict=True)
        )

        def dimensions(dims: list[Factor]) -> Dimensions:
            return tuple(
                tuple((axis_of.get(leaf), leaf.size) for leaf in dim.leaves() if leaf.size > 1)
                if len(dim.leaves()) > 1
                else (((axis_of.get(dim.root()), dim.size),) if dim.size > 1 else ())
                for dim in dims
            )

        by_site: dict[int, Dimensions] = {}
        for index, value in self.ties.sites:
            found = dimensions(self.ties.of(value))
            known = by_site.setdefault(index, found)
            if known != found:  # one site, calls that differ: only what agrees is known
                by_site[index] = tuple(
                    x if x == y else tuple((None, n) for _, n in x)
                    for x, y in zip(known, found, strict=True)
                )
        inputs = tuple(dimensions(d) for d in self.arguments)
        chains = tuple(
            dict.fromkeys(
                axis_of[f]
                for f in self.order
                if f in contracted
                and f in produced
                and f in self.on_state
                and f in axis_of
                and not f.is_loop
            )
        )
        label = labels(places, self._roles(axes, axis_of, batch, by_site, chains))
        meetings = dict.fromkeys(
            pair for dims in (*inputs, *by_site.values()) for pair in _meetings(dims)
        )
        return Axes(
            axes=tuple(dataclasses.replace(a, label=label[a.name]) for a in axes),
            inputs=inputs,
            outputs=tuple(dimensions(d) for d in self.returned),
            sites=by_site,
            chains=chains,
            meetings=tuple(meetings),
            opaque=tuple(dict.fromkeys(self.ties.opaque)),
        )

    def _collect(self) -> None:
        """Lists every factor in order of first appearance, with the inputs that show it."""
        seen: dict[Factor, None] = {}
        count = len(self.program.state)
        leaves: list[tuple[Leaf, list[Factor], bool]] = [
            (leaf, dims, i < count)
            for i, (leaf, dims) in enumerate(zip(self.program.inputs, self.arguments, strict=True))
        ]
        for leaf, dims, is_state in sorted(leaves, key=lambda x: x[2]):
            held = [(d, k, f) for d, dim in enumerate(dims) for k, f in enumerate(dim.leaves())]
            for d, k, f in held:
                if f.size > 1:
                    seen.setdefault(f)
                    self.marks.setdefault(f, []).append((leaf.path, d, k))
                    (self.on_state if is_state else self.on_batch).add(f)
            self.tensors.append([f for _, _, f in held])
        for index, value in self.ties.sites:
            factors = [f for dim in self.ties.of(value) for f in dim.leaves()]
            for d, f in enumerate(factors):
                if f.size > 1:
                    if f not in seen:
                        site = self.sites[index]
                        where = site.source.rsplit("/", 1)[-1] or site.operation
                        self.marks[f] = [(f"{site.operation}@{where}", d, 0)]
                    seen.setdefault(f)
            self.tensors.append(factors)
        self.order = list(seen)

    def _batch_factors(self) -> set[Factor]:
        """Along which factors examples lie: each batch leaf's first that is data, not a loop.

        Where the state holds the first of every leaf, it carries examples too. PRNG keys have none.
        """
        count = len(self.program.state)
        every = [
            [f for dim in dims for f in dim.leaves() if f.size > 1 and not f.is_loop]
            for leaf, dims in zip(self.program.batch, self.arguments[count:], strict=True)
            if not leaf.is_key
        ]
        data = [[f for f in held if f not in self.on_state] for held in every]
        return {held[0] for held in (data if any(data) else every) if held}

    def _groups(self, batch: set[Factor]) -> list[list[Factor]]:
        """Axes that repeated structure makes alike, never two that one tensor holds."""
        rivals: dict[Factor, set[Factor]] = {}
        for held in self.tensors:
            for f in held:
                rivals.setdefault(f, set()).update(g for g in held if g is not f)
        families: dict[Factor, list[Factor]] = {}
        for f in self.order:
            families.setdefault(self.kin.get(f, f), []).append(f)
        classes: dict[object, list[list[Factor]]] = {}
        ordered: list[list[Factor]] = []
        for family in families.values():
            marks = {(_normal(p), d, k) for f in family for p, d, k in self.marks.get(f, ())}
            signature: object = (
                tuple(f.size for f in family),
                any(f.is_loop for f in family),
                tuple(sorted(marks)),
            )
            if any(f in batch for f in family):
                signature = ("batch", id(family))
            others = {g for f in family for g in rivals.get(f, ())}
            alternatives = classes.setdefault(signature, [])
            for group in alternatives:
                if not any(g in others for g in group):
                    group.extend(family)
                    break
            else:
                alternatives.append(list(family))
                ordered.append(alternatives[-1])
        return ordered

    def _roles(
        self,
        axes: tuple[LogicalAxis, ...],
        axis_of: Mapping[Factor, str],
        batch: set[Factor],
        sites: Mapping[int, Dimensions],
        chains: tuple[str, ...],
    ) -> list[tuple[str, list[str]]]:
        """What axes do in the data flow: (role, axes), the surest role first."""
        data = {f for f in self.on_batch if f not in self.on_state} | batch
        state, given = (
            {axis_of[f] for f in held if f in axis_of} for held in (self.on_state, self.on_batch)
        )
        rows: dict[str, None] = {}  # of tables: examples look them up
        width: dict[str, None] = {}
        for site in self.sites:
            if site.found in sites and site.index in sites:
                table, found = _names_in(sites[site.index]), _names_in(sites[site.found])
                rows.update(dict.fromkeys(a for a in table if a in state and a not in found))
                width.update(dict.fromkeys(a for a in table if a in state and a in found))
        heads: dict[str, None] = {}
        head_dim: dict[str, None] = {}
        multiplied: set[str] = set()
        features: set[str] = set()
        for product in self.ties.products:
            left, right, ways, summed = (
                [axis_of[leaf] for f in fs for leaf in f.leaves() if leaf in axis_of]
                for fs in product
            )
            multiplied |= {*left, *right}
            activations = _holds(product.left, data), _holds(product.right, data)
            if activations.count(True) == 1:
                features.update(summed)
            elif all(activations) and (many := [a for a in ways if a in state - given]):
                heads.update(dict.fromkeys(many))  # one product of activations for each head
                head_dim.update(dict.fromkeys(a for a in summed if a in state - given))
        places = self._places_in_matrices(axis_of)
        return [
            (
                "sequence",
                [
                    a.name
                    for a in axes
                    if a.name in (given & multiplied) - features and not (a.is_batch or a.is_loop)
                ],
            ),
            ("experts", [a for a in owned(self.sites, sites) if _is_selected(axes, a)]),
            ("vocab", list(rows)),
            ("embed", list(width)),
            ("heads", list(heads)),
            ("head_dim", list(head_dim)),
            # What one matrix makes another one takes.
            ("hidden", [a for a in chains if a not in given and len(places.get(a, ())) > 1]),
        ]

    def _places_in_matrices(self, axis_of: Mapping[Factor, str]) -> dict[str, set[int]]:
        """The places of each axis in state leaves, those aside that hold a part of another's."""
        leaves = [
            [
                axis_of[f]
                for dim in dims
                for f in dim.leaves()
                if f.size > 1 and not f.is_loop and f in axis_of
            ]
            for _, dims in zip(self.program.state, self.arguments, strict=False)
        ]
        held = {frozenset(names) for names in leaves}
        found: dict[str, set[int]] = {}
        for names in leaves:
            if not any(set(names) < other for other in held):
                for place, name in enumerate(names):
                    found.setdefault(name, set()).add(place)
        return found

    def _names(self, groups: list[list[Factor]], batch: set[Factor]) -> dict[str, tuple[str, str]]:
        """The name of each group, in order -> path and dimension; "", "" where it has no path."""
        given = self._given_names()
        names: dict[str, tuple[str, str]] = {}
        batches = [g for g in groups if any(f in batch for f in g)]
        for group in groups:
            own = next((given[f] for f in group if f in given), None)
            marks = self.marks.get(group[0], [("value", 0, 0)])
            # The largest state leaf names an axis best: `kernel[1]`, not `bias[0]` or `x[1]`.
            path, dim, part = max(marks, key=lambda m: self.weight.get(m[0], -1))
            base = path if "@" in path else _short(_normal(path) if len(group) > 1 else path)
            place = "", ""
            if any(f in batch for f in group):
                name = "batch" if len(batches) == 1 else f"batch.{base}"
            elif own is not None:
                name = own
            else:
                split = f".{part}" if part else ""
                dimension = f"[{dim}{split}]"
                name = f"{base}{dimension}:{group[0].size}"
                if "@" not in path:
                    place = base, dimension
            unique, n = name, 1
            while unique in names:
                n += 1
                unique = f"{name}#{n}"
            names[unique] = place
        return names

    def _given_names(self) -> dict[Factor, str]:
        """Logical names that the model itself carries."""
        given: dict[Factor, str] = {}
        for leaf, dims in zip(self.program.state, self.arguments, strict=False):
            names = self.program.workload.axis_names.get(leaf.key, ())
            for name, dim in zip(names, dims, strict=False):  # a key has one that is not named
                found = [f for f in dim.leaves() if f.size > 1]
                if isinstance(name, str) and len(found) == 1:
                    given.setdefault(found[0], name)
        return given


def _is_selected(axes: Iterable[LogicalAxis], name: str) -> bool:
    return any(a.is_selected for a in axes if a.name == name)


def _holds(factors: Iterable[Factor], among: set[Factor]) -> bool:
    return any(leaf in among for f in factors for leaf in f.leaves())


def _names_in(dims: Dimensions) -> list[str]:
    return [axis for dim in dims for axis, _ in dim if axis is not None]


def _meetings(dims: Dimensions) -> Iterator[tuple[str, str]]:
    """The axes of every two dimensions of an array, in the order in which they stand."""
    held = [[axis for axis, _ in dim if axis is not None] for dim in dims]
    for before, after in itertools.combinations(held, 2):
        yield from itertools.product(before, after)
