"""Lookups (gather and scatter) as XLA's partitioner divides them, where Shardy would otherwise.

A table may be divided along a dimension that every lookup takes whole, and what is looked up over
the same mesh axes along another. XLA then has two ways: gather the table (for a scatter: sum whole
tables over the devices); or gather the indices, look up in the part of the table that is here, and
send what was found by all-to-all (a scatter gathers it where the mesh axes are the same only in
part). It takes the way whose largest array on a device is smaller, and of equals the one that sends
less (`xla/service/spmd/gather_scatter_handler.cc`, where they are called index passthrough and
operand passthrough; seen with jaxlib 0.10.2 and 0.12.0.1 for CPU, 0.10.2 for H100). Shardy chooses
by other rules, and gathers the tables of large batches. Reshards of what is looked up tell it XLA's
way.

A table may be divided by its rows, over mesh axes that divide the lookups too, while other mesh
axes divide neither. XLA then lets those divide the lookups, or the table, whichever is smaller on a
device, and sends it there and back (`GroupShardingOnReplicatedDim`, same file; seen likewise).
Shardy gathers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.shardings import Attributes, axis_size, parse_sharding, sharding_text
from autoshard.compat.stablehlo import Operation, Value, shape_and_bits, shape_of, walk

LOOKUPS = frozenset({"stablehlo.gather", "stablehlo.scatter"})

_Axes = tuple[tuple[str, ...], ...]  # mesh axes of each dimension


class _Lookup(NamedTuple):
    """One lookup by its arrays.

    Attributes:
      table: what a gather reads, or what a scatter makes.
      found: what a gather makes, or what a scatter adds.
      whole: (dimension of the table, of what is found) that every lookup takes whole.
    """

    table: Value
    found: Value
    whole: tuple[tuple[int, int], ...]


def keep_tables(main: Operation, sizes: dict[str, int], attributes: Attributes) -> None:
    """Reshards what is looked up, or the table, wherever XLA would rather do that than gather it.

    Args:
      main: with the shardings that propagation found, before reshards become explicit.
    """
    for op in walk(main.regions[0].blocks[0]):
        if op.name not in LOOKUPS:
            continue
        lookup = _gather(op) if op.name == "stablehlo.gather" else _scatter(op)
        if lookup is None:
            continue
        table, found = _axes_of(lookup.table), _axes_of(lookup.found)
        kept, across = _kept(lookup, table), _across(lookup, found)
        rows = {axis for axes in table for axis in axes} - kept
        makes_found = op.name == "stablehlo.gather"
        if shared := _names(kept) & _names(across):
            direct = _names(across) <= _names(kept)
            if not _sends_what_is_found(lookup, table, found, direct, sizes):
                continue
            spare = _spare(shared, table, found, sizes)
            whole = {f: table[t] for t, f in lookup.whole}
            to = tuple(whole.get(f, _instead(x, _names(kept), spare)) for f, x in enumerate(found))
            if makes_found:
                _made(op, to, found, attributes)
            else:
                _given(op, 2, [to] if direct else [((),) * len(found), to], attributes)
        elif (shared := _names(rows) & _names(across)) and (
            spare := _spare(shared, table, found, sizes)
        ):
            moves_found = _here(lookup.found, found, sizes) <= _here(lookup.table, table, sizes)
            now = found if moves_found else table
            to = tuple(_instead(axes, shared, spare) for axes in now)
            if moves_found == makes_found:
                _made(op, to, now, attributes)
            else:
                _given(op, 2 if moves_found else 0, [to], attributes)


def _gather(op: Operation) -> _Lookup | None:
    numbers = dialect.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    table, found = op.operands[0], op.results[0]
    single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    return _lookup(table, found, single, numbers.offset_dims)


def _scatter(op: Operation) -> _Lookup | None:
    if len(op.operands) != 3:
        return None  # several tables at once
    numbers = dialect.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    return _lookup(op.results[0], op.operands[2], single, numbers.update_window_dims)


def _lookup(table: Value, found: Value, single: set[int], windows: Sequence[int]) -> _Lookup | None:
    sizes, parts = shape_of(table), shape_of(found)
    long = (d for d in range(len(sizes)) if d not in single)
    whole = tuple((t, f) for t, f in zip(long, windows, strict=True) if sizes[t] == parts[f])
    return _Lookup(table, found, whole) if whole else None


def _kept(lookup: _Lookup, table: _Axes) -> set[str]:
    """Mesh axes that divide the table along what every lookup takes whole."""
    return {axis for t, _ in lookup.whole for axis in table[t]}


def _across(lookup: _Lookup, found: _Axes) -> set[str]:
    """Mesh axes that divide the lookups themselves."""
    windows = {f for _, f in lookup.whole}
    return {axis for f, axes in enumerate(found) if f not in windows for axis in axes}


def _sends_what_is_found(
    lookup: _Lookup, table: _Axes, found: _Axes, direct: bool, sizes: dict[str, int]
) -> bool:
    """Whether XLA gathers the indices, not the table.

    Args:
      direct: whether one all-to-all brings what is found from one place to the other; else XLA
        counts all of it.
    """

    def ways(axes: set[str]) -> float:
        return math.prod(axis_size(a, sizes) for a in axes)

    kept, across = _kept(lookup, table), _across(lookup, found)
    whole_table, whole_found = _bytes(lookup.table), _bytes(lookup.found)
    part = whole_found / ways({axis for axes in found for axis in axes})
    largest = max(whole_table, whole_found) / ways(kept)
    sent = part
    if not direct:
        largest, sent = max(largest, whole_found), whole_found
    gathered = whole_table / ways({axis for axes in table for axis in axes} - across)
    return (largest, sent) <= (max(gathered, part), gathered)


def _names(axes: set[str]) -> set[str]:
    """The mesh axes that these are parts of."""
    return {_name(axis) for axis in axes}


def _name(axis: str) -> str:
    return axis.split('":(')[0].strip('"')


def _spare(shared: set[str], table: _Axes, found: _Axes, sizes: dict[str, int]) -> tuple[str, ...]:
    """Mesh axes, or a part of one, that divide neither and are as many ways as the shared ones."""
    used = _names({axis for axes in (*table, *found) for axis in axes})
    wanted = math.prod(sizes[name] for name in shared)
    taken: list[str] = []
    for name, size in sizes.items():
        if name in used or wanted == 1:
            continue
        if wanted % size == 0:
            taken.append(name)
            wanted //= size
        elif size % wanted == 0:
            taken.append(f'"{name}":(1){wanted}')
            wanted = 1
    return tuple(taken) if wanted == 1 else ()


def _instead(axes: tuple[str, ...], shared: set[str], spare: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes of a dimension, with the spare ones in place of the shared."""
    left = tuple(axis for axis in axes if _name(axis) not in shared)
    return left if left == axes else (*left, *spare)


def _here(value: Value, axes: _Axes, sizes: dict[str, int]) -> float:
    """Bytes on one device."""
    return _bytes(value) / math.prod(axis_size(a, sizes) for dim in axes for a in dim)


def _bytes(value: Value) -> float:
    dims, bits = shape_and_bits(str(value.type))
    return math.prod(dims) * float(bits) / 8


def _axes_of(value: Value) -> _Axes:
    """Mesh axes of each dimension of a value, after propagation."""
    text = _sharding_text(value)
    rank = len(shape_of(value))
    return parse_sharding(text) if text else ((),) * rank


def _sharding_text(value: Value) -> str:
    """The printed sharding of a value; "" where it has none."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        owner = owner.owner
        if "arg_attrs" in owner.attributes:
            named = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[number])
            return str(named["sdy.sharding"]) if "sdy.sharding" in named else ""
    else:
        number = ir.OpResult(value).result_number
    if owner.name == "sdy.reshard":
        return str(owner.attributes["sharding"])
    if "sdy.sharding" not in owner.attributes:
        return ""
    return "<@" + str(owner.attributes["sdy.sharding"]).split("<@")[1:][number]


def _text(axes: _Axes) -> str:
    return sharding_text(tuple((dim, False) for dim in axes))


def _given(op: Operation, index: int, steps: Sequence[_Axes], attributes: Attributes) -> None:
    """Brings an operand from one sharding to the next before the operation."""
    at = ir.InsertionPoint(op)
    op.operands[index] = _resharded(op.operands[index], steps, attributes, at)[-1]


def _made(op: Operation, axes: _Axes, used: _Axes, attributes: Attributes) -> None:
    """Gives the one result a sharding of its own, and those that use it the one they had."""
    per_value = f"<[{_text(axes).removeprefix('#sdy.sharding')}]>"
    op.attributes["sdy.sharding"] = attributes(f"#sdy.sharding_per_value{per_value}")
    result = op.results[0]
    (back,) = _resharded(result, [used], attributes, ir.InsertionPoint.after(op))
    result.replace_all_uses_except(back, back.owner.operation)


def _resharded(
    value: Value, steps: Sequence[_Axes], attributes: Attributes, at: ir.InsertionPoint
) -> list[Value]:
    """A value brought from one sharding to the next, with what it is after each step."""
    made = []
    location = ir.Location.unknown() if isinstance(value.owner, ir.Block) else value.owner.location
    for axes in steps:
        operation = ir.Operation.create(
            "sdy.reshard",
            results=[value.type],
            operands=[value],
            attributes={"sharding": attributes(_text(axes))},
            loc=location,
            ip=at,
        )
        value = operation.results[0]
        made.append(value)
    return made
