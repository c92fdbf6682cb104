"""Products as XLA's partitioner divides them, where Shardy would otherwise.

Both operands of a product may be divided alike along what it sums over, and its result over the
same mesh axes along another dimension: the gradient of a parameter that is divided as the batch is.
XLA then sums what every device made of its part, and cuts the sum
(`xla/service/spmd/dot_handler.cc`; seen with jaxlib 0.10.2 and 0.12.0.1 for CPU, 0.10.2 for H100,
libtpu 0.0.42 for v5e). Shardy takes the way that sends less, and gathers the operands of products
over few rows.
"""

from collections.abc import Iterable

from autoshard.compat.reshards import division, make_result, without
from autoshard.compat.shardings import Attributes
from autoshard.compat.stablehlo import Operation, product_dimensions
from autoshard.subaxes import axis_name


def keep_sums(operations: Iterable[Operation], attributes: Attributes) -> None:
    """Has every product make whole what Shardy would divide over the mesh axes that it sums over.

    Args:
      operations: of main, with the shardings that propagation found, before reshards become
        explicit.
    """
    for op in operations:
        if op.name == "stablehlo.dot_general":
            _keep_sum(op, attributes)


def _keep_sum(op: Operation, attributes: Attributes) -> None:
    made = division(op.results[0])
    if not any(made):
        return
    (_, of_left), (_, of_right) = product_dimensions(op)
    left, right = (division(operand) for operand in op.operands)
    pairs = zip(of_left, of_right, strict=True)
    summed = {axis_name(axis) for i, j in pairs if left[i] == right[j] for axis in left[i]}
    whole = without(made, summed)
    if whole != made:
        make_result(op, whole, attributes)
