"""The windows of StableHLO operations: convolutions, pools, slices, pads (jaxlib 0.10 to 0.12)."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.shardy.stablehlo import Operation, dtype_of, integers, shape_of
from autoshard.records.arithmetic import product_flops
from autoshard.records.windows import Window, Windowed, taps


def windows_of(operation: Operation) -> tuple[Windowed, ...]:
    """The dimensions along which an operation reads other places than it makes; () of others."""
    found: Sequence[Windowed] = ()
    match operation.name:
        case "stablehlo.convolution":
            found = _convolution(operation)
        case "stablehlo.reduce_window" | "stablehlo.select_and_scatter":
            found = _pool(operation)
        case "stablehlo.slice":
            names = "start_indices", "limit_indices", "strides"
            found = [
                _alone(i, Window(data=n, kernel=1, out=-(-(to - at) // by), stride=by, pad_low=-at))
                for i, (n, at, to, by) in enumerate(_said(operation, *names))
            ]
        case "stablehlo.pad":
            names = "edge_padding_low", "edge_padding_high", "interior_padding"
            found = [
                _alone(
                    i,
                    Window(
                        data=n,
                        kernel=1,
                        out=low + n + high + inside * max(n - 1, 0),
                        pad_low=low,
                        lhs_dilation=inside + 1,
                    ),
                )
                for i, (n, low, high, inside) in enumerate(_said(operation, *names))
            ]
    return tuple(one for one in found if one.window.moves)


def convolution_flops(operation: Operation) -> float:
    """Operations of a `stablehlo.convolution`; only taps that fall on data count."""
    numbers = dialect.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    data, made = shape_of(operation.operands[0]), shape_of(operation.results[0])
    batch_groups, feature_groups = (
        ir.IntegerAttr(operation.attributes[name]).value
        for name in ("batch_group_count", "feature_group_count")
    )
    pairs = math.prod(taps(one.window) for one in _convolution(operation))
    batch = data[numbers.input_batch_dimension] // batch_groups
    features = data[numbers.input_feature_dimension] // feature_groups
    multiply_adds = pairs * batch * features * made[numbers.output_feature_dimension]
    return product_flops(multiply_adds, dtype_of(operation.operands[0]))


def _convolution(operation: Operation) -> list[Windowed]:
    """One for each dimension of space."""
    numbers = dialect.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    data, kernel = (shape_of(value) for value in operation.operands)
    made = shape_of(operation.results[0])
    dimensions = zip(
        numbers.input_spatial_dimensions,
        numbers.kernel_spatial_dimensions,
        numbers.output_spatial_dimensions,
        strict=True,
    )
    strides, lhs_dilation, rhs_dilation = (
        _optional(operation, name, len(data) - 2)
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    low = _padding_low(operation, len(data) - 2)
    return [
        Windowed(
            Window(
                data=data[d],
                kernel=kernel[k],
                out=made[out],
                stride=strides[i],
                pad_low=low[i],
                lhs_dilation=lhs_dilation[i],
                rhs_dilation=rhs_dilation[i],
            ),
            d,
            k,
            out,
        )
        for i, (d, k, out) in enumerate(dimensions)
    ]


def _pool(operation: Operation) -> list[Windowed]:
    """One for each dimension; the gradient of a pool reads its operand as the pool does."""
    data = shape_of(operation.operands[0])
    scatters = operation.name == "stablehlo.select_and_scatter"
    made = shape_of(operation.operands[1] if scatters else operation.results[0])
    strides, base, dilation = (
        _optional(operation, name, len(data))
        for name in ("window_strides", "base_dilations", "window_dilations")
    )
    low = _padding_low(operation, len(data))
    return [
        _alone(
            i,
            Window(
                data=data[i],
                kernel=kernel,
                out=made[i],
                stride=strides[i],
                pad_low=low[i],
                lhs_dilation=base[i],
                rhs_dilation=dilation[i],
            ),
        )
        for i, kernel in enumerate(integers(operation, "window_dimensions"))
    ]


def _alone(dimension: int, window: Window) -> Windowed:
    """Of an operation that only has one operand with windows, and keeps the order of dimensions."""
    return Windowed(window, dimension, -1, dimension)


def _said(operation: Operation, *names: str) -> Iterator[tuple[int, ...]]:
    """Extents of the operand with some attributes, by dimension."""
    lists = [integers(operation, name) for name in names]
    return zip(shape_of(operation.operands[0]), *lists, strict=True)


def _optional(operation: Operation, name: str, count: int) -> list[int]:
    return integers(operation, name) if name in operation.attributes else [1] * count


def _padding_low(operation: Operation, count: int) -> list[int]:
    if "padding" not in operation.attributes:
        return [0] * count
    padding = np.array(ir.DenseIntElementsAttr(operation.attributes["padding"]))
    return [int(low) for low in padding.reshape(-1, 2)[:, 0]]
