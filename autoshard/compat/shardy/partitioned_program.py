"""What the partitioner made of one layout, read off its module as plain data."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from autoshard.compat.shardy.reshards import Division, division
from autoshard.compat.shardy.shardings import parse_sharding
from autoshard.compat.shardy.stablehlo import (
    MANUAL,
    PRODUCTS,
    TAG,
    Attribute,
    Block,
    Operation,
    Value,
    bytes_of,
    shape_and_bits,
)
from autoshard.records.subaxes import distinct, ways

_NOWHERE: frozenset[str] = frozenset()
_CONSTANTS = frozenset({"sdy.constant", "stablehlo.constant"})
_AXIS = re.compile(r'"[^"]+"(?::\(\d+\)\d+)?')
_DIMENSION = re.compile(r"\{([^{}]*)\}")
_CONTRACTING = PRODUCTS | {"stablehlo.reduce"}


class Sum(NamedTuple):
    """What an all-reduce adds up, and what becomes of it.

    Attributes:
      product: it is of a matrix product or a convolution.
      summed: its mesh axes for each dimension that is summed; all at once where the operand does
        not tell them apart.
      cut: mesh axes that the result is divided by right after, for each dimension that has some.
      fresh: no dimension that is cut was divided before.
      added: its result is only added to that of another sum, alike and earlier.
    """

    product: bool
    summed: tuple[tuple[str, ...], ...]
    cut: tuple[tuple[str, ...], ...]
    fresh: bool
    added: bool = False


class Communication(NamedTuple):
    """One collective as the partitioner puts it.

    Attributes:
      kind: the operation's name without its dialect, such as "all_gather".
      axes: mesh axes that it runs over.
      before, after: local bytes that go in and come out.
      block: a tag of the block it stands in.
      tag: of the operation before it.
      sum: of an all-reduce; None of others.
      gathered: the mesh axes gathered along each dimension; () of others than gathers.
      location: of the operation.
    """

    kind: str
    axes: tuple[str, ...]
    before: float
    after: float
    block: int
    tag: int
    sum: Sum | None
    gathered: tuple[tuple[str, ...], ...]
    location: str


@dataclasses.dataclass(slots=True)
class PartitionedProgram:
    """What the partitioner made of one layout, as plain data.

    Attributes:
      shards: tag -> for each result the set of mesh axes (or parts) that divide it.
      entries: tag of a manual region -> the same of what its body is given, without the mesh axes
        that are the region's.
      dims: tag -> of each result that has a sharding those of each dimension.
      contracted: tag of a product or reduction -> mesh axes that divide its work.
      operands: tag of the same -> for each operand the mesh axes that divide what is read, which is
        less than what was made where the partitioner gathers in between.
      communication: every collective, in the order of the program.
      argument_axes: mesh axes of each argument of main.
      argument_dims, result_dims: mesh axes of each dimension of the arguments and results of main.
    """

    shards: dict[int, tuple[frozenset[str], ...]] = dataclasses.field(default_factory=dict)
    entries: dict[int, tuple[frozenset[str], ...]] = dataclasses.field(default_factory=dict)
    dims: dict[int, tuple[Division, ...]] = dataclasses.field(default_factory=dict)
    contracted: dict[int, frozenset[str]] = dataclasses.field(default_factory=dict)
    operands: dict[int, tuple[frozenset[str], ...]] = dataclasses.field(default_factory=dict)
    communication: list[Communication] = dataclasses.field(default_factory=list)
    argument_axes: list[frozenset[str]] = dataclasses.field(default_factory=list)
    argument_dims: list[Division] = dataclasses.field(default_factory=list)
    result_dims: list[Division] = dataclasses.field(default_factory=list)


def read(main: Operation, sizes: dict[str, int]) -> PartitionedProgram:
    """What a partitioned main says of each operation, each collective and its own ends.

    Args:
      main: with explicit collectives.
      sizes: of the mesh axes.
    """
    return _Reader(sizes).read(main)


class _Divided(NamedTuple):
    """Of each value of a printed sharding the mesh axes that divide it, and its dimensions."""

    axes: tuple[frozenset[str], ...]
    dims: tuple[Division, ...]


_UNDIVIDED = _Divided((), ())


class _Reader:
    """Walks a partitioned main once, block by block, and notes what it sees."""

    def __init__(self, sizes: dict[str, int]):
        self._sizes = sizes
        self._judged = PartitionedProgram()
        self._memo: dict[Attribute, _Divided] = {}
        self._of_value: dict[Value, frozenset[str]] = {}
        # Sums over devices that nothing has used yet, by value: where they stand in the list.
        self._sums: dict[Value, int] = {}
        self._resharded: set[tuple[str, Value, Attribute]] = set()

    def read(self, main: Operation) -> PartitionedProgram:
        judged = self._judged
        block = main.regions[0].blocks[0]
        for argument, attribute in zip(block.arguments, main.attributes["arg_attrs"], strict=True):
            named = ir.DictAttr(attribute)
            axes = self._axes(named["sdy.sharding"])[0] if "sdy.sharding" in named else _NOWHERE
            self._of_value[argument] = axes
            judged.argument_dims.append(_dims_of(named))
            judged.argument_axes.append(axes)
        judged.result_dims = [_dims_of(ir.DictAttr(a)) for a in main.attributes["res_attrs"]]
        self._block(block)
        return judged

    def _axes(self, attribute: Attribute) -> tuple[frozenset[str], ...]:
        """Of each value of a printed sharding the mesh axes that divide it."""
        return self._divided(attribute).axes

    def _divided(self, attribute: Attribute) -> "_Divided":
        found = self._memo.get(attribute)
        if found is None:
            values = tuple(parse_sharding("<@" + part) for part in str(attribute).split("<@")[1:])
            axes = tuple(frozenset(a for dim in dims for a in dim) for dims in values)
            found = _Divided(axes, values)
            self._memo[attribute] = found
        return found

    def _block(self, block: Block, turns_of: int | None = None) -> None:
        """What stands in a block.

        Args:
          turns_of: the tag whose trip count its collectives take; default that of its first
            operation.
        """
        own_tag = _first_tag(block) if turns_of is None else turns_of
        last_tag = own_tag
        for o in block.operations:
            op = o.operation
            held = op.attributes
            if TAG in held:
                last_tag = held[TAG].value
                self._tagged(op, last_tag)
            elif op.name.startswith("sdy.") and "out_sharding" in held:
                out = self._axes(held["out_sharding"])[0]
                self._of_value[op.results[0]] = out
                if op.name == "sdy.all_reduce":
                    self._reduced(op, out, own_tag, last_tag)
                elif op.name == "sdy.all_slice":
                    self._cut(op)
                else:
                    self._resharding(op, out, own_tag, last_tag)

    def _tagged(self, op: Operation, tag: int) -> None:
        """An operation of the program."""
        name, held, results = op.name, op.attributes, op.results
        said = "out_shardings" if name == MANUAL else "sdy.sharding"
        divided = self._divided(held[said]) if said in held else _UNDIVIDED
        self._judged.dims[tag] = divided.dims
        shards = divided.axes
        shards += (_NOWHERE,) * (len(results) - len(shards))
        self._judged.shards[tag] = shards
        for result, axes in zip(results, shards, strict=False):
            self._of_value[result] = axes
        if name == "stablehlo.add":
            self._add(op)
        elif name in _CONTRACTING:
            given = tuple(self._of_value.get(operand, _NOWHERE) for operand in op.operands)
            self._judged.operands[tag] = given
            self._judged.contracted[tag] = frozenset(distinct(shards[0].union(*given)))
        elif name == "stablehlo.while":
            condition, body = (region.blocks[0] for region in op.regions)
            for inner in (condition, body):
                for argument, axes in zip(inner.arguments, shards, strict=True):
                    self._of_value[argument] = axes
                self._block(inner, _first_tag(body))  # a turn asks the condition, too
        elif name == MANUAL:
            inner = op.regions[0].blocks[0]
            users = set(_bare(_AXIS.findall(str(held["manual_axes"]))))
            entries = tuple(axes - users for axes in self._axes(held["in_shardings"]))
            self._judged.entries[tag] = entries
            self._of_value.update(zip(inner.arguments, entries, strict=True))
            self._block(inner)
        elif name in ("stablehlo.case", "stablehlo.if"):
            before = self._resharded
            for region in op.regions:
                for inner in region.blocks:
                    # What one branch sends another one does not have, nor what comes after both.
                    self._resharded = set()
                    self._block(inner)
            self._resharded = before

    def _add(self, op: Operation) -> None:
        """Where both operands are sums over devices: the second is added to the first."""
        sums, sent = self._sums, self._judged.communication
        if not all(value in sums for value in op.operands):
            return
        first, second = (sums.pop(value) for value in op.operands)
        if _alike(sent[first], sent[second]):
            sent[second] = _added(sent[second])
            if _used_once(op.results[0]):
                sums[op.results[0]] = first

    def _cut(self, op: Operation) -> None:
        """A slice, each device its own: of a sum over devices it is one still."""
        if op.operands[0] in self._sums and _used_once(op.results[0]):
            self._sums[op.results[0]] = self._sums.pop(op.operands[0])

    def _reduced(self, op: Operation, out: frozenset[str], block: int, tag: int) -> None:
        """An all-reduce."""
        axes = _bare(tuple(dict.fromkeys(_AXIS.findall(str(op.attributes["reduction_axes"])))))
        self._send(op, op.operands[0], axes, out, block, tag, sum=_sum(op, axes))
        if _used_once(op.results[0]):
            self._sums[op.results[0]] = len(self._judged.communication) - 1

    def _resharding(self, op: Operation, out: frozenset[str], block: int, tag: int) -> None:
        """A collective that brings a value from one sharding to another."""
        name, held, value = op.name, op.attributes, op.operands[0]
        if _filled(value):
            return  # every device fills its own
        # XLA's common-subexpression elimination: the same value is sent once.
        if (same := (name, value, held["out_sharding"])) in self._resharded:
            return
        self._resharded.add(same)
        along: tuple[tuple[str, ...], ...] = ()
        if name == "sdy.all_gather":
            along = tuple(_by_dimension(held["gathering_axes"]))
            axes = tuple(dict.fromkeys(a for dim in along for a in dim))
        elif name == "sdy.all_to_all":
            axes = _bare(tuple(dict.fromkeys(_AXIS.findall(str(held["params"])))))
        else:
            given, made = division(value), self._divided(held["out_sharding"]).dims[0]
            # What divides an argument of a manual region is not said by dimension.
            unsaid = self._of_value.get(value, _NOWHERE) - {a for dim in given for a in dim}
            axes = distinct(_moving(given, made, self._sizes) | unsaid)
        self._send(op, _before_cast(value), axes, out, block, tag, gathered=along)

    def _send(
        self,
        op: Operation,
        value: Value,
        axes: tuple[str, ...],
        out: frozenset[str],
        block: int,
        tag: int,
        *,
        sum: Sum | None = None,
        gathered: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """Notes a collective.

        Args:
          value: what is sent, of the size that is sent.
          out: mesh axes that divide it afterwards.
        """
        before = self._of_value.get(op.operands[0], _NOWHERE)
        whole = bytes_of(value)
        self._judged.communication.append(
            Communication(
                kind=op.name.removeprefix("sdy."),
                axes=axes,
                before=whole / ways(before, self._sizes),
                after=whole / ways(out, self._sizes),
                block=block,
                tag=tag,
                sum=sum,
                gathered=gathered,
                location=str(op.location),
            )
        )


def _first_tag(block: Block) -> int:
    """Of the operations in a block; -1 where none has one."""
    return next((o.attributes[TAG].value for o in block.operations if TAG in o.attributes), -1)


def _moving(before: Division, after: Division, sizes: dict[str, int]) -> frozenset[str]:
    """The mesh axes that divide another dimension afterwards, or the same in larger or smaller
    parts: along the others everything stays where it is."""
    places = []
    for divided in (before, after):
        found = set()
        for dimension, axes in enumerate(divided):
            for i, axis in enumerate(axes):
                found.add((axis, dimension, ways(axes[i + 1 :], sizes)))
        places.append(found)
    return frozenset(axis for axis, *_ in places[0] ^ places[1])


def _dims_of(named: Any) -> tuple[tuple[str, ...], ...]:
    return parse_sharding(str(named["sdy.sharding"])) if "sdy.sharding" in named else ()


def _before_cast(value: Value) -> Value:
    """What is sent of a value: where a cast has just widened it, the narrow one.

    Shardy reshards the result of a cast; XLA's partitioner gives every elementwise operation its
    operands as the result is sharded, so that the cast comes after (seen with bf16 scores that are
    cast to f32, jaxlib 0.10.2 for H100).
    """
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.convert":
        return value
    narrow = owner.operands[0]
    bits = [shape_and_bits(str(v.type))[1] for v in (narrow, value)]
    return narrow if bits[0] < bits[1] else value


def _filled(value: Value) -> bool:
    """Whether it is one constant number throughout."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return False
    if owner.name == "stablehlo.broadcast_in_dim":
        return _filled(owner.operands[0])
    if owner.name not in _CONSTANTS:
        return False
    held = owner.attributes["value"]
    return isinstance(held, ir.DenseElementsAttr) and held.is_splat


def _sum(op: Operation, axes: tuple[str, ...]) -> Sum:
    """Of an all-reduce over some mesh axes."""
    maker = op.operands[0].owner
    summed: tuple[tuple[str, ...], ...] = (axes,)
    product = False
    if not isinstance(maker, ir.Block):
        product = maker.name in PRODUCTS
        if len(axes) > 1:
            over = (_within(division(operand), axes) for operand in maker.operands)
            summed = next((o for o in over if sum(map(len, o)) == len(axes)), summed)
    cut: tuple[tuple[str, ...], ...] = ()
    fresh = True
    users = list(itertools.islice(op.results[0].uses, 2))
    if len(users) == 1 and users[0].owner.name == "sdy.all_slice":
        dims = _by_dimension(users[0].owner.attributes["slicing_axes"])
        cut = tuple(dim for dim in dims if dim)
        before = division(op.results[0])
        fresh = not any(now and then for now, then in zip(dims, before, strict=True))
    return Sum(product, summed, cut, fresh)


def _within(divided: Division, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Those of the mesh axes that divide each dimension, where there are any."""
    found = (tuple(axis for axis in dim if axis in axes) for dim in divided)
    return tuple(dim for dim in found if dim)


def _by_dimension(attribute: Attribute) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, of `gathering_axes` or `slicing_axes`."""
    return [_bare(_AXIS.findall(dim)) for dim in _DIMENSION.findall(str(attribute))]


def _bare(axes: Sequence[str]) -> tuple[str, ...]:
    """Mesh axes without quotes; parts of them as they are."""
    return tuple(a.strip('"') if ":" not in a else a for a in axes)


def _used_once(value: Value) -> bool:
    return len(list(itertools.islice(value.uses, 2))) == 1


def _alike(one: Communication, other: Communication) -> bool:
    """Whether two sums over devices run over the same ones and are cut alike afterwards: a compiler
    may add first, and send once (XLA's all-reduce-reassociate and reduce-scatter-reassociate)."""
    return (one.axes, one.block, one.sum) == (other.axes, other.block, other.sum)


def _added(one: Communication) -> Communication:
    return one if one.sum is None else one._replace(sum=one.sum._replace(added=True))
