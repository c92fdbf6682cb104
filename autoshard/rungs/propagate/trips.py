"""How often a loop of a StableHLO module runs."""

import math
import re
from collections.abc import Mapping

from autoshard.compat.shardy import stablehlo


def trip_count(
    op: stablehlo.Operation, constants: Mapping[stablehlo.Value, str]
) -> tuple[float, bool]:
    """(iterations of a `while` that counts from a constant to a constant, whether it is one).

    Args:
      constants: the printed values of constants outside the loop.
    """
    condition, body = (region.blocks[0] for region in op.regions)
    ops = [o.operation for o in condition.operations]
    if len(ops) < 2 or ops[-2].name != "stablehlo.compare":
        return 1.0, False
    local = {
        o.results[0]: stablehlo.literal(o.operation)
        for o in [*ops, *(b.operation for b in body.operations)]
        if o.name == "stablehlo.constant"
    }

    def number(value: stablehlo.Value) -> int | None:
        text = local.get(value) or constants.get(value)
        found = re.search(r"dense<(-?\d+)>", text) if text else None
        return int(found.group(1)) if found else None

    left, right = ops[-2].operands
    limit = number(right)
    arguments = list(condition.arguments)
    if limit is None or left not in arguments:
        return 1.0, False
    slot = arguments.index(left)
    start = number(op.operands[slot])
    returned = list(body.operations)[-1].operation.operands[slot]
    step = None
    for o in body.operations:
        inner = o.operation
        if inner.name == "stablehlo.add" and inner.results[0] == returned:
            step = number(inner.operands[1]) or number(inner.operands[0])
    if start is None or not step or "LT" not in str(ops[-2].attributes["comparison_direction"]):
        return 1.0, False
    return float(max(0, math.ceil((limit - start) / step))), True
