"""The kernels and buffers a step will have, before any layout: fusion, trip counts, live ranges.

Read once from the flattened module. What a layout changes is how far each value is divided;
`rungs.shares` fills that in.

Not modelled: XLA's algebraic simplification, layout changes, and buffer reuse inside a kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.buffers import Loop, Values, assign, innermost
from autoshard.cache_lines import Turn
from autoshard.compat import stablehlo
from autoshard.compat.convolution import Convolution
from autoshard.fusion import Fusion, Transposed
from autoshard.operations import BORDERS, HEAVY, JOINS, UPDATE, Operations, OwnSend, Shift
from autoshard.pooling import POOLED, places_kept

_NO_KERNELS = BORDERS | {"", "stablehlo.case"}
_PASSES_ON = BORDERS | {"stablehlo.optimization_barrier"}
_FILLS_EARLY = frozenset({"cuda", "rocm"})
"""Platforms whose compiler fills what is scattered into before the loop that makes the rest of it.

So seen with XLA:GPU (jax 0.10.2). Not so libtpu 0.0.42, by the peaks it says (docs/decisions/0026).
"""


class SummedProduct(NamedTuple):
    """A product of two arrays that a kernel makes and sums over one of its dimensions.

    Attributes:
      kernel: its number.
      tag: of the operation that makes the product.
      extents: of the product if nothing is sharded.
      dimension: that is summed over.
    """

    kernel: int
    tag: int
    extents: tuple[int, ...]
    dimension: int


class RowedProduct(NamedTuple):
    """A matrix product, whose result has rows (`rows`).

    Attributes:
      kernel: its number.
      tag: of the operation.
      extents: of the result if nothing is sharded.
      dimensions: of the result, along which its rows lie; none of a vector times a matrix.
      columns: the others, but for the batch's: the rows where XLA turns the product around.
    """

    kernel: int
    tag: int
    extents: tuple[int, ...]
    dimensions: tuple[int, ...]
    columns: tuple[int, ...]


class Scratch(NamedTuple):
    """An array that the compiler makes beside the values of a step, before a kernel needs it.

    Attributes:
      value: that it is divided like.
      scale: its size, in units of that.
      first, last: positions between which it is needed.
    """

    value: int
    scale: float
    first: int
    last: int


class ConvolvedKernel(NamedTuple):
    """A convolution.

    Attributes:
      kernel: its number.
      tag: of the operation.
      data, by: the value that is convolved, and that it is convolved by.
      data_extents, extents: of the data and of the result if nothing is sharded.
      said: what else is to be known of it.
    """

    kernel: int
    tag: int
    data: int
    by: int
    data_extents: tuple[int, ...]
    extents: tuple[int, ...]
    said: Convolution


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Kernels and values of one module as arrays; `n` values, `k` kernels, `r` reads.

    Attributes:
      value_bytes: (n,) size of each value on one device if nothing is sharded.
      value_elements: (n,) elements of it.
      tags: tag of an operation -> (first value, number of results); values are numbered so.
      entries: tag of a manual region -> the same of what its body is given.
      argument_values: value number of each argument of main.
      site_values: (value, site index) of each sharding constraint.
      parents: (n,) for a constraint's value the value it constrains, else -1.
      kernel_value: (k,) the value a kernel writes.
      kernel_flops: (k,) floating-point operations if nothing is sharded, fused chains included.
      kernel_trips: (k,) how often it runs in a step.
      kernel_turns: (k,) the innermost loop that it runs in, -1 where there is none.
      loops_around: of each loop the innermost that it stands in, -1 where there is none.
      loop_turns: of each loop how many turns it takes in a step, those of loops around it counted.
      kernel_writes: (k,) 1 if it writes its whole value, 0 if it updates in place.
      kernel_loops: (k,) whether it computes each element of its value from one of each operand.
      kernel_extents: (k, rank) of the dimensions of its value, 1 where it has none.
      kernel_turned: (k,) whether it is a convolution that XLA turns around (`convolutions`).
      kernel_dtypes: (k,) of a product's or convolution's operands, such as `bf16`, with how
        precisely it multiplies (`precision.multiplied_as`); else "".
      read_kernel, read_value: (r,) which kernel reads which value.
      read_scale: (r,) part of the value that is read.
      transposed_kernel, transposed_value: (t,) which kernel transposes which value.
      transposed_product: (t,) the product that makes it just so, unless its parts are summed over
        devices; else -1.
      transposed_arrays: (t,) how many arrays of its size are read for it, each across cache lines.
      transposed_extents: (t,) its dimensions if nothing is sharded.
      transposed_turns: (t,) from which order of them to which it is brought.
      rowed_products: matrix products, each a kernel.
      convolutions: each a kernel.
      shifts: slices and pads that move places and are needed, each once.
      summed_products: what XLA:CPU hands to a library as sums of products (`degenerate`).
      buffer: (n,) the value whose buffer a value lies in; its own number where it has its own.
      live_from, live_to: (n,) positions between which a buffer is needed; -1, -1 for none. Those of
        a constraint count where a layout makes it another array than what it constrains.
      scratch: what is needed beside the values.
      copied: (result, operand) of products and convolutions that need the operand in another order.
      ends: tag of a loop -> position of the last operation of its body.
      trips: tag -> executions of its operation in a step.
      operands: tags of products and convolutions with the values they take.
      sent: what the user's own manual regions send.
      assumptions: what the module did not say.
    """

    value_bytes: np.ndarray
    value_elements: np.ndarray
    tags: dict[int, tuple[int, int]]
    entries: dict[int, tuple[int, int]]
    argument_values: list[int]
    site_values: list[tuple[int, int]]
    parents: np.ndarray
    kernel_value: np.ndarray
    kernel_flops: np.ndarray
    kernel_trips: np.ndarray
    kernel_turns: np.ndarray
    loops_around: tuple[int, ...]
    loop_turns: tuple[float, ...]
    kernel_writes: np.ndarray
    kernel_loops: np.ndarray
    kernel_extents: np.ndarray
    kernel_turned: np.ndarray
    kernel_dtypes: tuple[str, ...]
    read_kernel: np.ndarray
    read_value: np.ndarray
    read_scale: np.ndarray
    transposed_kernel: np.ndarray
    transposed_value: np.ndarray
    transposed_product: np.ndarray
    transposed_arrays: np.ndarray
    transposed_extents: tuple[tuple[int, ...], ...]
    transposed_turns: tuple[Turn, ...]
    rowed_products: tuple[RowedProduct, ...]
    convolutions: tuple[ConvolvedKernel, ...]
    shifts: tuple[Shift, ...]
    summed_products: tuple[SummedProduct, ...]
    buffer: np.ndarray
    live_from: np.ndarray
    live_to: np.ndarray
    scratch: tuple[Scratch, ...]
    copied: frozenset[tuple[int, int]]
    positions: dict[int, int]
    ends: dict[int, int]
    length: int
    trips: dict[int, float]
    operands: dict[int, tuple[int, ...]]
    sent: tuple[OwnSend, ...]
    assumptions: tuple[str, ...]

    @property
    def kernel_contracts(self) -> np.ndarray:
        """(k,) whether a kernel is a product or a convolution."""
        return np.array([dtype != "" for dtype in self.kernel_dtypes], dtype=bool)


def read_kernels(
    module: stablehlo.Operation,
    state_count: int,
    site_of_tag: dict[int, int],
    platform: str,
    parts: int = 1,
) -> KernelTable:
    """Reads the kernels of a flattened module whose operations carry tags (`stablehlo.tag`).

    Args:
      site_of_tag: which site a tagged constraint operation is.
      platform: that it was lowered for.
      parts: into how many arrays are divided where the compiler asks how large they are.
    """
    with module.context:
        main = stablehlo.main_function(module).regions[0].blocks[0]
        ops = Operations(main, site_of_tag, platform)
    return _table(ops, state_count, parts)


def _table(ops: Operations, state_count: int, parts: int) -> KernelTable:
    """Kernels, their reads, and from where to where each buffer is needed."""
    fusion = Fusion(ops, parts)
    written = fusion.written
    n = len(ops.sizes)
    kernel_value: list[int] = []
    kernel_flops: list[float] = []
    kernel_trips: list[float] = []
    kernel_writes: list[float] = []
    kernel_dtypes: list[str] = []
    read_kernel: list[int] = []
    read_value: list[int] = []
    read_scale: list[float] = []
    transposed_kernel: list[int] = []
    transposed: list[Transposed] = []
    summed: list[tuple[int, int]] = []
    scratch: list[Scratch] = []
    copies = set[tuple[int, int]]()
    touches: list[list[int]] = [[] for _ in range(n)]
    for v in range(n):
        if not written[v] or ops.op_of[v] in _NO_KERNELS:
            for i in ops.operands[v]:
                if ops.op_of[v] in _PASSES_ON:
                    _touch(ops, touches, written, i, ops.position_of[v])
            continue
        reads, flops, turned = fusion.kernel(v)
        k = len(kernel_value)
        transposed_kernel += [k] * len(turned)
        transposed += turned
        if (product := fusion.summed_product(v)) >= 0:
            summed.append((k, product))
        kernel_value.append(v)
        kernel_flops.append(flops)
        kernel_trips.append(ops.trip_of[v])
        in_place = fusion.updates_in_place(v)
        kernel_writes.append(0.0 if in_place else 1.0)
        kernel_dtypes.append(ops.dtype_of.get(v, ""))
        if in_place:
            operands = ops.operands[v]
            reads = {operands[1]: 2.0} if len(operands) > 1 else {}
        copied = _copied_early(ops, fusion, v, turned)
        scratch += copied.values()
        if fusion.copies(v):
            copies |= {(v, t.value) for t in turned}
        read_kernel += [k] * len(reads)
        read_value += reads.keys()
        read_scale += reads.values()
        for i in {*reads, *(i for i in ops.operands[v] if fusion.is_read(i, v))}:
            if ops.unchanged(i) not in copied:
                _touch(ops, touches, written, i, ops.position_of[v])
    for v in ops.returned[state_count:]:  # whoever asked for it takes it when all is done
        _touch(ops, touches, written, v, ops.length)
    buffer, last = assign(
        Values(
            position=ops.position_of,
            written=written,
            argument=[op == "" for op in ops.op_of],
            constraint=[parent >= 0 for parent in ops.parents],
            source=[
                -1 if ops.op_of[v] == UPDATE and not fusion.updates_in_place(v) else ops.source(v)
                for v in range(n)
            ],
            elementwise=[op not in HEAVY and op not in JOINS for op in ops.op_of],
            touches=touches,
        ),
        ops.loops,
    )
    live_from = np.full(n, -1)
    live_to = np.full(n, -1)
    aliased = set(ops.returned[:state_count])
    for i in list(aliased):
        while ops.parents[i] >= 0 or ops.op_of[i] == stablehlo.MANUAL:
            i = ops.source(i)
            aliased.add(i)
    filled = _filled_early(ops) if ops.platform in _FILLS_EARLY else {}
    if ops.platform == "cpu":
        filled, found = _looked_up(ops, fusion)
        scratch += found
    for v in range(n):
        if v in aliased or ops.op_of[v] == "" or buffer[v] != v:
            continue
        if written[v] or ops.parents[v] >= 0:
            live_from[v] = filled.get(v, ops.position_of[v])
            live_to[v] = max(last[v], ops.position_of[v])
    return KernelTable(
        value_bytes=np.array(ops.sizes),
        value_elements=np.array(ops.elements),
        tags=ops.tags,
        entries=ops.entries,
        argument_values=ops.arguments,
        site_values=ops.site_values,
        parents=np.array(ops.parents),
        kernel_value=np.array(kernel_value, dtype=int),
        kernel_flops=np.array(kernel_flops),
        kernel_trips=np.array(kernel_trips),
        kernel_turns=np.array(
            [innermost(ops.loops, ops.position_of[v]) for v in kernel_value], dtype=int
        ),
        loops_around=tuple(innermost(ops.loops, loop.start) for loop in ops.loops),
        loop_turns=tuple(loop.turns for loop in ops.loops),
        kernel_writes=np.array(kernel_writes),
        kernel_loops=np.array([ops.op_of[v] not in HEAVY for v in kernel_value], dtype=bool),
        kernel_extents=_extents([ops.dims[v] for v in kernel_value]),
        kernel_turned=np.array(
            [v in ops.convolved and ops.convolved[v].turned for v in kernel_value], dtype=bool
        ),
        kernel_dtypes=tuple(kernel_dtypes),
        read_kernel=np.array(read_kernel, dtype=int),
        read_value=np.array(read_value, dtype=int),
        read_scale=np.array(read_scale),
        transposed_kernel=np.array(transposed_kernel, dtype=int),
        transposed_value=np.array([t.value for t in transposed], dtype=int),
        transposed_product=np.array([t.product for t in transposed], dtype=int),
        transposed_arrays=np.array([t.arrays for t in transposed], dtype=int),
        transposed_extents=tuple(tuple(ops.dims[t.value]) for t in transposed),
        transposed_turns=tuple(t.turn for t in transposed),
        rowed_products=_rowed_products(ops, kernel_value),
        convolutions=_convolutions(ops, kernel_value),
        shifts=_shifts(ops),
        summed_products=_summed_products(ops, kernel_value, summed),
        buffer=np.array(buffer, dtype=int),
        live_from=live_from,
        live_to=live_to,
        scratch=tuple(scratch),
        copied=frozenset(copies),
        positions=ops.positions,
        ends=ops.ends,
        length=ops.length + 2,
        trips=ops.trips,
        operands=ops.contracting,
        sent=tuple(ops.sent),
        assumptions=tuple(dict.fromkeys(ops.assumptions)),
    )


def _looked_up(ops: Operations, fusion: Fusion) -> tuple[dict[int, int], list[Scratch]]:
    """Gradients of pools -> where zeros are written for them; and what looking up needs."""
    filled: dict[int, int] = {}
    scratch: list[Scratch] = []
    for v, name in enumerate(ops.op_of):
        if name != POOLED:
            continue
        pooled, gradient = ops.operands[v][:2]
        last = ops.position_of[v]
        first = fusion.ready(pooled)
        if innermost(ops.loops, first) != innermost(ops.loops, last):
            first = last
        filled[v] = first
        element_bytes = ops.sizes[gradient] / max(ops.elements[gradient], 1.0)
        places = places_kept(len(ops.dims[pooled]), element_bytes)
        here = 1.0 if first < ops.position_of[pooled] else 0.0
        scratch += [
            Scratch(value=pooled, scale=places + here, first=first, last=first),
            Scratch(value=gradient, scale=places, first=first, last=last),
        ]
    return filled, scratch


def _copied_early(
    ops: Operations, fusion: Fusion, v: int, transposed: Sequence[Transposed]
) -> dict[int, Scratch]:
    """Operands of a product that are copied for it in another order, as soon as they are there.

    Not those of which the copy takes the place, as they are computed again.

    Args:
      v: what the product makes.
      transposed: what it transposes.
    """
    if not fusion.copies(v):
        return {}
    found: dict[int, Scratch] = {}
    for turned in transposed:
        operand = ops.unchanged(turned.value)
        made, last = ops.position_of[operand], ops.position_of[v]
        here = innermost(ops.loops, made) == innermost(ops.loops, last)
        if here and fusion.is_copied(operand):
            found[operand] = Scratch(value=turned.value, scale=1.0, first=made, last=last)
    return found


def _rowed_products(ops: Operations, kernel_value: list[int]) -> tuple[RowedProduct, ...]:
    """Kernels that are matrix products."""
    return tuple(
        RowedProduct(
            kernel=kernel,
            tag=ops.tag_of[v],
            extents=ops.dims[v],
            dimensions=ops.free_dims[v][0],
            columns=ops.free_dims[v][1],
        )
        for kernel, v in enumerate(kernel_value)
        if v in ops.free_dims
    )


def _convolutions(ops: Operations, kernel_value: list[int]) -> tuple[ConvolvedKernel, ...]:
    """Kernels that are convolutions."""
    return tuple(
        ConvolvedKernel(
            kernel=kernel,
            tag=ops.tag_of[v],
            data=ops.operands[v][0],
            by=ops.operands[v][1],
            data_extents=ops.dims[ops.operands[v][0]],
            extents=ops.dims[v],
            said=ops.convolved[v],
        )
        for kernel, v in enumerate(kernel_value)
        if v in ops.convolved
    )


def _shifts(ops: Operations) -> tuple[Shift, ...]:
    """Those that are needed; of equal ones in one loop a compiler keeps the first."""
    found: dict[object, Shift] = {}
    for v, shift in ops.shifted.items():
        if v not in ops.unused:
            loop = innermost(ops.loops, ops.position_of[v])
            found.setdefault((ops.unchanged(shift.data), shift.windows, loop), shift)
    return tuple(found.values())


def _summed_products(
    ops: Operations, kernel_value: list[int], found: list[tuple[int, int]]
) -> tuple[SummedProduct, ...]:
    """Kernels with the products that they sum."""
    return tuple(
        SummedProduct(
            kernel=kernel,
            tag=ops.tag_of[product],
            extents=ops.dims[product],
            dimension=ops.summed[kernel_value[kernel]],
        )
        for kernel, product in found
    )


def _extents(dims: list[tuple[int, ...]]) -> np.ndarray:
    """The extents of several arrays as one, with ones after the last dimension of each."""
    rank = max(map(len, dims), default=0) or 1
    return np.array([(*d, *[1] * (rank - len(d))) for d in dims], dtype=int).reshape(-1, rank)


def _filled_early(ops: Operations) -> dict[int, int]:
    """Scatters into constants -> where the last loop begins before them; those in loops are not."""
    outermost: list[Loop] = []
    for loop in sorted(ops.loops, key=lambda loop: loop.start):
        if not outermost or loop.start > outermost[-1].end:
            outermost.append(loop)
    found = {}
    for v, name in enumerate(ops.op_of):
        if name != "stablehlo.scatter" or not ops.is_fill(ops.operands[v][0]):
            continue
        position = ops.position_of[v]
        before = [loop.start for loop in outermost if loop.end < position]
        if before and not any(loop.start < position <= loop.end for loop in outermost):
            found[v] = before[-1]
    return found


def _touch(
    ops: Operations, touches: list[list[int]], written: list[bool], v: int, position: int
) -> None:
    """Notes that whatever buffers a value is read from are needed at a position."""
    stack, seen = [v], set()
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        touches[i].append(position)
        if not written[i] and ops.parents[i] < 0:
            stack += ops.operands[i]
