"""How precisely products of float32 are multiplied: part of the type under which they are priced.

By default XLA multiplies f32 in one pass of bf16 on TPU and in TF32 on NVIDIA GPUs. A step can ask
for more: `jax.lax.Precision`, `jax.default_matmul_precision`, or a dot algorithm by name.

On TPU HIGH is three products of parts in bf16 and HIGHEST six (documentation of
`jax.lax.Precision` and of `jax.lax.DotAlgorithmPreset`, jax 0.10.2: bfloat16_3x and bfloat16_6x;
libtpu 0.0.42 estimates 2.85 and 5.7 times the cycles for 2048^3). On NVIDIA GPUs HIGH is TF32 and
HIGHEST is not: cuBLAS and cuDNN are let use TF32 up to HIGH (XLA's matmul_utils.cc and
gpu_conv_algorithm_picker.cc, 2026), so HIGHEST takes the units of all other arithmetic. XLA:GPU's
own Triton products use TF32 by default alone; autotuning on a real GPU takes what is faster.

Not modelled: one operand more precise than the other (the more precise one counts for both), other
types than f32 on TPU (f16 at HIGHEST takes three passes), products inside Pallas kernels, NVIDIA
GPUs without TF32 (before Ampere) or told not to use it (NVIDIA_TF32_OVERRIDE).
"""

import re
from collections.abc import Iterable

from autoshard.records.arithmetic import part_of_complex

HIGH, HIGHEST = "f32:high", "f32:highest"

_ALGORITHM = re.compile(r"(?:alg_)?dot_([a-z0-9]+)_.*?(?:_x(\d+))?")
_PASSES = {HIGH: 3, HIGHEST: 6}
"""Products in bf16 of one product on TPU."""


def effective_matmul_dtype(dtype: str, precisions: Iterable[str], algorithm: str = "") -> str:
    """The type under which a product or convolution is priced.

    Args:
      dtype: of the left operand, in MLIR's words or HLO's; of complex numbers their parts count.
      precisions: of the operands: default, high or highest, in either case.
      algorithm: as HLO names it, such as `dot_bf16_bf16_f32_x3`; else it is left aside.

    Returns:
      The type, for f32 with how it is multiplied: `f32:high`, `f32:highest`, or the type that it is
      cut to, with the number of products where they are several. TF32 is the default of f32.

    >>> [effective_matmul_dtype(dtype, ["HIGHEST", "HIGHEST"]) for dtype in ("f32", "bf16")]
    ['f32:highest', 'bf16']
    >>> algorithms = ("bf16_bf16_f32_x3", "tf32_tf32_f32", "f32_f32_f32")
    >>> [effective_matmul_dtype("f32", [], f"dot_{name}") for name in algorithms]
    ['bf16_x3', 'f32', 'f32:highest']
    """
    dtype = part_of_complex(dtype)
    if dtype != "f32":
        return dtype
    if named := _ALGORITHM.fullmatch(algorithm.lower()):
        cut, passes = named.groups()
        if cut == "f32":
            return HIGHEST
        cut = "f32" if cut == "tf32" else cut
        return f"{cut}_x{passes}" if passes else cut
    asked = {f"f32:{precision.lower()}" for precision in precisions}
    return next((name for name in (HIGHEST, HIGH) if name in asked), dtype)


def operand_dtype(multiplied: str, platform: str) -> str:
    """The type to which a product cuts operands of f32, "" where it keeps (nearly) all of them.

    Args:
      multiplied: as `effective_matmul_dtype` names it.
      platform: "cpu", "cuda", "rocm" or "tpu".

    >>> [operand_dtype("f32", platform) for platform in ("cuda", "tpu", "cpu")]
    ['tf32', 'bf16', '']
    >>> operand_dtype("bf16_x3", "tpu")
    ''
    """
    if multiplied in ("bf16", "f16"):
        return multiplied
    if platform == "cuda":
        return "tf32" if multiplied in ("f32", HIGH) else ""
    return "bf16" if (multiplied, platform) == ("f32", "tpu") else ""


def precise_rates(platform: str, f32: float, elements: float) -> dict[str, float]:
    """Operations a second of products of f32 that are more precise than the default.

    Args:
      platform: "tpu" or "cuda".
      f32: of products at the default precision.
      elements: of other arithmetic in f32.

    Returns:
      By type as `effective_matmul_dtype` names it, without those that cost no more than the
      default.
    """
    if platform == "tpu":
        return {name: f32 / passes for name, passes in _PASSES.items()}
    return {HIGHEST: elements} if platform == "cuda" else {}
