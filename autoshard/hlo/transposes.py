"""Elements that an instruction moves from one densest dimension to another."""

from autoshard.cache_lines import STAY, Lines, Turn
from autoshard.hlo.flops import ELEMENTWISE
from autoshard.hlo.records import Computation, Instruction, Shape

_COPIES = frozenset(("copy", "transpose"))
_AT_THE_SAME_PLACES = ELEMENTWISE | {"bitcast", "copy", "reshape", "transpose"}


def transposed(
    instruction: Instruction, computation: Computation, fused: bool
) -> tuple[int, Lines]:
    """Elements that a copy or transpose reads across cache lines, and how; 0 for all else.

    A copy that is fused with the product that reads it is never made: the product's loop reads what
    the copy would have, in order where that lies along the contracted dimension. Nor is one that is
    fused with another copy of it: the last of them says how what the first one reads is read.

    Args:
      fused: it is part of a kernel: what goes into it elementwise is read just so, each array.
    """
    if instruction.opcode not in _COPIES:
        return 0, STAY
    if fused and _is_copied_on(instruction, computation):
        return 0, STAY
    made = instruction.shape
    source, becomes = _source(instruction, computation, fused)
    # Both in dimensions of what is made.
    before = [becomes[d] for d in _densest_first(source)]
    if fused and set(before[:1]) & _contracted(instruction, computation):
        return 0, STAY
    after = _densest_first(made)
    turn = Turn(tuple(before), tuple(after), made.bytes / max(made.size, 1))
    arrays = _arrays(instruction, computation) if fused else 1
    how = turn.lines(made.dims, arrays)
    return (made.size * arrays if how.crossed else 0), how


def _source(
    instruction: Instruction, computation: Computation, fused: bool
) -> tuple[Shape, dict[int, int]]:
    """What a copy or transpose reads, and which dimension of its result each one of that becomes.

    Args:
      fused: copies before it are not made.
    """
    becomes = {d: d for d in range(len(instruction.shape.dims))}
    while True:
        maker = computation.find(instruction.operands[0])
        becomes = {d: becomes[i] for d, i in _moves(instruction, maker).items() if i in becomes}
        if not (fused and _passes(maker, computation)):
            return maker.shape, becomes
        instruction = maker


def _is_copied_on(instruction: Instruction, computation: Computation) -> bool:
    """Whether all that takes a value copies it again."""
    users = [other for other in computation.instructions if instruction.name in other.operands]
    return bool(users) and all(
        user.opcode in _COPIES or (_passes(user, computation) and _is_copied_on(user, computation))
        for user in users
    )


def _passes(instruction: Instruction, computation: Computation) -> bool:
    """Whether it copies, or but gives dimensions other numbers, or adds or drops some of one."""
    if instruction.opcode in _COPIES:
        return True
    if instruction.opcode != "bitcast":
        return False
    before, after = (
        [shape.dims[d] for d in _densest_first(shape)]
        for shape in (computation.find(instruction.operands[0]).shape, instruction.shape)
    )
    return before == after


def _moves(instruction: Instruction, maker: Instruction) -> dict[int, int]:
    """The dimensions of an operand of more than one element -> those of the result."""
    if instruction.opcode == "transpose":
        return {d: i for i, d in enumerate(instruction.ints("dimensions"))}
    if instruction.opcode == "copy":
        return {d: d for d in range(len(instruction.shape.dims))}
    # A bitcast leaves everything where it is in memory.
    return dict(zip(_densest_first(maker.shape), _densest_first(instruction.shape), strict=True))


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
