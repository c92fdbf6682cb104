"""Elements that an instruction moves from one densest dimension to another."""

from autoshard.cache_lines import STAY, Lines, lines_read
from autoshard.hlo.flops import ELEMENTWISE
from autoshard.hlo.records import Computation, Instruction, Shape

_AT_THE_SAME_PLACES = ELEMENTWISE | {"bitcast", "copy", "reshape", "transpose"}


def transposed(
    instruction: Instruction, computation: Computation, fused: bool
) -> tuple[int, Lines]:
    """Elements that a copy or transpose reads across cache lines, and how; 0 for all else.

    A copy that is fused with the product that reads it is never made: the product's loop reads what
    the copy would have, in order where that lies along the contracted dimension.

    Args:
      fused: it is part of a kernel: what goes into it elementwise is read just so, each array.
    """
    if instruction.opcode not in ("copy", "transpose"):
        return 0, STAY
    source, made = computation.find(instruction.operands[0]).shape, instruction.shape
    if instruction.opcode == "transpose":
        dimensions = instruction.ints("dimensions")
    else:
        dimensions = tuple(range(len(made.dims)))
    # Both in dimensions of what is made.
    before = [dimensions.index(d) for d in _densest_first(source)]
    if fused and set(before[:1]) & _contracted(instruction, computation):
        return 0, STAY
    how = lines_read(made.dims, before, _densest_first(made), made.bytes / max(made.size, 1))
    if not how.crossed:
        return 0, how
    return made.size * (_arrays(instruction, computation) if fused else 1), how


def _contracted(instruction: Instruction, computation: Computation) -> set[int]:
    """Dimensions of an instruction that products beside it sum over."""
    return {
        dimension
        for other in computation.instructions
        if other.opcode == "dot"
        for side, operand in zip(("lhs", "rhs"), other.operands, strict=True)
        if operand == instruction.name
        for dimension in other.ints(f"{side}_contracting_dims")
    }


def _arrays(instruction: Instruction, computation: Computation) -> int:
    """How many arrays of its size an instruction's operand is made of at the same places."""
    found: set[str] = set()
    seen: set[str] = set()
    stack = [instruction.operands[0]]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        maker = computation.find(name)
        if maker.shape.size != instruction.shape.size:
            continue
        if maker.opcode in _AT_THE_SAME_PLACES:
            stack += maker.operands
        elif maker.opcode == "parameter":
            found.add(name)
    return max(len(found), 1)


def _densest_first(shape: Shape) -> list[int]:
    """Dimensions of more than one element, as they lie in memory."""
    order = shape.minor_to_major or tuple(reversed(range(len(shape.dims))))
    return [d for d in order if shape.dims[d] > 1]
