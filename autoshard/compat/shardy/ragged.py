"""Ragged products (`chlo.ragged_dot`): how they shard, and how often they multiply.

Rows of the left operand come in groups that lie one after the other, and each group has a matrix
of its own. A compiler divides neither the rows nor the groups over devices, for nothing says
which rows are whose before the step runs. So says Shardy's rule for `mhlo.ragged_dot`
(openxla/shardy, op_sharding_rule_registry), and so XLA does (seen with libtpu 0.0.42 for v5e and
v5p, jax-cuda12-plugin 0.10.2 for H100).
"""

import math
import re
from typing import NamedTuple

from autoshard.compat.shardy.stablehlo import Operation, shape_of

_DIMENSIONS = re.compile(r"(\w+) = \[([\d, ]*)\]")


class Ragged(NamedTuple):
    """The factors of a ragged product, numbered: which dimensions go together.

    Attributes:
      sizes: of each factor.
      operands: of the left one, the right one and the sizes of the groups, for each dimension its
        factor.
      result: the same of the result.
      whole: factors that no device has a part of.
      summed: those that are summed over, of the others.
    """

    sizes: list[int]
    operands: list[list[int]]
    result: list[int]
    whole: list[int]
    summed: list[int]


def factors_of_ragged(operation: Operation) -> Ragged:
    """Of a `chlo.ragged_dot` in any of its three modes (rows, contracted or batch are ragged)."""
    left_shape, right_shape, group_shape = (shape_of(v) for v in operation.operands)
    numbers = _numbers(operation)
    batch, contracted = numbers["lhs_batching_dimensions"], numbers["lhs_contracting_dimensions"]
    (ragged,) = numbers["lhs_ragged_dimensions"]
    groups = numbers["rhs_group_dimensions"]
    sizes = list(left_shape)
    left = list(range(len(sizes)))

    def new(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    group = new(group_shape[-1])
    paired = dict(
        zip(
            (*numbers["rhs_batching_dimensions"], *numbers["rhs_contracting_dimensions"]),
            (*batch, *contracted),
            strict=True,
        )
    )
    right = [
        paired[d] if d in paired else group if d in groups else new(n)
        for d, n in enumerate(right_shape)
    ]
    # The sizes of the groups may differ from place to place of the batch, and of other dimensions.
    outer = batch[: batch.index(ragged)] if ragged in batch else batch
    prefix = [outer[i] if i < len(outer) else new(n) for i, n in enumerate(group_shape[:-1])]
    free = [d for d in left if d not in batch and d not in contracted]
    result = [*batch, *free, *(f for f in right if f > group)]
    if ragged in contracted:
        result = [group, *result]
    return Ragged(
        sizes=sizes,
        operands=[left, right, [*prefix, group]],
        result=result,
        whole=sorted({ragged, group, *prefix} - set(outer)),
        summed=[d for d in contracted if d != ragged],
    )


def ragged_flops(operation: Operation, platform: str) -> float:
    """Operations of a `chlo.ragged_dot` on one device if nothing is sharded, 2 a multiply-add.

    TPUs have kernels that multiply each row by the matrix of its group. XLA:GPU multiplies every
    row by every matrix, and masks; so do all for gradients of the matrices, whose result has the
    groups.
    """
    numbers = _numbers(operation)
    left = shape_of(operation.operands[0])
    depth = math.prod(left[d] for d in numbers["lhs_contracting_dimensions"])
    flops = 2.0 * math.prod(shape_of(operation.results[0])) * depth
    if platform != "tpu" and numbers["rhs_group_dimensions"]:
        flops *= shape_of(operation.operands[2])[-1]
    return flops


def _numbers(operation: Operation) -> dict[str, list[int]]:
    text = str(operation.attributes["ragged_dot_dimension_numbers"])
    found = {
        name: [int(d) for d in dims.split(",") if d.strip()]
        for name, dims in _DIMENSIONS.findall(text)
    }
    names = (
        *(
            f"{side}_{kind}_dimensions"
            for side in ("lhs", "rhs")
            for kind in ("batching", "contracting")
        ),
        "lhs_ragged_dimensions",
        "rhs_group_dimensions",
    )
    return {name: found.get(name, []) for name in names}
