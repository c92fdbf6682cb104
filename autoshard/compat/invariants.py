"""What is the same in every turn of a loop: what a compiler may compute once, in front of it.

That is XLA's while-loop-invariant-code-motion; `cost.MOVES_INVARIANTS` says who has it. Layouts
change nothing here: read once, from the flattened module.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxlib.mlir import ir

from autoshard.compat.stablehlo import MANUAL, TAG, Block, Operation, Value, main_function

_STAY = frozenset(
    "stablehlo." + name
    for name in ("while", "case", "if", "custom_call", "rng", "infeed", "outfeed", "send", "recv")
)
"""Operations that are not moved."""

_MAIN = -1


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      tag: of the operation that makes it, or of the loop that hands it to its body; -1 for main.
      argument: its number among what body or main are given; -1 for what an operation makes.
    """

    tag: int
    argument: int = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """Which loops change which values.

    Attributes:
      around: tag of an operation in a loop -> tags of the loops around it, outermost first. What
        stands in a branch is not in here: nothing is taken out of it.
      levels: of what the operations of loops make, by tag: how many of the loops around change it,
        counted from outside; all, for what stands in a branch. 0 for what is not in here.
      given: the same of what a loop gives to its body.
    """

    around: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    levels: dict[int, int] = dataclasses.field(default_factory=dict)
    given: dict[Origin, int] = dataclasses.field(default_factory=dict)

    def in_front_of(self, block: int, origin: Origin | None) -> int | None:
        """Where a block's work on one value could be done: in front of the loop of this tag.

        That is the outermost loop around the block that does not change the value.

        Args:
          block: a tag of any of its operations.
          origin: of the value; None is unknown.

        Returns:
          None where every loop around the block changes it, or there is none.
        """
        loops = self.around.get(block, ())
        if origin is None:
            return None
        made = origin.argument < 0
        level = self.levels.get(origin.tag, 0) if made else self.given.get(origin, 0)
        return loops[level] if level < len(loops) else None


def read_invariants(module: Operation) -> Invariants:
    """Reads the loops of a flattened module whose operations carry tags."""
    with module.context:
        reader = _Reader()
        reader.read(main_function(module).regions[0].blocks[0], ())
        return reader.found


class _Reader:
    """Walks a main once; only what stands in loops is looked at."""

    def __init__(self) -> None:
        self.found = Invariants()
        self._levels: dict[Value, int] = {}

    def read(self, block: Block, around: tuple[int, ...], branch: bool = False) -> None:
        """Reads a block.

        Args:
          around: tags of the loops around it, outermost first.
          branch: it is one of several of which one runs, or stands in one.
        """
        depth = len(around)
        for each in block.operations:
            op = each.operation
            name, held = op.name, op.attributes
            tag = held[TAG].value if TAG in held else -1
            if depth:
                if not branch:
                    self.found.around[tag] = around
                level = depth
                if not branch and name not in _STAY:
                    level = max((self._levels.get(v, 0) for v in op.operands), default=0)
                if level:
                    self.found.levels[tag] = level
                    for result in op.results:
                        self._levels[result] = level
            if name == "stablehlo.while":
                self._loop(op, tag, around, branch)
            elif name == MANUAL:
                self._region(op, around, branch)
            elif name in ("stablehlo.case", "stablehlo.if"):
                for region in op.regions:
                    for inner in region.blocks:
                        self.read(inner, around, branch=True)

    def _region(self, op: Operation, around: tuple[int, ...], branch: bool) -> None:
        """The compiler inlines it: it changes no more than what stands in it does."""
        inner = op.regions[0].blocks[0]
        returned = list(inner.operations)[-1].operation.operands
        self._same(inner.arguments, op.operands)
        self.read(inner, around, branch)
        self._same(op.results, returned)

    def _same(self, values: Sequence[Value], of: Sequence[Value]) -> None:
        for value, other in zip(values, of, strict=True):
            self._levels.pop(value, None)
            if level := self._levels.get(other, 0):
                self._levels[value] = level

    def _loop(self, op: Operation, tag: int, around: tuple[int, ...], branch: bool) -> None:
        condition, body = (region.blocks[0] for region in op.regions)
        inside = (*around, tag)
        returned = list(body.operations)[-1].operation.operands
        for number, argument in enumerate(body.arguments):
            level, initial = len(inside), op.operands[number]
            if not branch and _renamed(returned[number]) == argument:
                level = self._levels.get(initial, 0)
            if level:
                self._levels[argument] = self.found.given[Origin(tag, number)] = level
        self._same(condition.arguments, body.arguments)
        self.read(condition, inside, branch)
        self.read(body, inside, branch)


def origin_of(value: Value) -> Origin | None:
    """Of a value of a tagged module, or of one that the partitioner made of it.

    What only constrains or reshards a value has its origin. None where nothing tells it.
    """
    value = _renamed(value)
    owner = value.owner
    if not isinstance(owner, ir.Block):
        return Origin(owner.attributes[TAG].value) if TAG in owner.attributes else None
    around: Operation = owner.owner
    if around.name == "func.func":
        return Origin(_MAIN, value.arg_number)
    if around.name == "stablehlo.while" and TAG in around.attributes:
        return Origin(around.attributes[TAG].value, value.arg_number)
    return None


def _renamed(value: Value) -> Value:
    """The value that constraints and the partitioner's collectives begin with.

    On both sides of a manual region's border it is the same one.
    """
    while True:
        owner = value.owner
        if isinstance(owner, ir.Block):
            if owner.owner.name != MANUAL:
                return value
            value = owner.owner.operands[value.arg_number]
        elif owner.name == MANUAL:
            (block,) = owner.regions[0].blocks
            returned = list(block.operations)[-1].operation.operands
            value = returned[ir.OpResult(value).result_number]
        elif owner.name.startswith("sdy.") and len(owner.operands) == len(owner.results) == 1:
            value = owner.operands[0]
        else:
            return value
