"""The work of one kernel launch, as a record."""

import dataclasses

from autoshard.rows import MANY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel launch on one device.

    Attributes:
      opcode: of the instruction, such as `fusion`, `custom-call` or `dot`.
      name: what a person recognises: the target of a custom call, else JAX's path to the operation,
        else the instruction's name.
      matmul_flops: (dtype of the left operand, as `precision.multiplied_as` has it, operations) of
        matrix products and convolutions, sorted; declared operations of a custom call count here,
        under the type of its first float operand, or of its integers where it has none.
      turned_flops: the part of them that are convolutions whose kernel is read backwards.
      element_flops: all other operations, transcendentals included.
      transcendentals: the part of them that are exp, tanh, sqrt and their like.
      unvectorized_flops: the part of them that a loop does element by element (`vectorization`).
      bytes: read from and written to the main memory.
      transposed: elements that transposes read across cache lines (`hlo.transposes`), each by what
        it costs (`cache_lines.Lines.crossed`).
      collided: those of them whose lines push each other out of the cache, each by its crowding.
      degenerate: elements of sums of products beside a dimension of one (`degenerate`), where what
        is added up lies densely.
      degenerate_across: the same where it does not.
      rows: of the result of the product that it makes (`rows`), the most of several.
      patches: elements of patches that are copied for a convolution (`convolutions`).
      cycles: the compiler's own estimate, clock cycles; None where it prints none that can be.
      declared: operations and bytes come from the declared cost of a custom call.
    """

    opcode: str
    name: str
    matmul_flops: tuple[tuple[str, float], ...] = ()
    turned_flops: float = 0.0
    element_flops: float = 0.0
    transcendentals: float = 0.0
    unvectorized_flops: float = 0.0
    bytes: float = 0.0
    transposed: float = 0.0
    collided: float = 0.0
    degenerate: float = 0.0
    degenerate_across: float = 0.0
    rows: float = MANY
    patches: float = 0.0
    cycles: int | None = None
    declared: bool = False
