"""The operations of a flattened module as numbered values: sizes, uses, loops, trips, arithmetic.

Read once, before any layout. What fuses is decided in `fusion`, what shares a buffer in `buffers`;
here only which branch runs (the largest), which constants a loop makes itself, where slices and
pads take their elements from, and what the user's own manual regions send.
"""

import functools
import math
from typing import NamedTuple

from autoshard.arithmetic import (
    cholesky_flops,
    fft_flops,
    product_flops,
    sort_flops,
    triangular_solve_flops,
)
from autoshard.buffers import Loop
from autoshard.cache_lines import Turn
from autoshard.compat import stablehlo
from autoshard.compat.convolution import Convolution, convolution
from autoshard.compat.invariants import Origin, origin_of
from autoshard.compat.ragged import ragged_flops
from autoshard.compat.slices import windows as windows_of
from autoshard.convolutions import Window
from autoshard.precision import multiplied_as
from autoshard.shifts import moves
from autoshard.transposes import transposed_operands
from autoshard.trips import trip_count

_CONVOLUTION = "stablehlo.convolution"
FREE = frozenset(
    {
        "stablehlo.constant",
        "sdy.constant",
        "stablehlo.reshape",
        "stablehlo.optimization_barrier",
        "sdy.sharding_constraint",
        "stablehlo.tuple",
        "stablehlo.get_tuple_element",
        "stablehlo.after_all",
        "stablehlo.create_token",
    }
)
HEAVY = (
    stablehlo.SENDS
    | frozenset(
        "stablehlo." + n
        for n in [
            "dot_general",
            "convolution",
            "gather",
            "scatter",
            "sort",
            "custom_call",
            "rng_bit_generator",
            "fft",
            "cholesky",
            "triangular_solve",
            "reduce_window",
            "select_and_scatter",
            "dynamic_update_slice",
            "dynamic_gather",
            "while",
            "case",
            "if",
            "reduce",
            "rng",
        ]
    )
    | {"chlo.top_k", stablehlo.RAGGED_DOT, stablehlo.MANUAL}
)
BORDERS = stablehlo.SENDS | {"stablehlo.while", stablehlo.MANUAL}
"""What takes values as they lie in memory, and has no kernel of its own."""
_NOT_DROPPED = BORDERS | {"", "stablehlo.custom_call", "stablehlo.case", "stablehlo.if"}
"""Operations that may do more than make their values, or that have others within."""
RENAMES = frozenset(
    {
        "sdy.sharding_constraint",
        "stablehlo.reshape",
        "stablehlo.optimization_barrier",
        stablehlo.MANUAL,
    }
)
UPDATE = "stablehlo.dynamic_update_slice"
SLICES = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})
JOINS = frozenset({"stablehlo.concatenate", "stablehlo.pad"})
"""Operations whose elements come from one of several places."""
BROADCAST = "stablehlo.broadcast_in_dim"
MOVES = SLICES | JOINS | {BROADCAST, "stablehlo.reduce", "stablehlo.reverse", "stablehlo.transpose"}
"""Operations that need other places of their operands than of what they make."""


class OwnSend(NamedTuple):
    """What one operation of a manual region sends.

    Attributes:
      kind: the operation's name without its dialect, such as "all_reduce".
      partners: as `stablehlo.partners_of` has them.
      bytes: the larger of what goes in and what comes out, of the parts the region has; the rows
        of a ragged exchange.
      tag: of the operation.
      origin: of what is sent.
      source: `file:line` of the user's step, or "".
    """

    kind: str
    partners: tuple[tuple[int, ...], ...] | tuple[str, ...]
    bytes: float
    tag: int
    origin: Origin | None
    source: str


class Shift(NamedTuple):
    """A slice or a pad that moves places.

    Attributes:
      tag: of the operation.
      data: the value that it moves, by number.
      windows: one for each dimension (`shifts`).
      origin: of that value.
      source: `file:line` of the user's step, or "".
    """

    tag: int
    data: int
    windows: tuple[Window, ...]
    origin: Origin | None
    source: str


class Operations:
    """Values of a module by number, in the order of the program.

    Args:
      main: the block of the flattened main function, its operations tagged.
      site_of_tag: which site a tagged constraint operation is.
      platform: that the module was lowered for.

    Attributes:
      sizes, elements: bytes and elements of each value on one device if nothing is sharded.
      dims: the extents of each of them.
      element_of: what each of them is made of, as MLIR writes it, such as `bf16`; "" for tokens.
      parents: for a constraint's value the value it constrains, else -1.
      op_of: the operation that makes a value, "" for arguments.
      operands: of that operation, by number.
      uses: (operation, the first value it makes or -1) of all that take the value and are used.
      trip_of: how often its operation runs in a step.
      position_of: where that stands in the program.
      own_flops: of its operation alone, if nothing is sharded.
      dtype_of: of the operands of a product or convolution, with how precisely it multiplies
        (`precision.multiplied_as`), by the value it makes.
      arguments, returned: of the main function.
      tags: tag of an operation -> (first value, number of results).
      entries: tag of a manual region -> the same of what its body is given.
      trips, positions: the same two by tag.
      ends: tag of a loop -> position of the last operation of its body.
      site_values: (value, site index) of each sharding constraint.
      loops: every `while`.
      contracting: tags of products and convolutions with the values they take.
      transposed: by the value an operation makes, the values it transposes (`transposes`), and how.
      free_dims: by the value a matrix product makes, its dimensions that are of the left operand
        alone, and those that are of the right one.
      convolved: by the value a convolution makes, what is to be known of it.
      shifted: by the value that a slice or a pad makes, what it moves, if it does.
      summed: by the value a `reduce` makes, the dimension of one array that it adds up.
      length: the last position.
      platform: that the module was lowered for.
      unused: values that nothing needs, which no compiler makes.
      sent: what the user's own manual regions send.
      assumptions: what the module did not say.
    """

    def __init__(self, main: stablehlo.Block, site_of_tag: dict[int, int], platform: str):
        self.sizes: list[float] = []
        self.elements: list[float] = []
        self.dims: list[tuple[int, ...]] = []
        self.element_of: list[str] = []
        self.parents: list[int] = []
        self.op_of: list[str] = []
        self.operands: list[list[int]] = []
        self.uses: list[list[tuple[str, int]]] = []
        self.trip_of: list[float] = []
        self.position_of: list[int] = []
        self.own_flops: list[float] = []
        self.dtype_of: dict[int, str] = {}
        self.tags: dict[int, tuple[int, int]] = {}
        self.entries: dict[int, tuple[int, int]] = {}
        self.trips: dict[int, float] = {}
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.site_values: list[tuple[int, int]] = []
        self.loops: list[Loop] = []
        self.contracting: dict[int, tuple[int, ...]] = {}
        self.transposed: dict[int, dict[int, Turn]] = {}
        self.summed: dict[int, int] = {}
        self.free_dims: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.convolved: dict[int, Convolution] = {}
        self.shifted: dict[int, Shift] = {}
        self.length = 0
        self.sent: list[OwnSend] = []
        self.assumptions: list[str] = []
        self._site_of_tag = site_of_tag
        self.platform = platform
        self._number: dict[stablehlo.Value, int] = {}
        self._constants: dict[stablehlo.Value, str] = {}
        self._literals: dict[int, str] = {}
        self.arguments = [self._new(value, "", 1.0) for value in main.arguments]
        self._block(main, 1.0)
        last = list(main.operations)[-1].operation
        self.returned = [self._number[v] for v in last.operands if v in self._number]
        self._sink_fills()
        self.unused = self._drop_unused()

    @functools.cached_property
    def tag_of(self) -> dict[int, int]:
        """The tag of an operation, by the first value it makes."""
        return {first: tag for tag, (first, _) in self.tags.items()}

    def source(self, v: int) -> int:
        """The value in whose buffer another lies, if it does; else -1."""
        if self.op_of[v] in RENAMES or self.op_of[v] == UPDATE:
            return self.operands[v][0]
        return -1

    def is_matrix(self, v: int) -> bool:
        """Whether a value has two dimensions of more than one element."""
        return sum(extent > 1 for extent in self.dims[v]) == 2

    def _new(self, value: stablehlo.Value, op: str, trips: float, parent: int = -1) -> int:
        dims, bits = stablehlo.shape_and_bits(str(value.type))
        index = len(self.sizes)
        self._number[value] = index
        count = float(math.prod(dims))
        self.elements.append(count)
        self.dims.append(tuple(dims))
        self.element_of.append(stablehlo.dtype_of(value) if bits else "")
        self.sizes.append(count * bits / 8)
        self.parents.append(parent)
        self.op_of.append(op)
        self.operands.append([])
        self.uses.append([])
        self.trip_of.append(trips)
        self.position_of.append(self.length)
        self.own_flops.append(0.0)
        return index

    def _block(self, block: stablehlo.Block, trips: float) -> None:
        for op in block.operations:
            self._operation(op.operation, trips)

    def _operation(self, op: stablehlo.Operation, trips: float) -> None:
        name = op.name
        self.length += 1
        attributes = op.attributes
        tag = attributes[stablehlo.TAG].value if stablehlo.TAG in attributes else -1
        self.positions[tag] = self.length
        self.trips[tag] = trips
        operands = [self._number[v] for v in op.operands if v in self._number]
        if name in ("stablehlo.return", "func.return", "sdy.return"):
            for i in operands:
                self.uses[i].append((name, -1))
            return
        first = len(self.sizes)
        if name == "stablehlo.constant" or name == "sdy.constant":
            self._constants[op.results[0]] = stablehlo.literal(op)
            self._literals[first] = self._constants[op.results[0]]
        if name == "sdy.sharding_constraint":
            index = self._new(op.results[0], name, trips, parent=operands[0])
            self.operands[index] = operands[:1]
            self.uses[operands[0]].append((name, index))
            if tag in self._site_of_tag:
                self.site_values.append((index, self._site_of_tag[tag]))
            self.tags[tag] = (first, 1)
            return
        if name == "stablehlo.while":
            self._loop(op, operands, trips)
            self.ends[tag] = self.length
            self.tags[tag] = (first, len(op.results))
            return
        if name == stablehlo.MANUAL:
            self.entries[tag] = (first, len(operands))
            self._manual(op, operands, trips)
            self.tags[tag] = (len(self.sizes) - len(op.results), len(op.results))
            self.positions[tag] = self.length  # what follows it has its tag
            return
        if ragged := stablehlo.is_ragged_exchange(op):
            name = "stablehlo.all_to_all"
        if name in stablehlo.SENDS:
            self._send(op, name, tag, ragged)
        barrier = name == "stablehlo.optimization_barrier"
        for k, result in enumerate(op.results):
            index = self._new(result, name, trips)
            self.operands[index] = [operands[k]] if barrier else operands
            self.own_flops[index] = self._flops(op, name, index, first)
            if name in stablehlo.PRODUCTS:
                self.contracting[tag] = tuple(operands)
                dtype = stablehlo.dtype_of(op.operands[0])
                self.dtype_of[index] = multiplied_as(dtype, *stablehlo.precision_of(op))
        if name == _CONVOLUTION:
            self.convolved[first] = convolution(op)
        if any(map(moves, windows := windows_of(op))):
            self.shifted[first] = Shift(
                tag=tag,
                data=operands[0],
                windows=windows,
                origin=origin_of(op.operands[0]),
                source=_where(op),
            )
        if name == "stablehlo.dot_general":
            (batch, contracted), _ = stablehlo.product_dimensions(op)
            rank = len(stablehlo.shape_of(op.operands[0]))
            right = rank - len(contracted)
            self.free_dims[first] = (
                tuple(range(len(batch), right)),
                tuple(range(right, len(self.dims[first]))),
            )
        if name == "stablehlo.reduce" and (dimension := stablehlo.summed_dimension(op)) >= 0:
            self.summed[first] = dimension
        if turns := transposed_operands(op):
            made = name == "stablehlo.transpose"  # in parts as its result, not as its operand
            self.transposed[first] = {first if made else operands[i]: t for i, t in turns.items()}
        for k, i in enumerate(operands):
            self.uses[i].append((name, first + k * barrier if op.results else -1))
        self.tags[tag] = (first, len(op.results))
        if name in ("stablehlo.case", "stablehlo.if"):
            self._branches(op, first, trips)

    def _loop(self, op: stablehlo.Operation, operands: list[int], trips: float) -> None:
        count, known = trip_count(op, self._constants)
        if not known:
            self.assumptions.append(f"unknown trip count taken as 1 at {_where(op)}")
        condition, body = (region.blocks[0] for region in op.regions)
        results = [self._new(r, "stablehlo.while", trips) for r in op.results]
        for result, operand in zip(results, operands, strict=False):
            self.operands[result] = [operand]
            self.uses[operand].append(("stablehlo.while", result))
        for argument, result in zip(condition.arguments, results, strict=True):
            self._number[argument] = result
        for argument, result in zip(body.arguments, results, strict=True):
            self._number[argument] = result
        start = self.length
        self._block(body, trips * count)
        returned = list(body.operations)[-1].operation.operands
        self.loops.append(
            Loop(
                start=start,
                end=self.length,
                turns=trips * count,
                carries=tuple(results),
                initial=tuple(operands),
                returned=tuple(self.unchanged(self._number[v]) for v in returned),
            )
        )

    def _manual(self, op: stablehlo.Operation, operands: list[int], trips: float) -> None:
        """A region whose values are the parts that one device has: it begins and ends with them."""
        block = op.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, operands, strict=True):
            self._rename(argument, operand, trips)
        self._block(block, trips)
        returned = list(block.operations)[-1].operation.operands
        for result, value in zip(op.results, returned, strict=True):
            self._rename(result, self._number[value], trips)

    def _rename(self, value: stablehlo.Value, of: int, trips: float) -> None:
        """A value on one side of a manual region's border that is another on the other side."""
        index = self._new(value, stablehlo.MANUAL, trips)
        self.operands[index] = [of]
        self.uses[of].append((stablehlo.MANUAL, index))

    def _send(self, op: stablehlo.Operation, name: str, tag: int, ragged: bool) -> None:
        sides = [op.operands[:1]] if ragged else [op.operands, op.results]
        self.sent.append(
            OwnSend(
                kind=name.removeprefix("stablehlo."),
                partners=stablehlo.partners_of(op),
                bytes=max(sum(map(stablehlo.bytes_of, values)) for values in sides),
                tag=tag,
                origin=origin_of(op.operands[0]),
                source=_where(op),
            )
        )

    def _sink_fills(self) -> None:
        """A loop makes itself what it is only given to read and what a constant fills.

        XLA's while-loop-constant-sinking: such a value is neither written nor handed over.
        """
        for loop in sorted(self.loops, key=lambda loop: loop.start):
            for carry, initial, returned in zip(
                loop.carries, loop.initial, loop.returned, strict=True
            ):
                if returned == carry and self.is_fill(initial):
                    self.op_of[carry], self.operands[carry] = "stablehlo.iota", []
                    self.uses[initial].remove(("stablehlo.while", carry))
                    if (passed := ("stablehlo.return", -1)) in self.uses[carry]:
                        self.uses[carry].remove(passed)  # else it is returned by another name

    def _drop_unused(self) -> set[int]:
        """Takes values of which nothing comes from the uses of others; returns them."""
        single = {first for first, count in self.tags.values() if count == 1}
        unused = set[int]()
        for v in reversed(range(len(self.sizes))):
            if self.uses[v] or v not in single or self.op_of[v] in _NOT_DROPPED:
                continue
            unused.add(v)
            for i in set(self.operands[v]):
                self.uses[i] = [use for use in self.uses[i] if use[1] != v]
        return unused

    def is_fill(self, v: int) -> bool:
        """Whether a value is a constant that fills an array, or counts."""
        if self.op_of[v] in ("stablehlo.constant", "sdy.constant", "stablehlo.iota"):
            return True
        passes = {BROADCAST, "stablehlo.convert", *RENAMES}
        return self.op_of[v] in passes and self.is_fill(self.operands[v][0])

    def fill(self, v: int) -> str:
        """What a constant fills an array with, as MLIR writes it; "" where none does."""
        passes = {BROADCAST, *RENAMES}
        while self.op_of[v] in passes:
            v = self.operands[v][0]
        return self._literals.get(v, "")

    def unchanged(self, v: int) -> int:
        """The value that constraints and reshapes only give another name."""
        while (source := self.source(v)) >= 0 and self.op_of[v] != UPDATE:
            v = source
        return v

    def _branches(self, op: stablehlo.Operation, first: int, trips: float) -> None:
        self.assumptions.append(f"the largest branch is taken at {_where(op)}")
        starts, tags = [], []
        for region in op.regions:
            start, known = len(self.sizes), len(self.trips)
            for block in region.blocks:
                for argument in block.arguments:
                    self._new(argument, "", trips)
                self._block(block, trips)
            starts.append((start, len(self.sizes)))
            tags.append(list(self.trips)[known:])
        weights = [sum(map(self._weight, range(a, b))) for a, b in starts]
        keep = weights.index(max(weights)) if weights else 0
        for i, (a, b) in enumerate(starts):
            if i != keep:
                for j in range(a, b):
                    self.trip_of[j] = 0.0
                self.trips.update(dict.fromkeys(tags[i], 0.0))

    def _weight(self, v: int) -> float:
        """How branches compare: operations and bytes that are made, one a unit, as in rung 2."""
        made = 0.0 if self.op_of[v] in FREE or not self.op_of[v] else self.sizes[v]
        return (self.own_flops[v] + made) * self.trip_of[v]

    def _flops(self, op: stablehlo.Operation, name: str, index: int, first: int) -> float:
        out = self.elements[index]
        if name == "stablehlo.dot_general":
            left = stablehlo.shape_of(op.operands[0])
            (_, contracted), _ = stablehlo.product_dimensions(op)
            depth = math.prod(left[d] for d in contracted)
            return product_flops(out * depth, stablehlo.dtype_of(op.operands[0]))
        if name == stablehlo.RAGGED_DOT:
            return ragged_flops(op, self.platform)
        if name == _CONVOLUTION:
            dtype = stablehlo.dtype_of(op.operands[0])
            return product_flops(convolution(op).flops / 2.0, dtype)
        if name in ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter"):
            return max((self.elements[i] for i in self.operands[index]), default=out)
        if name == "stablehlo.sort":  # the arrays that go along are not compared
            extent = self.dims[index][stablehlo.sorted_dimension(op)]
            return sort_flops(out, extent) if index == first else 0.0
        if name == "stablehlo.fft":
            return fft_flops(out, math.prod(stablehlo.integers(op, "fft_length")))
        if name == "stablehlo.cholesky":
            return cholesky_flops(out, self.dims[index][-1])
        if name == "stablehlo.triangular_solve":
            return triangular_solve_flops(out, stablehlo.shape_of(op.operands[0])[-1])
        if name == "stablehlo.select_and_scatter":
            window = math.prod(stablehlo.integers(op, "window_dimensions"))
            return window * self.elements[self.operands[index][1]]
        if (
            name in FREE
            or name in SLICES
            or name in stablehlo.SENDS
            or name
            in (
                BROADCAST,
                "stablehlo.iota",
                "stablehlo.transpose",
                "stablehlo.concatenate",
                "stablehlo.pad",
                "stablehlo.gather",
                "stablehlo.dynamic_update_slice",
                "stablehlo.convert",
            )
        ):
            return 0.0
        return out


def _where(op: stablehlo.Operation) -> str:
    """Where in the user's step an operation comes from, else the beginning of its location."""
    location = str(op.location)
    return stablehlo.source_of(location) or location[:60]
