"""What a StableHLO convolution says of its windows and of the order of its dimensions."""

import dataclasses
import math

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.stablehlo import Operation, shape_of
from autoshard.convolutions import Window, fits_library, is_turned_around, patch_elements, taps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One `stablehlo.convolution`.

    Attributes:
      flops: operations, 2 for each multiply-add with a tap that falls on data.
      turned: XLA takes its data for the kernel (`convolutions`).
      fits: XLA:CPU's library takes it, if it has features enough (`convolutions`).
      patches: elements of patches that are copied for it where the library does not take it.
      windows: one for each dimension of space.
      space: those dimensions of the data, of the kernel, and of the result.
      read, made: the dimensions of features, of the data and of the result.
      row: the dimension of the result along which its rows lie (`rows`).
      orders: of the dimensions of both operands as XLA:CPU's library reads them: batch, space,
        features; space, features read, features made.
    """

    flops: float
    turned: bool
    fits: bool
    patches: int
    windows: tuple[Window, ...]
    space: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    read: int
    made: int
    row: int
    orders: tuple[list[int], list[int]]


def convolution(operation: Operation) -> Convolution:
    """Reads a `stablehlo.convolution`."""
    numbers = dialect.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    data, kernel = (shape_of(value) for value in operation.operands)
    made = shape_of(operation.results[0])
    space = list(numbers.input_spatial_dimensions)
    kernel_space = list(numbers.kernel_spatial_dimensions)
    strides, spread, step = (
        _by_dimension(operation, name, len(space))
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    low = [0] * len(space)
    if "padding" in operation.attributes:
        padding = np.array(ir.DenseIntElementsAttr(operation.attributes["padding"]))
        low = padding.reshape(-1, 2)[:, 0].tolist()
    windows = [
        Window(
            data=data[space[i]],
            kernel=kernel[kernel_space[i]],
            out=made[out],
            stride=strides[i],
            low=low[i],
            spread=spread[i],
            step=step[i],
        )
        for i, out in enumerate(numbers.output_spatial_dimensions)
    ]
    batch, features = numbers.input_batch_dimension, numbers.input_feature_dimension
    batch_groups, feature_groups = (
        ir.IntegerAttr(operation.attributes[name]).value
        for name in ("batch_group_count", "feature_group_count")
    )
    pairs = math.prod(taps(window) for window in windows)
    each = (data[batch] // batch_groups) * (data[features] // feature_groups)
    read, made_of = (
        numbers.kernel_input_feature_dimension,
        numbers.kernel_output_feature_dimension,
    )
    turned = is_turned_around(windows, batch_groups * feature_groups)
    patches = patch_elements(windows, data[batch], data[features], feature_groups)
    return Convolution(
        flops=2.0 * pairs * each * made[numbers.output_feature_dimension],
        turned=turned,
        fits=not turned and fits_library(windows, batch_groups),
        patches=0 if turned else patches,
        windows=tuple(windows),
        space=(tuple(space), tuple(kernel_space), tuple(numbers.output_spatial_dimensions)),
        read=features,
        made=numbers.output_feature_dimension,
        row=numbers.output_spatial_dimensions[-1] if windows else -1,
        orders=([batch, *space, features], [*kernel_space, read, made_of]),
    )


def _by_dimension(operation: Operation, name: str, count: int) -> list[int]:
    if name not in operation.attributes:
        return [1] * count
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))
