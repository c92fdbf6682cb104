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

A table may be divided by its rows, and what each lookup finds over the same mesh axes, along what
it takes whole. XLA then looks up in the rows that are here and sums all that was found over the
devices, or such parts of it as other mesh axes can divide; a scatter gathers what it adds (the same
file's trivially sliced operand). Shardy sends the table instead where that is smaller.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.shardy.reshards import Division, bring_operand, division, make_result, without
from autoshard.compat.shardy.shardings import Attributes
from autoshard.compat.shardy.stablehlo import Operation, Value, bytes_of, in_manual, shape_of
from autoshard.records.subaxes import axis_name, named_part, ways

LOOKUPS = frozenset({"stablehlo.gather", "stablehlo.scatter"})


class _Array(NamedTuple):
    """An array of a lookup and how propagation divided it.

    Attributes:
      operand: which of the operation's it is; -1 for its result.
    """

    value: Value
    axes: Division
    operand: int


class _Lookup(NamedTuple):
    """One lookup by its arrays.

    Attributes:
      table: what a gather reads, or what a scatter makes.
      found: what a gather makes, or what a scatter adds.
      whole: (dimension of the table, of what is found) that every lookup takes whole.
      single: dimensions of the table of which every lookup takes one place.
    """

    operation: Operation
    table: _Array
    found: _Array
    whole: tuple[tuple[int, int], ...]
    single: frozenset[int]


def keep_tables(
    operations: Iterable[Operation], sizes: dict[str, int], attributes: Attributes
) -> None:
    """Reshards what is looked up, or the table, wherever XLA would rather do that than gather it.

    Args:
      operations: of main, with the shardings that propagation found, before reshards become
        explicit.
    """
    for op in operations:
        lookup = _lookup_of(op)
        if lookup is None or in_manual(op):  # there some axes are not spare
            continue
        across = _names(_across(lookup))
        kept = _names(_kept(lookup))
        if kept & across:
            _keep_columns(lookup, kept, across, sizes, attributes)
        elif shared := (_names(_every(lookup.table.axes)) - kept) & across:
            _keep_rows(lookup, shared, sizes, attributes)
        elif shared := _names(_rows(lookup)) & _names(_every(lookup.found.axes)) - across:
            _find_whole(lookup, shared, sizes, attributes)


def _keep_columns(
    lookup: _Lookup,
    kept: set[str],
    across: set[str],
    sizes: dict[str, int],
    attributes: Attributes,
) -> None:
    """For a table divided along what lookups take whole: what was found is sent, if XLA would."""
    direct = across <= kept
    if not _sends_what_is_found(lookup, direct, sizes):
        return
    whole = {f: lookup.table.axes[t] for t, f in lookup.whole}
    outer = tuple(() if f in whole else axes for f, axes in enumerate(lookup.found.axes))
    replaced, enough = _replaced(outer, kept, _Spare(lookup, sizes))
    outer = replaced if enough else without(outer, kept)
    to = tuple(whole.get(f, axes) for f, axes in enumerate(outer))
    undivided: Division = ((),) * len(to)
    steps = [to] if direct else [undivided, to]
    _move(lookup.operation, lookup.found, steps, attributes)


def _keep_rows(
    lookup: _Lookup, shared: set[str], sizes: dict[str, int], attributes: Attributes
) -> None:
    """For a table divided by its rows as the lookups are: the smaller goes to mesh axes to spare.

    Nothing where they do not suffice.
    """

    def here(array: _Array) -> float:
        return bytes_of(array.value) / ways(_every(array.axes), sizes)

    moved = lookup.found if here(lookup.found) <= here(lookup.table) else lookup.table
    to, enough = _replaced(moved.axes, shared, _Spare(lookup, sizes))
    if enough:
        _move(lookup.operation, moved, [to], attributes)


def _find_whole(
    lookup: _Lookup, shared: set[str], sizes: dict[str, int], attributes: Attributes
) -> None:
    """For a table divided by its rows over mesh axes that divide what each lookup finds.

    Mesh axes to spare take their place, as far as they reach.
    """
    to, _ = _replaced(lookup.found.axes, shared, _Spare(lookup, sizes))
    _move(lookup.operation, lookup.found, [to], attributes)


def _move(op: Operation, array: _Array, steps: Sequence[Division], attributes: Attributes) -> None:
    """Has the operation read an array, or make it, as the last of the steps says."""
    if array.operand < 0:
        make_result(op, steps[-1], attributes)
    else:
        bring_operand(op, array.operand, steps, attributes)


def _lookup_of(op: Operation) -> _Lookup | None:
    """None for other operations, those on several tables at once, and where nothing is whole."""
    if op.name == "stablehlo.gather":
        gather = dialect.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        single = frozenset((*gather.collapsed_slice_dims, *gather.operand_batching_dims))
        windows = gather.offset_dims
        table, found = _array(op.operands[0], 0), _array(op.results[0], -1)
    elif op.name == "stablehlo.scatter" and len(op.operands) == 3:
        scatter = dialect.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        single = frozenset((*scatter.inserted_window_dims, *scatter.input_batching_dims))
        windows = scatter.update_window_dims
        table, found = _array(op.results[0], -1), _array(op.operands[2], 2)
    else:
        return None
    rows, parts = shape_of(table.value), shape_of(found.value)
    long = (d for d in range(len(rows)) if d not in single)
    whole = tuple((t, f) for t, f in zip(long, windows, strict=True) if rows[t] == parts[f])
    return _Lookup(op, table, found, whole, single) if whole else None


def _array(value: Value, operand: int) -> _Array:
    return _Array(value, division(value), operand)


def _every(axes: Division) -> set[str]:
    return {axis for dim in axes for axis in dim}


def _names(axes: Iterable[str]) -> set[str]:
    """The mesh axes that these are, or are parts of."""
    return {axis_name(axis) for axis in axes}


def _kept(lookup: _Lookup) -> set[str]:
    """Mesh axes that divide the table along what every lookup takes whole."""
    return {axis for t, _ in lookup.whole for axis in lookup.table.axes[t]}


def _across(lookup: _Lookup) -> set[str]:
    """Mesh axes that divide the lookups themselves."""
    windows = {f for _, f in lookup.whole}
    return {axis for f, axes in enumerate(lookup.found.axes) if f not in windows for axis in axes}


def _rows(lookup: _Lookup) -> set[str]:
    """Mesh axes that divide by its rows what a gather reads, or what a scatter adds to."""
    read = division(lookup.operation.operands[0])
    return {axis for t, axes in enumerate(read) if t in lookup.single for axis in axes}


def _sends_what_is_found(lookup: _Lookup, direct: bool, sizes: dict[str, int]) -> bool:
    """Whether XLA gathers the indices, not the table.

    Args:
      direct: whether one all-to-all brings what is found from one place to the other; else XLA
        counts all of it.
    """
    kept, across = _kept(lookup), _across(lookup)
    whole_table, whole_found = bytes_of(lookup.table.value), bytes_of(lookup.found.value)
    part = whole_found / ways(_every(lookup.found.axes), sizes)
    largest = max(whole_table, whole_found) / ways(kept, sizes)
    sent = part
    if not direct:
        largest, sent = max(largest, whole_found), whole_found
    gathered = whole_table / ways(_every(lookup.table.axes) - across, sizes)
    return (largest, sent) <= (max(gathered, part), gathered)


class _Spare:
    """Mesh axes that divide neither the table nor what is found; each place is given away once."""

    def __init__(self, lookup: _Lookup, sizes: dict[str, int]):
        used = _names(_every(lookup.table.axes) | _every(lookup.found.axes))
        self.sizes = sizes
        self._left = {name: size for name, size in sizes.items() if name not in used}

    def take(self, count: int) -> tuple[tuple[str, ...], bool]:
        """Axes, or the major part left of some, that divide so many ways; and if they suffice."""
        taken = []
        for name, left in self._left.items():
            part = left if count % left == 0 else count if left % count == 0 else 1
            if part > 1:
                taken.append(named_part(name, self.sizes[name], self.sizes[name] // left, part))
                self._left[name] = left // part
                count //= part
        return tuple(taken), count == 1


def _replaced(axes: Division, names: set[str], spare: _Spare) -> tuple[Division, bool]:
    """With as many ways of spare mesh axes in their place, or what there are; and if all are."""
    made, every = [], True
    for dim, left in zip(axes, without(axes, names), strict=True):
        taken, enough = spare.take(ways(dim, spare.sizes) // ways(left, spare.sizes))
        made.append((*left, *taken))
        every = every and enough
    return tuple(made), every
