"""The work of one kernel launch, as a record."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel launch on one device.

    Attributes:
      opcode: of the instruction, such as `fusion`, `custom-call` or `dot`.
      name: what a person recognises: the target of a custom call, else JAX's path to the operation,
        else the instruction's name.
      matmul_flops: (dtype, operations) of matrix products and convolutions, sorted by the dtype of
        the left operand as `precision.effective_matmul_dtype` names it; declared operations of a
        custom call count here, under the type of its first float operand, else of its integers.
      element_flops: all other operations, transcendentals included.
      transcendentals: the part of them that are exp, tanh, sqrt and their like.
      bytes: read from and written to the main memory.
      cycles: the compiler's own estimate, clock cycles; None where it prints none that can be.
      declared: operations and bytes come from the declared cost of a custom call.
    """

    opcode: str
    name: str
    matmul_flops: tuple[tuple[str, float], ...] = ()
    element_flops: float = 0.0
    transcendentals: float = 0.0
    bytes: float = 0.0
    cycles: int | None = None
    declared: bool = False
