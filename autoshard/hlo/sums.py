"""Sums of products that XLA:CPU's library does slowly, read off the fusions that it is handed."""

from autoshard.degenerate import Elements, elements
from autoshard.hlo.library import is_handed_over
from autoshard.hlo.records import Computation, HloModule, Instruction


def degenerate_sums(fusion: Instruction, module: HloModule) -> Elements:
    """Elements of a fusion's sums of products beside a dimension of one element (`degenerate`)."""
    along, across = 0, 0
    if not is_handed_over(fusion):
        return Elements(along, across)
    body = module.find(fusion.calls("calls")[0])
    for instruction in body.instructions:
        product = _summed_product(instruction, body, module)
        if product is None:
            continue
        dims = product.shape.dims
        order = (product.shape.minor_to_major or tuple(reversed(range(len(dims)))))[::-1]
        (summed,) = instruction.ints("dimensions")
        found = elements([dims[d] for d in order], order.index(summed))
        along, across = along + found.along, across + found.across
    return Elements(along, across)


def _summed_product(
    instruction: Instruction, body: Computation, module: HloModule
) -> Instruction | None:
    """What an instruction sums over one dimension, if that is the product of two arrays."""
    if instruction.opcode != "reduce" or len(instruction.ints("dimensions")) != 1:
        return None
    (adds,) = instruction.calls("to_apply")
    product = body.find(instruction.operands[0])
    if module.find(adds).root.opcode != "add" or product.opcode != "multiply":
        return None
    factors = set(product.operands)
    if len(factors) < 2 or any(_is_fill(body.find(name), body) for name in factors):
        return None
    return product


def _is_fill(value: Instruction, body: Computation) -> bool:
    """Whether a constant fills an array."""
    while value.opcode in ("broadcast", "bitcast", "convert") and value.operands:
        value = body.find(value.operands[0])
    return value.opcode in ("constant", "iota")
