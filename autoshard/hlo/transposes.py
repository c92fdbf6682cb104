"""Elements that an instruction moves from one densest dimension to another."""

from autoshard.cache_lines import crosses_lines
from autoshard.hlo.records import Computation, Instruction, Shape


def transposed(instruction: Instruction, computation: Computation) -> int:
    """Elements that a copy or transpose moves across cache lines; 0 for other instructions."""
    if instruction.opcode not in ("copy", "transpose"):
        return 0
    source, made = computation.find(instruction.operands[0]).shape, instruction.shape
    if instruction.opcode == "transpose":
        dimensions = instruction.ints("dimensions")
    else:
        dimensions = tuple(range(len(made.dims)))
    # Both in dimensions of what is made.
    before = [dimensions.index(d) for d in _densest_first(source)]
    after = _densest_first(made)
    if not after or before[0] == after[0]:
        return 0
    extents = made.dims[before[0]], made.dims[after[0]]
    return made.size if crosses_lines(*extents, made.bytes / made.size) else 0


def _densest_first(shape: Shape) -> list[int]:
    """Dimensions of more than one element, as they lie in memory."""
    order = shape.minor_to_major or tuple(reversed(range(len(shape.dims))))
    return [d for d in order if shape.dims[d] > 1]
