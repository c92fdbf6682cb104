"""What a custom call does: its declared cost, else its shapes, else unknown.

Known from shapes are the library calls that XLA makes of matrix products and convolutions (cuBLAS,
cuDNN, oneDNN) and cuDNN's fused attention. A Pallas kernel for TPU may declare its cost
(`pl.CostEstimate`), which XLA keeps in the backend_config; where it does not, the matrix products
in its body count, which stands there too. Of everything else only the memory traffic is known.
"""

import dataclasses
import math
import re

from autoshard.compat.xla import mosaic
from autoshard.records.arithmetic import product_flops
from autoshard.records.precision import effective_matmul_dtype
from autoshard.rungs.compile.hlo.flops import convolution_flops, precision_of
from autoshard.rungs.compile.hlo.records import Computation, Instruction, Shape

_DECLARED = re.compile(r'"cost_estimate":\s*\{([^}]*)\}')
_BODY = re.compile(r'"body":\s*"([^"]+)"')
_FIELD = re.compile(
    r'"(flops|transcendentals|bytes_accessed|remote_bytes_transferred)":\s*"?(-?\d+)'
)
_PRODUCT = re.compile("matmul|gemm", re.IGNORECASE)
_NARROW = re.compile("[su][248]")
_MEMORY_BOUND = re.compile("TopK|threefry2x32|__cub\\$|RadixSort")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """The work of one custom call.

    Attributes:
      dtype: of the left operand of its matrix products, as `precision.effective_matmul_dtype`
        names it; of a Pallas kernel, of its first operand that may be one.
      matmul_flops: 2 a multiply-add; of a declared cost all but the transcendentals.
      element_flops: everything else, transcendentals included.
      bytes: declared memory traffic; None where operands and results tell.
      counted: the products are those in the kernel's own body, masked blocks included.
      remote_bytes: what it declares to send to other devices by itself.
      declared: the figures are those the kernel's author declared.
    """

    dtype: str
    matmul_flops: float = 0.0
    element_flops: float = 0.0
    transcendentals: float = 0.0
    bytes: float | None = None
    counted: bool = False
    remote_bytes: float = 0.0
    declared: bool = False


def call_cost(instruction: Instruction, computation: Computation) -> CallCost | None:
    """What a custom call does, or None where only its memory traffic can be known.

    Args:
      instruction: a custom call that is none of `FREE_CALLS`.
      computation: where its operands are found.
    """
    operands = [computation.find(name) for name in instruction.operands]
    shapes = tuple(shape for operand in operands for shape in operand.shapes)
    if declared := _declared(instruction, shapes):
        return declared
    target = instruction.custom_call_target
    if target == "tpu_custom_call":
        return _in_body(instruction, shapes)
    if _MEMORY_BOUND.search(target):
        return CallCost(dtype="", element_flops=float(sum(s.size for s in instruction.shapes)))
    if not target.startswith("__"):
        return None
    if target.startswith("__cudnn$fmha"):
        flops = _attention(instruction, shapes)
    elif instruction.attribute("dim_labels"):
        flops = _library_convolution(instruction, shapes)
    elif _PRODUCT.search(target):
        flops = _library_product(instruction, shapes)
    else:
        return None
    if flops is None:
        return None
    dtype = effective_matmul_dtype(shapes[0].dtype, *precision_of(instruction))
    return CallCost(dtype=dtype, matmul_flops=flops)


def _declared(instruction: Instruction, operands: tuple[Shape, ...]) -> CallCost | None:
    found = _DECLARED.search(instruction.attribute("backend_config"))
    if not found:
        return None
    fields = {name: float(value) for name, value in _FIELD.findall(found[1])}
    if min(fields.values(), default=-1.0) < 0 or not any(fields.values()):
        return None
    transcendentals = fields.get("transcendentals", 0.0)
    return CallCost(
        dtype=_multiplied(instruction, operands),
        matmul_flops=fields.get("flops", 0.0),
        element_flops=transcendentals,
        transcendentals=transcendentals,
        bytes=fields.get("bytes_accessed") or None,
        remote_bytes=fields.get("remote_bytes_transferred", 0.0),
        declared=True,
    )


def _in_body(instruction: Instruction, operands: tuple[Shape, ...]) -> CallCost | None:
    """The products in a Pallas kernel's own body; a kernel without any stays unknown."""
    found = _BODY.search(instruction.attribute("backend_config"))
    flops = mosaic.matmul_flops(found[1]) if found else None
    if not flops:
        return None
    return CallCost(dtype=_multiplied(instruction, operands), matmul_flops=flops, counted=True)


def _multiplied(instruction: Instruction, operands: tuple[Shape, ...]) -> str:
    """The type that a Pallas kernel multiplies in: of the first float, else of the first integer of
    8 bits or less, else of whatever comes first. Indices, of 32 bits, stand before either."""
    found = [shape.dtype for shape in (*operands, *instruction.shapes)]
    floats = [dtype for dtype in found if dtype[0] in "bf"]
    narrow = [dtype for dtype in found if _NARROW.fullmatch(dtype)]
    return next(iter((*floats, *narrow, *found)), "")


def _library_product(instruction: Instruction, operands: tuple[Shape, ...]) -> float:
    lhs, rhs, out = operands[0], operands[1], instruction.shape
    config = instruction.attribute("backend_config")
    if found := re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', config):
        summed = math.prod(lhs.dims[int(i)] for i in re.findall(r"\d+", found[1]))
        return product_flops(out.size * summed, lhs.dtype)
    # lhs = B M K, rhs = B K N, out = B M N, whichever of them are transposed; so K^2 follows.
    batch = math.prod(rhs.dims[:-2])
    depth = math.sqrt(lhs.size * rhs.size / (out.size * batch) if out.size else 0)
    return product_flops(out.size * depth, lhs.dtype)


def _library_convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> float:
    """cuDNN prints its backward convolutions with the dimensions of the forward one."""
    first, second, result = operands[0], operands[1], instruction.shape
    if "BackwardInput" in instruction.custom_call_target:
        return convolution_flops(instruction, result, second, first)
    if "BackwardFilter" in instruction.custom_call_target:
        return convolution_flops(instruction, first, result, second)
    return convolution_flops(instruction, first, second, result)


def _attention(instruction: Instruction, operands: tuple[Shape, ...]) -> float | None:
    """Two products forward; backward four, and the scores once more. A causal mask halves them."""
    config = instruction.attribute("backend_config")
    backward = "Backward" in instruction.custom_call_target
    # The product whose right side is the keys, or has their layout: it contracts their positions.
    product = "bmm1_grad_gemm2" if backward else "bmm2"
    found = re.search(
        rf'"{product}_dot_dimension_numbers":[^}}]*"rhs_contracting_dimensions":\s*\["?(\d+)',
        config,
    )
    if not found:
        return None
    query, key = operands[0], operands[1]
    flops = 2.0 * (5 if backward else 2) * query.size * key.dims[int(found[1])]
    return flops / 2 if re.search(r'"mask_type":\s*"\w*CAUSAL', config) else flops
