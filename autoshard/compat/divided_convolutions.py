"""Convolutions as XLA's partitioner divides them, where Shardy would otherwise.

Both operands may be divided along what is summed over: the batch, of the gradient of a kernel. Into
as many parts, XLA sums what every device made of its part, whatever the mesh axes; else it gathers
both along that dimension and those of space, every device makes all that is left, and the result is
cut afterwards. So it is of images whose rows are divided by mesh axes that divide the batch of
everything behind them. Shardy brings one operand to the division of the other.

Where batch and space of the result are divided otherwise than those of the data, into as many parts
or more, XLA brings the data there before; Shardy may bring the result afterwards.

What was asked says `docs/decisions/0056-convolutions-over-uneven-parts.md`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.reshards import Division, bring_operand, division, make_result, parts
from autoshard.compat.shardings import Attributes
from autoshard.compat.stablehlo import Operation
from autoshard.subaxes import axis_name

CONVOLUTION = "stablehlo.convolution"
_GROUPS = ("batch_group_count", "feature_group_count")


def bring_as_xla(
    operations: Iterable[Operation], sizes: Mapping[str, int], attributes: Attributes
) -> None:
    """Has every convolution take its operands as XLA brings them; those in groups were not asked.

    Args:
      operations: of main, with the shardings that propagation found, before reshards become
        explicit.
      sizes: of the mesh axes.
    """
    for op in operations:
        if op.name != CONVOLUTION:
            continue
        if all(ir.IntegerAttr(op.attributes[name]).value == 1 for name in _GROUPS):
            _bring(op, sizes, attributes)


class _Operand(NamedTuple):
    """One of the two.

    Attributes:
      number: which of the operation's.
      given: how propagation divided it.
      summed: the dimension of features that both have.
      space: those that windows go over.
      free: the dimension that the result has, too.
      free_of_result: how propagation divided that of the result.
    """

    number: int
    given: Division
    summed: int
    space: Sequence[int]
    free: int
    free_of_result: tuple[str, ...]


def _bring(op: Operation, sizes: Mapping[str, int], attributes: Attributes) -> None:
    numbers = dialect.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    given, by, made = (division(value) for value in (*op.operands, op.results[0]))
    data = _Operand(
        0,
        given,
        numbers.input_feature_dimension,
        numbers.input_spatial_dimensions,
        numbers.input_batch_dimension,
        made[numbers.output_batch_dimension],
    )
    kernel = _Operand(
        1,
        by,
        numbers.kernel_input_feature_dimension,
        numbers.kernel_spatial_dimensions,
        numbers.kernel_output_feature_dimension,
        made[numbers.output_feature_dimension],
    )
    few, many = sorted((data, kernel), key=lambda one: parts([one.given[one.summed]], sizes))
    least, most = (parts([one.given[one.summed]], sizes) for one in (few, many))
    if not 1 < least < most:
        if not any(kernel.given[d] for d in kernel.space):  # else both are summed over it
            space = [made[d] for d in numbers.output_spatial_dimensions]
            _to(op, data, _as_the_result(data, space, sizes), attributes)
    elif not _names(many.given[many.summed]) & _names(few.given[few.free]):
        to_data, to_kernel = _gathered(data), _gathered(kernel)
        _to(op, data, to_data, attributes)
        _to(op, kernel, to_kernel, attributes)
        whole: list[tuple[str, ...]] = [()] * len(made)
        whole[numbers.output_batch_dimension] = to_data[data.free]
        whole[numbers.output_feature_dimension] = to_kernel[kernel.free]
        if tuple(whole) != made:
            make_result(op, tuple(whole), attributes)
    # Else one of both alone is gathered, as Shardy has it, or nearly.


def _gathered(one: _Operand) -> Division:
    """Whole along all that is summed over."""
    to = list(one.given)
    for d in (one.summed, *one.space):
        to[d] = ()
    if not to[one.free] and set(one.free_of_result) == set(one.given[one.summed]):
        to[one.free] = one.free_of_result  # the same parts go there; else the result is cut
    return tuple(to)


def _as_the_result(
    data: _Operand, space: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> Division:
    """Divided along batch and space as the result is, if that has as many parts there."""
    dims = (data.free, *data.space)
    to = list(data.given)
    for d, axes in zip(dims, (data.free_of_result, *space), strict=True):
        to[d] = axes
    before, after = (parts([of[d] for d in dims], sizes) for of in (data.given, to))
    used = [axis for divided in to for axis in divided]
    clash = len(used) != len(set(used))
    return data.given if after < max(before, 2) or clash else tuple(to)


def _to(op: Operation, one: _Operand, to: Division, attributes: Attributes) -> None:
    """Brings an operand to a division, if it has another."""
    if to != one.given:
        bring_operand(op, one.number, [to], attributes)


def _names(axes: Iterable[str]) -> set[str]:
    return {axis_name(axis) for axis in axes}
