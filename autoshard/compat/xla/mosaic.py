"""Pallas kernels for TPU: matrix products counted in the kernel's own body (Mosaic; 0.10 to 0.12).

The body stands in the custom call as MLIR bytecode. A grid or a loop of unknown length, which
dynamic shapes bring, makes the count unknown; of a condition, such as one that skips masked blocks,
the larger side counts, as if no block were masked.
"""

import base64
import binascii
import math
import re

from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import tpu  # type: ignore[attr-defined]  # its stub does not export it
from jaxlib.mlir import ir

from autoshard.compat.shardy.stablehlo import Operation, Value


class _Unknown(Exception):
    """A loop whose length the body does not say."""


def matmul_flops(body: str) -> float | None:
    """Operations of all matrix products of one launch, 2 a multiply-add; None where unknown.

    Args:
      body: base64 of the bytecode, as in the `custom_call_config` of a `tpu_custom_call`.
    """
    with jax_mlir.make_ir_context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        try:
            module = ir.Module.parse(base64.b64decode(body, validate=True), context)
            return _flops(module.operation)
        except (binascii.Error, ir.MLIRError, _Unknown):
            return None


def _flops(op: Operation) -> float:
    name = op.name.removeprefix("stable_mosaic.")
    if name in ("tpu.matmul", "vector.contract"):
        return _product(op)
    inside = [sum(_flops(o.operation) for block in r for o in block) for r in op.regions]
    if name == "scf.if":
        return max(inside, default=0.0)
    total = float(sum(inside))
    if not total:
        return 0.0
    if name == "scf.for":
        low, high, step = (_constant(value) for value in list(op.operands)[:3])
        return total * max(0, -(-(high - low) // step))
    if name == "scf.while":
        raise _Unknown
    if name == "func.func" and "iteration_bounds" in op.attributes:
        grid = [int(n) for n in re.findall(r"-?\d+\b", _numbers(op, "iteration_bounds"))]
        if min(grid, default=1) < 0:  # a dynamic extent
            raise _Unknown
        return total * math.prod(grid)
    return total


def _product(op: Operation) -> float:
    lhs, out = ir.ShapedType(op.operands[0].type), ir.ShapedType(op.results[0].type)
    if "dimension_numbers" in op.attributes:
        found = re.search(r"<\[([\d, ]*)\]", str(op.attributes["dimension_numbers"]))
        contracted = [int(n) for n in found[1].split(",")] if found and found[1] else []
        return 2.0 * math.prod(out.shape) * math.prod(lhs.shape[i] for i in contracted)
    if op.name.endswith("vector.contract"):
        raise _Unknown
    return 2.0 * math.prod(out.shape) * lhs.shape[-1]


def _numbers(op: Operation, name: str) -> str:
    """`array<i64: 4, 8>` without its type."""
    return str(op.attributes[name]).partition(":")[2]


def _constant(value: Value) -> int:
    owner = value.owner
    attributes = getattr(owner, "attributes", None)
    if attributes is None or "value" not in attributes:
        raise _Unknown
    return int(ir.IntegerAttr(attributes["value"]).value)
