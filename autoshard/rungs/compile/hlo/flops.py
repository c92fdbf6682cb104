"""Floating-point work of one instruction.

Matrix products and convolutions are exact, as in XLA's own cost analysis (HloCostAnalysis, 2026):
for convolutions only the taps that fall on data count, which matters on TPU, where a batched
matrix product is printed as a dilated convolution. Everything else counts one operation for each
output element (elementwise) or each input element (reductions), whatever the operation.
"""

import math
import re

from autoshard.records.arithmetic import (
    cholesky_flops,
    fft_flops,
    product_flops,
    sort_flops,
    triangular_solve_flops,
)
from autoshard.records.windows import Window, taps
from autoshard.rungs.compile.hlo.records import Computation, HloError, Instruction, Shape

_PRECISIONS = re.compile(r'"operand_precision":\s*\[([^\]]*)\]')
_ALGORITHM = re.compile(r'"algorithm":\s*"(ALG_DOT_\w+)"')

TRANSCENDENTAL = frozenset(
    (
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan2",
        "atanh",
        "cbrt",
        "cosh",
        "cosine",
        "erf",
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    )
)
ELEMENTWISE = TRANSCENDENTAL | frozenset(
    (
        "abs",
        "add",
        "and",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "convert",
        "count-leading-zeros",
        "divide",
        "floor",
        "imag",
        "is-finite",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "real",
        "reduce-precision",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "select",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "stochastic-convert",
        "subtract",
        "xor",
    )
)


def matmul_flops(instruction: Instruction, computation: Computation) -> float | None:
    """Operations of a matrix product or convolution; None for anything else.

    Args:
      instruction: a dot or a convolution; for those in libraries see custom_calls.py.
      computation: where its operands are found.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in ("dot", "ragged-dot", "scaled-dot"):
        lhs = _operand(instruction, computation, 0)
        depth = math.prod(lhs.dims[i] for i in instruction.ints("lhs_contracting_dims"))
        return product_flops(instruction.shape.size * depth, lhs.dtype)
    if opcode == "convolution":
        shapes = _operand(instruction, computation, 0), _operand(instruction, computation, 1)
        return convolution_flops(instruction, shapes[0], shapes[1], instruction.shape)
    return None


def precision_of(instruction: Instruction) -> tuple[list[str], str]:
    """What a product or convolution asks for: precision of each operand, and the dot algorithm.

    cuBLAS is told in the backend_config; everything else, cuDNN too, says it in attributes.
    """
    config = instruction.attribute("backend_config")
    asked = instruction.attribute("operand_precision")
    if found := _PRECISIONS.search(config):
        asked = found[1]
    named = _ALGORITHM.search(config)
    return re.findall(r"\w+", asked), named[1] if named else instruction.attribute("algorithm")


def _operand(instruction: Instruction, computation: Computation, index: int) -> Shape:
    return computation.find(instruction.operands[index]).shape


def convolution_flops(instruction: Instruction, lhs: Shape, rhs: Shape, out: Shape) -> float:
    """Operations of a convolution of these shapes, with the window and labels of `instruction`."""
    windows, labels = _windows(instruction, lhs, rhs, out)
    features = lhs.dims[labels[1].index("f")] // _count(instruction, "feature_group_count")
    batch = lhs.dims[labels[1].index("b")] // _count(instruction, "batch_group_count")
    filters = out.dims[labels[3].index("f")]
    falling = math.prod(map(taps, windows))
    return product_flops(features * filters * batch * falling, lhs.dtype)


def _windows(
    instruction: Instruction, lhs: Shape, rhs: Shape, out: Shape
) -> tuple[list[Window], re.Match[str]]:
    """The windows of a convolution by dimension of space, and the labels of its operands."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    if not labels:
        raise HloError(
            f"%{instruction.name}: expected dim_labels such as b01f_01io->b01f, "
            f"got {instruction.attribute('dim_labels')!r}"
        )
    window = _window(instruction.attribute("window"))
    found = []
    for d in sorted(label for label in labels[3] if label.isdigit()):
        at = int(d)
        found.append(
            Window(
                data=lhs.dims[labels[1].index(d)],
                kernel=rhs.dims[labels[2].index(d)],
                out=out.dims[labels[3].index(d)],
                stride=window["stride"][at][0] if "stride" in window else 1,
                pad_low=window["pad"][at][0] if "pad" in window else 0,
                lhs_dilation=window["lhs_dilate"][at][0] if "lhs_dilate" in window else 1,
                rhs_dilation=window["rhs_dilate"][at][0] if "rhs_dilate" in window else 1,
            )
        )
    return found, labels


def _count(instruction: Instruction, name: str) -> int:
    return int(instruction.attribute(name) or 1)


def _window(text: str) -> dict[str, list[tuple[int, ...]]]:
    """`{size=3x3 pad=0_1x0_1}` as lists by dimension; padding is (low, high)."""
    return {
        key: [tuple(int(n) for n in part.split("_")) for part in value.split("x")]
        for key, value in re.findall(r"(\w+)=([\dx_\-]+)", text)
    }


def _reduced(instruction: Instruction, data: tuple[int, ...]) -> int:
    """Elements that a reduce-window reads for each result, as kernels are written.

    XLA:TPU prints a reduction whose result is broadcast again as one window over everything: it
    reads each element once.
    """
    window = _window(instruction.attribute("window"))
    extents = [size[0] for size in window.get("size", [])]
    padding = [pad[0] for pad in window.get("pad", [])] or [0] * len(extents)
    dims = zip(extents, padding, data, instruction.shape.dims, strict=True)
    return math.prod(
        1 if out <= low + 1 and extent - low >= n else extent for extent, low, n, out in dims
    )


def plain_flops(instruction: Instruction, computation: Computation) -> float:
    """Operations of anything that is no matrix product; moving data costs none."""
    opcode = instruction.opcode
    if opcode in ELEMENTWISE or opcode in ("map", "rng", "rng-bit-generator"):
        return float(instruction.shapes[-1].size)
    if opcode == "reduce":
        inputs = instruction.operands[: len(instruction.operands) // 2]
        return float(sum(computation.find(name).shape.size for name in inputs))
    if opcode == "reduce-window":
        each = _reduced(instruction, _operand(instruction, computation, 0).dims)
        return float(each * sum(shape.size for shape in instruction.shapes))
    if opcode == "select-and-scatter":
        sizes = _window(instruction.attribute("window")).get("size", [])
        return float(math.prod(s[0] for s in sizes) * _operand(instruction, computation, 1).size)
    if opcode == "scatter":
        updates = instruction.operands[len(instruction.operands) // 2 + 1 :]
        return float(sum(computation.find(name).shape.size for name in updates))
    if opcode == "sort":
        extent = instruction.shape.dims[instruction.ints("dimensions")[0]]
        return sort_flops(instruction.shape.size, extent)
    if opcode == "fft":
        length = math.prod(instruction.ints("fft_length"))
        return fft_flops(instruction.shape.size, length)
    if opcode == "cholesky":
        return cholesky_flops(instruction.shape.size, instruction.shape.dims[-1])
    if opcode == "triangular-solve":
        width = _operand(instruction, computation, 0).dims[-1]
        return triangular_solve_flops(instruction.shape.size, width)
    return 0.0
