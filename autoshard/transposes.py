"""Which arrays the kernels of a step transpose on CPU, where a transpose costs more than its bytes.

XLA brings the operands of every product to one order of dimensions (`dot_decomposer`): batch, free,
contracted on the left, batch, contracted, free on the right. XLA:CPU copies what lies otherwise,
but for matrices whose two dimensions change places, which its products read either way. So seen
with jax 0.10.2 and 0.12.0.1.
"""

from collections.abc import Sequence

from autoshard.cache_lines import crosses_lines
from autoshard.compat import stablehlo


def transposed_operands(operation: stablehlo.Operation) -> list[int]:
    """Which operands of an operation XLA:CPU moves across cache lines, in it or for it."""
    if operation.name == "stablehlo.transpose":
        return [0] if _crosses(operation.operands[0], stablehlo.permutation(operation)) else []
    if operation.name != "stablehlo.dot_general":
        return []
    found = []
    for i, (batch, contracted) in enumerate(stablehlo.product_dimensions(operation)):
        dims = stablehlo.shape_of(operation.operands[i])
        free = [d for d in range(len(dims)) if d not in batch and d not in contracted]
        inner = (free, contracted) if i == 0 else (contracted, free)
        to = [d for part in (batch, *inner) for d in part if dims[d] > 1]
        if not _is_read_as_it_lies(to, dims, inner) and _crosses(operation.operands[i], to):
            found.append(i)
    return found


def _is_read_as_it_lies(
    to: Sequence[int], dims: Sequence[int], inner: tuple[Sequence[int], Sequence[int]]
) -> bool:
    """Whether dimensions lie in this order, or are matrices whose two change places."""
    first, second = ([d for d in part if dims[d] > 1] for part in inner)
    if len(first) == len(second) == 1 and to[-2] > to[-1]:
        to = [*to[:-2], to[-1], to[-2]]
    return list(to) == sorted(to)


def _crosses(value: stablehlo.Value, to: Sequence[int]) -> bool:
    dims, bits = stablehlo.shape_and_bits(str(value.type))
    before = [d for d in range(len(dims)) if dims[d] > 1]
    after = [d for d in to if dims[d] > 1]
    if not after or before[-1] == after[-1]:
        return False
    return crosses_lines(dims[before[-1]], dims[after[-1]], bits / 8)
