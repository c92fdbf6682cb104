"""Which kernels XLA:CPU leaves to its library (YNNPACK)."""

from autoshard.hlo.records import Instruction

_LIBRARY = '"kind":"__ynn_fusion"'


def is_handed_over(instruction: Instruction) -> bool:
    """Whether an instruction is a fusion that the library runs."""
    return _LIBRARY in instruction.attribute("backend_config")
