"""Which dimensions of a module's values go together: the ties that its operations make."""

from typing import NamedTuple

from autoshard.compat.shardy import factor_rules, stablehlo
from autoshard.program import factors as factors_
from autoshard.program.factors import Factor
from autoshard.program.sites import site_of_location

_BARRIERS = frozenset({"stablehlo.optimization_barrier"})
_NEIGHBOURS = frozenset(
    {"stablehlo.reduce_window", "stablehlo.select_and_scatter", "stablehlo.convolution"}
)
"""Operations that make one element of several neighbours."""
_HANDING_ON = frozenset(
    {
        *("sdy.sharding_constraint", "stablehlo.broadcast_in_dim", "stablehlo.convert"),
        *("stablehlo.reshape", "stablehlo.transpose"),
    }
)
"""Operations whose result has the values of their operand."""
_LOOKUPS = frozenset({"stablehlo.gather", "stablehlo.scatter"})


class Product(NamedTuple):
    """The factors of a matrix product: of either operand, along which it is one product of many,
    and those it sums over."""

    left: list[Factor]
    right: list[Factor]
    batched: list[Factor]
    contracted: list[Factor]


class Ties:
    """Collects the ties of one module."""

    def __init__(self) -> None:
        self.dims: dict[stablehlo.Value, list[Factor]] = {}
        self.alike: list[tuple[Factor, Factor]] = []
        self.constant: set[stablehlo.Value] = set()
        self.opaque: list[str] = []
        self.produced: list[Factor] = []
        self.contracted: list[Factor] = []
        self.selected: list[Factor] = []
        self.products: list[Product] = []
        self.iotas: dict[stablehlo.Value, frozenset[int]] = {}
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
            self._mark_iotas(op)
            return
        if name in _HANDING_ON:
            self._mark_iotas(op)
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
                if (counted := self.iotas.get(group[0])) is not None:
                    self.iotas[group[3]] = counted
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
            self.products.append(
                Product(
                    left=[atoms[i] for i in sorted(left)],
                    right=[atoms[i] for i in sorted(right)],
                    batched=[atoms[i] for i in sorted(left & right & kept)],
                    contracted=[atoms[i] for i in sorted((left & right) - kept)],
                )
            )
        elif op.name in _LOOKUPS and op.operands[1] not in self.constant:
            result = {i for dim in rule.results[0] for i in dim}
            other = rule.operands[0 if op.name == "stablehlo.gather" else -1]
            self.selected += [atoms[i] for i in sorted(result - {i for dim in other for i in dim})]
        elif op.name == "stablehlo.compare":
            counted = [self.iotas[v] for v in op.operands if v in self.iotas]
            if len(counted) == 1:
                self.selected += [f for f in atoms if f.size in counted[0]]

    def _mark_iotas(self, op: stablehlo.Operation) -> None:
        """Remembers the sizes along which an iota counts, and what is made of it."""
        found = frozenset().union(*(self.iotas.get(v, frozenset()) for v in op.operands))
        if op.name == "stablehlo.iota":
            shape, _ = stablehlo.shape_and_bits(str(op.results[0].type))
            found = frozenset(n for n in shape if n > 1)
        if found:
            self.iotas.update(dict.fromkeys(op.results, found))


def _named(op: stablehlo.Operation) -> str:
    return f"{op.name} at {str(op.location)[:80]}"
