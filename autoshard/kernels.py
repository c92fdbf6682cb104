"""The kernels and buffers a step will have, before any layout: fusion, trip counts, live ranges.

Read once from the flattened module. Elementwise chains are taken to fuse into what consumes them,
as XLA fuses them, so that only what a kernel writes costs memory and traffic. What shares a buffer
is decided in `buffers`. What a layout changes is how far each value is divided; `rungs.propagate`
fills that in.

Not modelled: XLA's algebraic simplification, layout changes, and buffer reuse inside a kernel.
"""

import dataclasses
import math
import re

import numpy as np

from autoshard.buffers import Loop, Values, assign
from autoshard.compat import stablehlo
from autoshard.trips import trip_count

_FREE = frozenset(
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
_HEAVY = frozenset(
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
        "concatenate",
        "dynamic_update_slice",
        "dynamic_gather",
        "while",
        "case",
        "if",
        "reduce",
        "rng",
    ]
) | {"chlo.top_k"}
_EXPENSIVE = frozenset(
    "stablehlo." + n
    for n in [
        "exponential",
        "tanh",
        "log",
        "power",
        "rsqrt",
        "sqrt",
        "divide",
        "sine",
        "cosine",
        "logistic",
        "exponential_minus_one",
        "log_plus_one",
        "cbrt",
        "atan2",
        "tan",
        "remainder",
    ]
) | frozenset(f"chlo.{n}" for n in ["erf", "erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh"])
_RENAMES = frozenset(
    {"sdy.sharding_constraint", "stablehlo.reshape", "stablehlo.optimization_barrier"}
)
_UPDATE = "stablehlo.dynamic_update_slice"
_SLICES = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})
_MOST_COPIES = 3  # XLA repeats a cheap chain in a few consumers, then writes it once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Kernels and values of one module as arrays; `n` values, `k` kernels, `r` reads.

    Attributes:
      value_bytes: (n,) size of each value on one device if nothing is sharded.
      tags: tag of an operation -> (first value, number of results); values are numbered so.
      argument_values: value number of each argument of main.
      site_values: (value, site index) of each sharding constraint.
      parents: (n,) for a constraint's value the value it constrains, else -1.
      kernel_value: (k,) the value a kernel writes.
      kernel_flops: (k,) floating-point operations if nothing is sharded, fused chains included.
      kernel_trips: (k,) how often it runs in a step.
      kernel_writes: (k,) 1 if it writes its whole value, 0 if it updates in place.
      kernel_dtypes: (k,) of a product's or convolution's operands, such as `bf16`; else "".
      read_kernel, read_value: (r,) which kernel reads which value.
      read_scale: (r,) part of the value that is read.
      buffer: (n,) the value whose buffer a value lies in; its own number where it has its own.
      live_from, live_to: (n,) positions between which a buffer is needed; -1, -1 for none. Those of
        a constraint count where a layout makes it another array than what it constrains.
      trips: tag -> executions of its operation in a step.
      operands: tags of products and convolutions with the values they take.
      assumptions: what the module did not say.
    """

    value_bytes: np.ndarray
    tags: dict[int, tuple[int, int]]
    argument_values: list[int]
    site_values: list[tuple[int, int]]
    parents: np.ndarray
    kernel_value: np.ndarray
    kernel_flops: np.ndarray
    kernel_trips: np.ndarray
    kernel_writes: np.ndarray
    kernel_dtypes: tuple[str, ...]
    read_kernel: np.ndarray
    read_value: np.ndarray
    read_scale: np.ndarray
    buffer: np.ndarray
    live_from: np.ndarray
    live_to: np.ndarray
    positions: dict[int, int]
    length: int
    trips: dict[int, float]
    operands: dict[int, tuple[int, ...]]
    assumptions: tuple[str, ...]

    @property
    def kernel_contracts(self) -> np.ndarray:
        """(k,) whether a kernel is a product or a convolution."""
        return np.array([dtype != "" for dtype in self.kernel_dtypes], dtype=bool)


class _Builder:
    def __init__(self, state_count: int, site_of_tag: dict[int, int]):
        self.state_count = state_count
        self.site_of_tag = site_of_tag
        self.number: dict[stablehlo.Value, int] = {}
        self.sizes: list[float] = []
        self.elements: list[float] = []
        self.parents: list[int] = []
        self.op_of: list[str] = []  # operation that makes the value, "" for arguments
        self.operands: list[list[int]] = []
        self.uses: list[list[tuple[str, int]]] = []  # (operation, value it makes or -1)
        self.trip_of: list[float] = []
        self.position_of: list[int] = []
        self.own_flops: list[float] = []
        self.tags: dict[int, tuple[int, int]] = {}
        self.trips: dict[int, float] = {}
        self.positions: dict[int, int] = {}
        self.site_values: list[tuple[int, int]] = []
        self.assumptions: list[str] = []
        self.loops: list[Loop] = []
        self.contracting: dict[int, tuple[int, ...]] = {}
        self.position = 0
        self.constants: dict[stablehlo.Value, str] = {}
        self.dtype_of: dict[int, str] = {}  # of a contraction's operands, by the value it makes

    def new(self, value: stablehlo.Value, op: str, trips: float, parent: int = -1) -> int:
        dims, bits = stablehlo.shape_and_bits(str(value.type))
        index = len(self.sizes)
        self.number[value] = index
        count = float(math.prod(dims))
        self.elements.append(count)
        self.sizes.append(count * bits / 8)
        self.parents.append(parent)
        self.op_of.append(op)
        self.operands.append([])
        self.uses.append([])
        self.trip_of.append(trips)
        self.position_of.append(self.position)
        self.own_flops.append(0.0)
        return index

    def alias(self, value: stablehlo.Value, index: int) -> None:
        self.number[value] = index

    def block(self, block: stablehlo.Block, trips: float) -> None:
        for op in block.operations:
            self.operation(op.operation, trips)

    def operation(self, op: stablehlo.Operation, trips: float) -> None:
        name = op.name
        self.position += 1
        attributes = op.attributes
        tag = attributes[stablehlo.TAG].value if stablehlo.TAG in attributes else -1
        self.positions[tag] = self.position
        self.trips[tag] = trips
        operands = [self.number[v] for v in op.operands if v in self.number]
        if name in ("stablehlo.return", "func.return"):
            for i in operands:
                self.uses[i].append((name, -1))
            return
        first = len(self.sizes)
        if name == "stablehlo.constant" or name == "sdy.constant":
            self.constants[op.results[0]] = str(attributes["value"])
        if name == "sdy.sharding_constraint":
            index = self.new(op.results[0], name, trips, parent=operands[0])
            self.operands[index] = operands[:1]
            self.uses[operands[0]].append((name, index))
            if tag in self.site_of_tag:
                self.site_values.append((index, self.site_of_tag[tag]))
            self.tags[tag] = (first, 1)
            return
        if name == "stablehlo.while":
            self._loop(op, operands, trips)
            self.tags[tag] = (first, len(op.results))
            return
        for k, result in enumerate(op.results):
            index = self.new(result, name, trips)
            barrier = name == "stablehlo.optimization_barrier"
            self.operands[index] = [operands[k]] if barrier else operands
            self.own_flops[index] = self._flops(op, index)
            if name in ("stablehlo.dot_general", "stablehlo.convolution"):
                self.contracting[tag] = tuple(operands)
                self.dtype_of[index] = stablehlo.dtype_of(op.operands[0])
        for i in operands:
            self.uses[i].append((name, first if op.results else -1))
        self.tags[tag] = (first, len(op.results))
        if name in ("stablehlo.case", "stablehlo.if"):
            self._branches(op, first, trips)

    def _loop(self, op: stablehlo.Operation, operands: list[int], trips: float) -> None:
        count, known = trip_count(op, self.constants)
        if not known:
            where = str(op.location)[:60]
            self.assumptions.append(f"unknown trip count taken as 1 at {where}")
        condition, body = (region.blocks[0] for region in op.regions)
        results = [self.new(r, "stablehlo.while", trips) for r in op.results]
        for result, operand in zip(results, operands, strict=False):
            self.operands[result] = [operand]
            self.uses[operand].append(("stablehlo.while", result))
        for argument, result in zip(condition.arguments, results, strict=True):
            self.alias(argument, result)
        for argument, result in zip(body.arguments, results, strict=True):
            self.alias(argument, result)
        start = self.position
        self.block(body, trips * count)
        returned = list(body.operations)[-1].operation.operands
        self.loops.append(
            Loop(
                start=start,
                end=self.position,
                carries=tuple(results),
                initial=tuple(operands),
                returned=tuple(self._unchanged(self.number[v]) for v in returned),
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
                if returned == carry and self._is_fill(initial):
                    self.op_of[carry], self.operands[carry] = "stablehlo.iota", []
                    self.uses[initial].remove(("stablehlo.while", carry))
                    self.uses[carry].remove(("stablehlo.return", -1))

    def _is_fill(self, v: int) -> bool:
        if self.op_of[v] in ("stablehlo.constant", "sdy.constant", "stablehlo.iota"):
            return True
        passes = {"stablehlo.broadcast_in_dim", "stablehlo.convert", *_RENAMES}
        return self.op_of[v] in passes and self._is_fill(self.operands[v][0])

    def _unchanged(self, v: int) -> int:
        """The value that constraints and reshapes only give another name."""
        while (source := self._source(v)) >= 0 and self.op_of[v] != _UPDATE:
            v = source
        return v

    def _source(self, v: int) -> int:
        """The value in whose buffer another lies, if it does; else -1."""
        if self.op_of[v] in _RENAMES or self.op_of[v] == _UPDATE:
            return self.operands[v][0]
        return -1

    def _branches(self, op: stablehlo.Operation, first: int, trips: float) -> None:
        self.assumptions.append(f"the largest branch is taken at {str(op.location)[:60]}")
        starts = []
        for region in op.regions:
            start = len(self.sizes)
            for block in region.blocks:
                for argument in block.arguments:
                    self.new(argument, "", trips)
                self.block(block, trips)
            starts.append((start, len(self.sizes)))
        weights = [sum(self.own_flops[a:b]) for a, b in starts]
        keep = weights.index(max(weights)) if weights else 0
        for i, (a, b) in enumerate(starts):
            if i != keep:
                for j in range(a, b):
                    self.trip_of[j] = 0.0

    def _flops(self, op: stablehlo.Operation, index: int) -> float:
        name = op.name
        out = self.elements[index]
        if name == "stablehlo.dot_general":
            left = stablehlo.shape_of(op.operands[0])
            found = re.search(
                r"lhs_contracting_dimensions = \[([\d, ]*)\]",
                str(op.attributes["dot_dimension_numbers"]),
            )
            dims = [int(d) for d in found.group(1).split(",") if d.strip()] if found else []
            return 2.0 * out * math.prod(left[d] for d in dims)
        if name == "stablehlo.convolution":
            kernel = stablehlo.shape_of(op.operands[1])
            text = str(op.attributes["dimension_numbers"])
            layout = text[text.index("x[") + 2 : text.index("]->")].split(",")
            feature = kernel[[d.strip() for d in layout].index("o")]
            return 2.0 * out * math.prod(kernel) / max(feature, 1)
        if name in ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter"):
            return max((self.elements[i] for i in self.operands[index]), default=out)
        if name == "stablehlo.sort":
            return out * max(1.0, math.log2(max(out, 2.0)))
        if (
            name in _FREE
            or name in _SLICES
            or name
            in (
                "stablehlo.broadcast_in_dim",
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

    def table(self, main: stablehlo.Block) -> KernelTable:
        arguments = [self.new(value, "", 1.0) for value in main.arguments]
        self.block(main, 1.0)
        self._sink_fills()
        n = len(self.sizes)
        returned = [
            self.number[v] for v in list(main.operations)[-1].operation.operands if v in self.number
        ]
        written = [self._written(i) for i in range(n)]
        kernel_value: list[int] = []
        kernel_flops: list[float] = []
        kernel_trips: list[float] = []
        kernel_writes: list[float] = []
        kernel_dtypes: list[str] = []
        read_kernel: list[int] = []
        read_value: list[int] = []
        read_scale: list[float] = []
        touches: list[list[int]] = [[] for _ in range(n)]
        for v in range(n):
            if not written[v] or self.op_of[v] in ("", "stablehlo.while", "stablehlo.case"):
                for i in self.operands[v]:
                    if self.op_of[v] in ("stablehlo.while", "stablehlo.optimization_barrier"):
                        self._touch(touches, written, i, self.position_of[v])
                continue
            reads, flops = self._gather(v, written)
            k = len(kernel_value)
            kernel_value.append(v)
            kernel_flops.append(flops)
            kernel_trips.append(self.trip_of[v])
            in_place = self.op_of[v] == _UPDATE
            kernel_writes.append(0.0 if in_place else 1.0)
            kernel_dtypes.append(self.dtype_of.get(v, ""))
            if in_place:
                operands = self.operands[v]
                reads = {operands[1]: 2.0} if len(operands) > 1 else {}
            for i, scale in reads.items():
                read_kernel.append(k)
                read_value.append(i)
                read_scale.append(scale)
                self._touch(touches, written, i, self.position_of[v])
            for i in self.operands[v]:
                self._touch(touches, written, i, self.position_of[v])
        buffer, last = assign(
            Values(
                position=self.position_of,
                written=written,
                argument=[op == "" for op in self.op_of],
                constraint=[parent >= 0 for parent in self.parents],
                source=[self._source(v) for v in range(n)],
                elementwise=[op not in _HEAVY for op in self.op_of],
                touches=touches,
            ),
            self.loops,
        )
        live_from = np.full(n, -1)
        live_to = np.full(n, -1)
        aliased = set(returned[: self.state_count])
        for i in list(aliased):
            while self.parents[i] >= 0:
                i = self.parents[i]
                aliased.add(i)
        for v in range(n):
            if v in aliased or self.op_of[v] == "" or buffer[v] != v:
                continue
            if written[v] or self.parents[v] >= 0:
                live_from[v] = self.position_of[v]
                live_to[v] = max(last[v], self.position_of[v])
        return KernelTable(
            value_bytes=np.array(self.sizes),
            tags=self.tags,
            argument_values=arguments,
            site_values=self.site_values,
            parents=np.array(self.parents),
            kernel_value=np.array(kernel_value, dtype=int),
            kernel_flops=np.array(kernel_flops),
            kernel_trips=np.array(kernel_trips),
            kernel_writes=np.array(kernel_writes),
            kernel_dtypes=tuple(kernel_dtypes),
            read_kernel=np.array(read_kernel, dtype=int),
            read_value=np.array(read_value, dtype=int),
            read_scale=np.array(read_scale),
            buffer=np.array(buffer, dtype=int),
            live_from=live_from,
            live_to=live_to,
            positions=self.positions,
            length=self.position + 2,
            trips=self.trips,
            operands=self.contracting,
            assumptions=tuple(dict.fromkeys(self.assumptions)),
        )

    def _touch(self, touches: list[list[int]], written: list[bool], v: int, position: int) -> None:
        """Notes that whatever buffers a value is read from are needed at a position."""
        stack, seen = [v], set()
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            touches[i].append(position)
            if not written[i] and self.parents[i] < 0:
                stack += self.operands[i]

    def _written(self, v: int) -> bool:
        """Whether a value is written to memory rather than fused into what uses it."""
        name = self.op_of[v]
        if name == "" or name in _HEAVY:
            return True
        if name in _FREE or self.sizes[v] == 0:
            return False
        uses = self._real_uses(v)
        if name in ("stablehlo.broadcast_in_dim", "stablehlo.iota", "stablehlo.convert"):
            return any(u in ("stablehlo.while", "func.return", "stablehlo.return") for u in uses)
        ends = [u for u in uses if u in _HEAVY or u.endswith("return")]
        ends = [u for u in ends if u != "stablehlo.reduce"]
        if ends:
            return True
        if name in _EXPENSIVE and len(uses) > 1:
            return True
        return len(uses) > _MOST_COPIES

    def _real_uses(self, v: int) -> list[str]:
        found: list[str] = []
        for name, result in self.uses[v]:
            if name in _FREE and result >= 0:
                found += self._real_uses(result)
            else:
                found.append(name)
        return found

    def _gather(self, v: int, written: list[bool]) -> tuple[dict[int, float], float]:
        """What one kernel reads (value -> part of it) and the operations it executes."""
        reads: dict[int, float] = {}
        flops = self.own_flops[v]
        name = self.op_of[v]
        if name == "stablehlo.gather":
            reads[v] = 1.0
            stack = self.operands[v][1:]
        else:
            stack = list(self.operands[v])
        seen: set[int] = set()
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if (self.op_of[i] in _SLICES and not written[i]) or written[i] or self.op_of[i] == "":
                reads[i] = 1.0
            elif self.op_of[i] == "sdy.sharding_constraint":
                base = i
                while self.parents[base] >= 0:
                    base = self.parents[base]
                if written[base] or self.op_of[base] == "":
                    reads[i] = 1.0
                else:
                    stack += self.operands[i]
            else:
                flops += self.own_flops[i]
                stack += self.operands[i]
        return reads, flops


def read_kernels(
    module: stablehlo.Operation, state_count: int, site_of_tag: dict[int, int]
) -> KernelTable:
    """Reads the kernels of a flattened module whose operations carry tags (`stablehlo.tag`).

    Args:
      site_of_tag: which site a tagged constraint operation is.
    """
    with module.context:
        main = stablehlo.main_function(module).regions[0].blocks[0]
        return _Builder(state_count, site_of_tag).table(main)
