"""Logical axes of a whole step, read from the partitioner's own factor mapping. No annotation.

Every operation of the sited module carries, from Shardy, which dimensions of its operands and
results go together. Tying them all, through loops and calls, gives the factors that the program
keeps together; a logical axis is such a class, or several that repeated layers make alike.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator

from autoshard.compat.shardy import factor_rules, stablehlo
from autoshard.program import factors as factors_
from autoshard.program.factors import Factor
from autoshard.program.program import Leaf, Program
from autoshard.program.sites import Site, site_of_location

FactorList = tuple[tuple[str | None, int], ...]
"""One dimension: (logical axis or None if unknown, size) of each factor, major to minor."""

Dimensions = tuple[FactorList, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalAxis:
    """A set of array dimensions, or factors of them, that the program ties together.

    Attributes:
      name: the model's own name for it, "batch", or the path that shows it first, with its size.
      size: number of elements; where tied dimensions differ (S and S+1), the largest.
      sizes: all of them, ascending.
      is_batch: examples of the batch lie along it.
      is_data: the batch carries it and the state does not.
      is_loop: a loop runs over it one slice at a time; not sharded by default.
      is_contracted: some matrix product sums over it.
      where: `path[dimension]` for each input that holds it; else what makes it, and where.
      repeats: how many alike axes of repeated layers it stands for.
    """

    name: str
    size: int
    sizes: tuple[int, ...]
    is_batch: bool = False
    is_data: bool = False
    is_loop: bool = False
    is_contracted: bool = False
    where: tuple[str, ...] = ()
    repeats: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The logical axes of a program and where each array holds them.

    Attributes:
      axes: all of them, in order of first appearance: batch, state, then the rest.
      inputs, outputs: factors of each dimension of each flat input and output.
      sites: the same for each site that survives lowering; sites left out are open.
      chains: (axis, ...) pairs of one matrix product's output axis that the next one contracts:
        sharding such an axis keeps both products local up to one all-reduce.
      meetings: (axis, axis) pairs of which some tensor holds the first along a dimension before
        one of the second; both may be the same axis.
      opaque: operations the partitioner has no rule for, which count as replicated; and custom
        calls in manual regions.
    """

    axes: tuple[LogicalAxis, ...]
    inputs: tuple[Dimensions, ...]
    outputs: tuple[Dimensions, ...]
    sites: dict[int, Dimensions]
    chains: tuple[str, ...]
    meetings: tuple[tuple[str, str], ...]
    opaque: tuple[str, ...]

    def axis(self, name: str) -> LogicalAxis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)


_BARRIERS = frozenset({"stablehlo.optimization_barrier"})
_NEIGHBOURS = frozenset(
    {"stablehlo.reduce_window", "stablehlo.select_and_scatter", "stablehlo.convolution"}
)
"""Operations that make one element of several neighbours."""


class _Ties:
    """Collects the ties of one module."""

    def __init__(self) -> None:
        self.dims: dict[stablehlo.Value, list[Factor]] = {}
        self.alike: list[tuple[Factor, Factor]] = []
        self.constant: set[stablehlo.Value] = set()
        self.opaque: list[str] = []
        self.produced: list[Factor] = []
        self.contracted: list[Factor] = []
        self.sites: list[tuple[int, stablehlo.Value]] = []

    def of(self, value: stablehlo.Value) -> list[Factor]:
        found = self.dims.get(value)
        if found is None:
            shape, _ = stablehlo.shape_and_bits(str(value.type))
            found = [Factor(n) for n in shape]
            if value not in self.constant:
                self.dims[value] = found
        return found

    def same(self, *values: stablehlo.Value) -> None:
        first = self.of(values[0])
        for value in values[1:]:
            other = self.of(value)
            if len(first) == len(other):
                for x, y in zip(first, other, strict=True):
                    self.pair(x, y)

    def pair(self, x: Factor, y: Factor, major: bool = False) -> None:
        if x.size == y.size:
            factors_.tie([x], [y])
        elif x.size > 1 and y.size > 1 and not factors_.tie_unequal(x, y, major):
            self.alike.append((x, y))

    def kin(self) -> dict[Factor, Factor]:
        """Factors of different sizes that hold the same thing (S and S+1) -> one of them."""
        found: dict[Factor, Factor] = {}

        def root(f: Factor) -> Factor:
            while f in found:
                f = found[f]
            return f

        for x, y in self.alike:
            a, b = x.leaves(), y.leaves()
            if len(a) == 1 and len(b) == 1 and root(a[0]) is not root(b[0]):
                found[root(b[0])] = root(a[0])
        return {f: root(f) for f in found}

    def block(self, block: stablehlo.Block, in_loop: bool) -> None:
        for op in block.operations:
            self.operation(op.operation, in_loop)

    def operation(self, op: stablehlo.Operation, in_loop: bool) -> None:
        name = op.name
        rule = factor_rules.factors_of(op)
        # The partitioner gives each use of a constant expression its own copy: it ties nothing.
        if (
            name != "sdy.sharding_constraint"
            and len(op.regions) == 0
            and all(v in self.constant for v in op.operands)
        ):
            self.constant.update(op.results)
            return
        if name == "sdy.sharding_constraint":
            index = site_of_location(str(op.location))
            if index is not None:
                self.sites.append((index, op.results[0]))
            self.same(op.operands[0], op.results[0])
        elif name == "stablehlo.while":
            condition, body = (region.blocks[0] for region in op.regions)
            returned = list(body.operations)[-1].operation.operands
            for group in zip(
                op.operands,
                op.results,
                condition.arguments,
                body.arguments,
                returned,
                strict=True,
            ):
                self.same(*group)
            self.block(condition, in_loop)
            self.block(body, True)
        elif name in ("stablehlo.case", "stablehlo.if"):
            for region in op.regions:
                for inner in region.blocks:
                    self.block(inner, in_loop)
                    returned = list(inner.operations)[-1].operation.operands
                    for result, value in zip(op.results, returned, strict=True):
                        self.same(result, value)
        elif rule is not None:
            self.rule(op, rule)
        elif len(op.operands) == len(op.results) and name in _BARRIERS:
            for operand, result in zip(op.operands, op.results, strict=True):
                if operand.type == result.type:
                    self.same(operand, result)
        elif name == stablehlo.MANUAL:
            for inner in stablehlo.walk(op.regions[0].blocks[0]):
                called = inner.name == "stablehlo.custom_call"
                if called and not stablehlo.is_ragged_exchange(inner):
                    self.opaque.append(_named(inner))
        elif len(op.operands) and len(op.results):
            self.opaque.append(_named(op))
        if in_loop and name in ("stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"):
            whole = self.of(op.operands[0])
            part = self.of(
                op.results[0]
                if name.endswith("_slice") and "update" not in name
                else op.operands[1]
            )
            for x, y in zip(whole, part, strict=True):
                if y.size < x.size:
                    x.leaves()[0].is_loop = True

    def rule(self, op: stablehlo.Operation, rule: factor_rules.Factors) -> None:
        major = op.name in _NEIGHBOURS or any(n > 1 for n in stablehlo.strides(op))
        atoms = [Factor(n) for n in rule.sizes]
        pairs = [
            *zip(op.operands, rule.operands, strict=True),
            *zip(op.results, rule.results, strict=True),
        ]
        for value, mapping in pairs:
            dims = self.of(value)
            for dim, indices in zip(dims, mapping, strict=False):
                parts = [atoms[i] for i in indices if rule.sizes[i] > 1]
                if not parts or dim.size == 1:
                    continue
                if len(parts) == 1:
                    self.pair(parts[0], dim, major)
                elif factors_.size_of(parts) == dim.size:
                    factors_.tie([dim], parts)
        if op.name in stablehlo.PRODUCTS:
            kept = {i for dim in rule.results[0] for i in dim}
            left = {i for dim in rule.operands[0] for i in dim}
            right = {i for dim in rule.operands[1] for i in dim}
            self.contracted += [atoms[i] for i in sorted((left & right) - kept)]
            self.produced += [atoms[i] for i in sorted((left ^ right) & kept)]


def _named(op: stablehlo.Operation) -> str:
    return f"{op.name} at {str(op.location)[:80]}"


def find_axes(program: Program, module: stablehlo.Operation, sites: list[Site]) -> Axes:
    """Reads the logical axes of a flattened, sited module of `program`.

    Args:
      module: from `flattening.flatten`, its constraint operations carrying the tags of `sites`.
    """
    ruled = factor_rules.with_rules(module)
    main = stablehlo.main_function(ruled).regions[0].blocks[0]
    ties = _Ties()
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
        ties: _Ties,
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
        names = self._names(groups, batch)
        axis_of = {f: name for name, group in zip(names, groups, strict=True) for f in group}
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
        meetings = dict.fromkeys(
            pair for dims in (*inputs, *by_site.values()) for pair in _meetings(dims)
        )
        return Axes(
            axes=axes,
            inputs=inputs,
            outputs=tuple(dimensions(d) for d in self.returned),
            sites=by_site,
            chains=tuple(
                dict.fromkeys(
                    axis_of[f]
                    for f in self.order
                    if f in contracted
                    and f in produced
                    and f in self.on_state
                    and f in axis_of
                    and not f.is_loop
                )
            ),
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

    def _names(self, groups: list[list[Factor]], batch: set[Factor]) -> list[str]:
        given = self._given_names()
        names: list[str] = []
        batches = [g for g in groups if any(f in batch for f in g)]
        for group in groups:
            own = next((given[f] for f in group if f in given), None)
            marks = self.marks.get(group[0], [("value", 0, 0)])
            # The largest state leaf names an axis best: `kernel[1]`, not `bias[0]` or `x[1]`.
            path, dim, part = max(marks, key=lambda m: self.weight.get(m[0], -1))
            base = path if "@" in path else _short(_normal(path) if len(group) > 1 else path)
            if any(f in batch for f in group):
                name = "batch" if len(batches) == 1 else f"batch.{base}"
            elif own is not None:
                name = own
            else:
                split = f".{part}" if part else ""
                name = f"{base}[{dim}{split}]:{group[0].size}"
            unique, n = name, 1
            while unique in names:
                n += 1
                unique = f"{name}#{n}"
            names.append(unique)
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


def _meetings(dims: Dimensions) -> Iterator[tuple[str, str]]:
    """The axes of every two dimensions of an array, in the order in which they stand."""
    held = [[axis for axis, _ in dim if axis is not None] for dim in dims]
    for before, after in itertools.combinations(held, 2):
        yield from itertools.product(before, after)
