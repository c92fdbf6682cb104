"""The operations of a flattened module as numbered values: sizes, uses, loops, arithmetic.

Read once, before any layout. `kernels` decides what is written to memory, `memory` how long it
stays there.

Not modelled: what the compiler simplifies before it partitions.
"""

import math
import weakref
from typing import NamedTuple

from autoshard.compat.shardy import stablehlo
from autoshard.compat.shardy.ragged import ragged_flops
from autoshard.compat.shardy.windows import convolution_flops, windows_of
from autoshard.program.analysis import Analysis
from autoshard.records.arithmetic import (
    cholesky_flops,
    fft_flops,
    product_flops,
    sort_flops,
    triangular_solve_flops,
)
from autoshard.records.precision import effective_matmul_dtype
from autoshard.records.windows import Windowed
from autoshard.rungs.propagate.trips import trip_count


def _names(*names: str) -> frozenset[str]:
    return frozenset(f"stablehlo.{name}" for name in names)


UPDATE = "stablehlo.dynamic_update_slice"
BROADCAST = "stablehlo.broadcast_in_dim"
WHILE = "stablehlo.while"
RENAMES = _names("reshape", "optimization_barrier") | {
    "sdy.sharding_constraint",
    stablehlo.MANUAL,
}
"""Operations whose result is their operand by another name."""
FREE = (
    RENAMES - {stablehlo.MANUAL}
    | {"sdy.constant"}
    | _names("constant", "tuple", "get_tuple_element", "after_all", "create_token")
)
"""Operations that take no time and write nothing."""
BORDERS = stablehlo.SENDS | {WHILE, stablehlo.MANUAL}
"""Operations that take values as they lie in memory and have no kernel of their own."""
HEAVY = (
    BORDERS
    | {"chlo.top_k", stablehlo.RAGGED_DOT, UPDATE}
    | _names(
        *("dot_general", "convolution", "gather", "scatter", "sort", "custom_call", "fft"),
        *("rng_bit_generator", "rng", "cholesky", "triangular_solve", "dynamic_gather"),
        *("reduce", "reduce_window", "select_and_scatter", "case", "if"),
    )
)
"""Operations that are kernels of their own; all others fuse."""
SLICES = _names("slice", "dynamic_slice")
_MOVES = (
    SLICES
    | {BROADCAST, UPDATE}
    | _names("iota", "transpose", "concatenate", "pad", "gather", "convert", "reverse")
)
"""Operations that compute nothing."""
_BRANCHES = _names("case", "if")
_KEPT_UNUSED = BORDERS | _BRANCHES | {"", "stablehlo.custom_call"}
"""Operations that may do more than make their values."""


class Loop(NamedTuple):
    """A `while`.

    Attributes:
      start, end: positions of the first and the last operation of its body.
      carries, initial, returned: of each carry the value in the loop, before it, and at the end of
        its body.
    """

    start: int
    end: int
    carries: tuple[int, ...]
    initial: tuple[int, ...]
    returned: tuple[int, ...]


class ManualSend(NamedTuple):
    """A collective that the user's own `shard_map` asks for.

    Attributes:
      kind: the operation's name without its dialect, such as "all_reduce".
      partners: as `stablehlo.partners_of` has them.
      bytes: the larger of operands and results, of the parts that the region has.
      tag: of the operation.
      source: `file:line` of the user's step, or "".
    """

    kind: str
    partners: tuple[tuple[int, ...], ...] | tuple[str, ...]
    bytes: float
    tag: int
    source: str


class WindowedOperation(NamedTuple):
    """An operation that reads its operand through windows: a convolution, a pool, a slice, a pad.

    Attributes:
      tag: of the operation.
      operands: the values it reads, by number.
      dimensions: those that windows go over.
      source: `file:line` of the user's step, or "".
    """

    tag: int
    operands: tuple[int, ...]
    dimensions: tuple[Windowed, ...]
    source: str


class Operations:
    """Values of a module by number, in the order of the program.

    Args:
      main: the block of the flattened main function, its operations tagged.
      site_of_tag: which site a tagged constraint operation is.
      platform: that the module was lowered for.

    Attributes:
      sizes, elements: bytes and elements of each value if nothing is sharded.
      extents: its dimensions.
      parents: for a constraint's value the value it constrains, else -1.
      op_of: the operation that makes a value, "" for arguments.
      operands: of that operation, by number.
      uses: (operation, the first value it makes or -1) of all that take the value and are used.
      trip_of: how often its operation runs in a step.
      position_of: where that stands in the program.
      own_flops: of its operation alone, if nothing is sharded.
      dtype_of: of the operands of a product or convolution, with how precisely it multiplies
        (`precision.effective_matmul_dtype`), by the value it makes.
      arguments, returned: of the main function.
      tags: tag of an operation -> (first value, number of results).
      entries: tag of a manual region -> the same of what its body is given.
      trips, positions: the same two by tag.
      site_values: (value, site index) of each sharding constraint.
      loops: every `while`.
      contracting: tags of products and convolutions with the values they take.
      windowed: operations that read through windows.
      sent: what the user's own manual regions send.
      unused: values that nothing needs, which no compiler makes.
      length: the last position.
      assumptions: what the module did not say.
    """

    def __init__(self, main: stablehlo.Block, site_of_tag: dict[int, int], platform: str):
        self.sizes: list[float] = []
        self.elements: list[float] = []
        self.extents: list[tuple[int, ...]] = []
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
        self.site_values: list[tuple[int, int]] = []
        self.loops: list[Loop] = []
        self.contracting: dict[int, tuple[int, ...]] = {}
        self.windowed: list[WindowedOperation] = []
        self.sent: list[ManualSend] = []
        self.assumptions: list[str] = []
        self.length = 0
        self._site_of_tag = site_of_tag
        self._platform = platform
        self._number: dict[stablehlo.Value, int] = {}
        self._constants: dict[stablehlo.Value, str] = {}
        self.arguments = [self._new(value, "", 1.0) for value in main.arguments]
        self._block(main, 1.0)
        last = list(main.operations)[-1].operation
        self.returned = [self._number[v] for v in last.operands if v in self._number]
        self._sink_fills()
        self.unused = self._drop_unused()
        self.windowed = [w for w in self.windowed if self.tags[w.tag][0] not in self.unused]
        self._number, self._constants = {}, {}  # the module is not kept alive

    def source(self, v: int) -> int:
        """The value in whose buffer another lies, if it does; else -1."""
        if self.op_of[v] in RENAMES or self.op_of[v] == UPDATE:
            return self.operands[v][0]
        return -1

    def unchanged(self, v: int) -> int:
        """The value that constraints and reshapes only give another name."""
        while self.op_of[v] in RENAMES:
            v = self.operands[v][0]
        return v

    def is_fill(self, v: int) -> bool:
        """Whether a value is a constant that fills an array, or counts."""
        if self.op_of[v] in ("stablehlo.constant", "sdy.constant", "stablehlo.iota"):
            return True
        passes = {BROADCAST, "stablehlo.convert", *RENAMES}
        return self.op_of[v] in passes and self.is_fill(self.operands[v][0])

    def _new(self, value: stablehlo.Value, op: str, trips: float, parent: int = -1) -> int:
        extents, bits = stablehlo.shape_and_bits(str(value.type))
        index = len(self.sizes)
        self._number[value] = index
        self.elements.append(float(math.prod(extents)))
        self.sizes.append(self.elements[-1] * bits / 8)
        self.extents.append(extents)
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
        if name in ("stablehlo.constant", "sdy.constant"):
            self._constants[op.results[0]] = stablehlo.literal(op)
        if name == "sdy.sharding_constraint":
            self._new(op.results[0], name, trips, parent=operands[0])
            self.operands[first] = operands[:1]
            self.uses[operands[0]].append((name, first))
            if tag in self._site_of_tag:
                self.site_values.append((first, self._site_of_tag[tag]))
            self.tags[tag] = (first, 1)
            return
        if name == WHILE:
            self._loop(op, operands, trips)
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
                self.dtype_of[index] = effective_matmul_dtype(dtype, *stablehlo.precision_of(op))
        if windows := windows_of(op):
            self.windowed.append(WindowedOperation(tag, tuple(operands), windows, _where(op)))
        for k, i in enumerate(operands):
            self.uses[i].append((name, first + k * barrier if op.results else -1))
        self.tags[tag] = (first, len(op.results))
        if name in _BRANCHES:
            self._branches(op, trips)

    def _loop(self, op: stablehlo.Operation, operands: list[int], trips: float) -> None:
        count, known = trip_count(op, self._constants)
        if not known:
            self.assumptions.append(f"unknown trip count taken as 1 at {_where(op)}")
        condition, body = (region.blocks[0] for region in op.regions)
        results = [self._new(r, WHILE, trips) for r in op.results]
        for result, operand in zip(results, operands, strict=True):
            self.operands[result] = [operand]
            self.uses[operand].append((WHILE, result))
        for arguments in (condition.arguments, body.arguments):
            self._number.update(zip(arguments, results, strict=True))
        start = self.length
        self._block(body, trips * count)
        returned = list(body.operations)[-1].operation.operands
        self.loops.append(
            Loop(
                start=start,
                end=self.length,
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
            ManualSend(
                kind=name.removeprefix("stablehlo."),
                partners=stablehlo.partners_of(op),
                bytes=max(sum(map(stablehlo.bytes_of, values)) for values in sides),
                tag=tag,
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
                    self.uses[initial].remove((WHILE, carry))
                    if (passed := ("stablehlo.return", -1)) in self.uses[carry]:
                        self.uses[carry].remove(passed)  # else it is returned by another name

    def _drop_unused(self) -> set[int]:
        """Takes values that nothing needs out of the uses of others; returns them."""
        single = {first for first, count in self.tags.values() if count == 1}
        unused = set[int]()
        for v in reversed(range(len(self.sizes))):
            if self.uses[v] or v not in single or self.op_of[v] in _KEPT_UNUSED:
                continue
            unused.add(v)
            for i in set(self.operands[v]):
                self.uses[i] = [use for use in self.uses[i] if use[1] != v]
        return unused

    def _branches(self, op: stablehlo.Operation, trips: float) -> None:
        """The branch with the most work is taken; the others run 0 times."""
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
                self.trip_of[a:b] = [0.0] * (b - a)
                self.trips.update(dict.fromkeys(tags[i], 0.0))

    def _weight(self, v: int) -> float:
        """How branches compare: operations and bytes that are made, one a unit, as in rung 2."""
        made = 0.0 if self.op_of[v] in FREE or not self.op_of[v] else self.sizes[v]
        return (self.own_flops[v] + made) * self.trip_of[v]

    def _flops(self, op: stablehlo.Operation, name: str, index: int, first: int) -> float:
        out = self.elements[index]
        if name in FREE or name in _MOVES or name in BORDERS:
            return 0.0
        if name == "stablehlo.dot_general":
            left = stablehlo.shape_of(op.operands[0])
            (_, contracted), _ = stablehlo.product_dimensions(op)
            depth = math.prod(left[d] for d in contracted)
            return product_flops(out * depth, stablehlo.dtype_of(op.operands[0]))
        if name == stablehlo.RAGGED_DOT:
            return ragged_flops(op, self._platform)
        if name == "stablehlo.convolution":
            return convolution_flops(op)
        if name in ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter"):
            return max((self.elements[i] for i in self.operands[index]), default=out)
        if name == "stablehlo.sort":  # the arrays that go along are not compared
            extent = self.extents[index][stablehlo.sorted_dimension(op)]
            return sort_flops(out, extent) if index == first else 0.0
        if name == "stablehlo.fft":
            return fft_flops(out, math.prod(stablehlo.integers(op, "fft_length")))
        if name == "stablehlo.cholesky":
            return cholesky_flops(out, self.extents[index][-1])
        if name == "stablehlo.triangular_solve":
            return triangular_solve_flops(out, stablehlo.shape_of(op.operands[0])[-1])
        if name == "stablehlo.select_and_scatter":
            window = math.prod(stablehlo.integers(op, "window_dimensions"))
            return window * self.elements[self.operands[index][1]]
        return out


def operations_of(analysis: Analysis) -> Operations:
    """The operations of an analysed program, read once."""
    found = _READ.get(analysis)
    if found is None:
        with analysis.module.context:
            main = stablehlo.main_function(analysis.module).regions[0].blocks[0]
            found = Operations(main, analysis.site_of_tag, analysis.platform)
        _READ[analysis] = found
    return found


_READ: weakref.WeakKeyDictionary[Analysis, Operations] = weakref.WeakKeyDictionary()


def _where(op: stablehlo.Operation) -> str:
    """Where in the user's step an operation comes from, else the beginning of its location."""
    location = str(op.location)
    return stablehlo.source_of(location) or location[:60]
