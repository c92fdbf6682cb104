"""Of a kernel of XLA:CPU that loops over what it writes: in how many parts, and if vectorized."""

import math
import re

import numpy as np

from autoshard.hlo.records import HloModule, Instruction
from autoshard.vectorization import is_vectorized

_PARTS = re.compile(r'"outer_dimension_partitions":\[([^\]]*)\]')


def parts_of(instruction: Instruction) -> int:
    """How many parts the host's threads share its outermost dimension in; 1 where none are told."""
    found = _PARTS.search(instruction.attribute("backend_config"))
    return math.prod(int(number) for number in re.findall(r"\d+", found[1])) if found else 1


def most_parts(module: HloModule) -> int:
    """Of the kernel with the most; 1 where there is none with parts."""
    kernels = (i for computation in module.computations for i in computation.instructions)
    return max(map(parts_of, kernels), default=1)


def vectorizes(instruction: Instruction) -> bool:
    """Whether a kernel's arithmetic is vectorized, or nothing is known of it (`vectorization`)."""
    parts = parts_of(instruction)
    if parts < 2:
        return True
    dims, order = instruction.shape.dims, instruction.shape.minor_to_major
    extents = [dims[d] for d in order[::-1]] if order else dims
    return bool(is_vectorized(np.array([extents or (1,)]), np.array([parts]))[0])
