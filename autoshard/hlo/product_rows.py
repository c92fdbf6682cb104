"""The rows of what a compiled kernel multiplies (`rows`)."""

import math
import re

from autoshard.hlo.library import is_handed_over
from autoshard.hlo.records import Computation, HloModule, Instruction
from autoshard.rows import MANY


def rows_of(instruction: Instruction, computation: Computation, module: HloModule) -> float:
    """Rows of the product of a kernel, the most where it makes several; `MANY` where none.

    Of a convolution, where the library makes it: others do not go by rows.
    """
    inside = [(instruction, computation)]
    if instruction.opcode == "fusion":
        body = module.find(instruction.calls("calls")[0])
        inside = [(other, body) for other in body.instructions]
    handed_over = is_handed_over(instruction)
    found = [_rows(*one, handed_over) for one in inside if one[0].opcode in ("dot", "convolution")]
    return max(found, default=MANY)


def _rows(product: Instruction, around: Computation, handed_over: bool) -> float:
    if product.opcode == "dot":
        left = around.find(product.operands[0]).shape.dims
        taken = {*product.ints("lhs_batch_dims"), *product.ints("lhs_contracting_dims")}
        return max(1.0, float(math.prod(n for d, n in enumerate(left) if d not in taken)))
    made = product.attribute("dim_labels").partition("->")[2]
    places = re.findall(r"\d", made)
    if not places or not handed_over:
        return MANY
    return max(1.0, float(product.shape.dims[made.index(max(places))]))
