"""Products as XLA's partitioner divides them, where Shardy would otherwise.

Both operands of a product may be divided alike along what it sums over, and its result over the
same mesh axes along another dimension: the gradient of a parameter that is divided as the batch is.
XLA then sums what every device made of its part, and cuts the sum
(`xla/service/spmd/dot_handler.cc`; seen with jaxlib 0.10.2 and 0.12.0.1 for CPU, 0.10.2 for H100,
libtpu 0.0.42 for v5e). Shardy takes the way that sends less, and gathers the operands of products
over few rows.

One operand alone may be divided along what a product sums over: activations whose features a stored
parameter divides, by a parameter that is gathered. Shardy cuts the other and sums. XLA gathers what
is divided where that is no more than the result, where the result is divided over those mesh axes
by the other operand, and where no operand is divided over some mesh axis
(docs/decisions/0014).
"""

from collections.abc import Iterable, Mapping

from jaxlib.mlir import ir

from autoshard.compat.shardy.reshards import (
    Division,
    bring_operand,
    division,
    make_result,
    parts,
    without,
)
from autoshard.compat.shardy.shardings import Attributes
from autoshard.compat.shardy.stablehlo import Operation, bytes_of, in_manual, product_dimensions
from autoshard.records.subaxes import axis_name


def divide_as_xla(
    operations: Iterable[Operation], sizes: Mapping[str, int], attributes: Attributes
) -> None:
    """Has every product sum, and take its operands, as XLA does.

    Args:
      operations: of main, with the shardings that propagation found, before reshards become
        explicit.
      sizes: of the mesh axes.
    """
    for op in operations:
        if op.name == "stablehlo.dot_general":
            _keep_sum(op, attributes)
            if not in_manual(op):  # whose mesh axes say nothing of how it divides
                _gather(op, sizes, attributes)


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


def _gather(op: Operation, sizes: Mapping[str, int], attributes: Attributes) -> None:
    """Has an operand whole along what is summed over, which divides it alone, if XLA gathers it."""
    dims = product_dimensions(op)
    given = [division(operand) for operand in op.operands]
    along = [
        [axis for d in summed for axis in of[d]]
        for of, (_, summed) in zip(given, dims, strict=True)
    ]
    if bool(along[0]) == bool(along[1]):
        return
    number = 0 if along[0] else 1
    names = _names([along[number]])
    made = division(op.results[0])
    to = tuple(() if d in dims[number][1] else axes for d, axes in enumerate(given[number]))
    batches, summed = dims[0]
    free = len(given[0]) - len(summed)  # dimensions of the result before those of the right operand
    of_right = made[free:]
    of_left = made[len(batches) : free]
    own, others = (of_left, of_right) if number == 0 else (of_right, of_left)
    if _names(own) & names:
        return  # the parts go there
    used = _names((*given[0], *given[1]))
    idle = any(size > 1 and axis not in used for axis, size in sizes.items())
    gathered = _local(op.operands[number], to, sizes)
    if idle or _names(others) & names or gathered <= _local(op.results[0], made, sizes):
        bring_operand(op, number, [to], attributes)


def _names(divided: Iterable[Iterable[str]]) -> set[str]:
    return {axis_name(axis) for axes in divided for axis in axes}


def _local(value: ir.Value, divided: Division, sizes: Mapping[str, int]) -> float:
    """Bytes of it on a device."""
    return bytes_of(value) / parts(divided, sizes)
