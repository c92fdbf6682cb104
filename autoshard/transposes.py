"""Which arrays the kernels of a step transpose on CPU, where a transpose costs more than its bytes.

XLA brings the operands of every product to one order of dimensions (`dot_decomposer`): batch, free,
contracted on the left, batch, contracted, free on the right. XLA:CPU copies what lies otherwise,
but for matrices whose two dimensions change places, which its products read either way. It brings
those of a convolution to batch, space, features and space, features read, features made
(`ConvCanonicalization`), but for convolutions that it writes as loops. So seen with jax 0.10.2 and
0.12.0.1.
"""

from collections.abc import Sequence

from autoshard.cache_lines import Lines, lines_read
from autoshard.compat import stablehlo
from autoshard.compat.convolution import convolution


def transposed_operands(operation: stablehlo.Operation) -> dict[int, Lines]:
    """Which operands of an operation XLA:CPU moves across cache lines, in it or for it, and how."""
    orders: dict[int, Sequence[int]] = {}
    if operation.name == "stablehlo.transpose":
        orders[0] = stablehlo.permutation(operation)
    elif operation.name == "stablehlo.dot_general":
        orders = _orders_of_product(operation)
    elif operation.name == "stablehlo.convolution":
        read = convolution(operation)
        orders = {} if read.turned else dict(enumerate(read.orders))
    turns = {i: _lines(operation.operands[i], to) for i, to in orders.items()}
    return {i: how for i, how in turns.items() if how.crossed}


def _orders_of_product(operation: stablehlo.Operation) -> dict[int, Sequence[int]]:
    """The orders to which operands of a matrix product are copied."""
    found: dict[int, Sequence[int]] = {}
    for i, (batch, contracted) in enumerate(stablehlo.product_dimensions(operation)):
        dims = stablehlo.shape_of(operation.operands[i])
        free = [d for d in range(len(dims)) if d not in batch and d not in contracted]
        inner = (free, contracted) if i == 0 else (contracted, free)
        to = [d for part in (batch, *inner) for d in part if dims[d] > 1]
        if not _is_read_as_it_lies(to, dims, inner):
            found[i] = to
    return found


def _is_read_as_it_lies(
    to: Sequence[int], dims: Sequence[int], inner: tuple[Sequence[int], Sequence[int]]
) -> bool:
    """Whether dimensions lie in this order, or are matrices whose two change places."""
    first, second = ([d for d in part if dims[d] > 1] for part in inner)
    if len(first) == len(second) == 1 and to[-2] > to[-1]:
        to = [*to[:-2], to[-1], to[-2]]
    return list(to) == sorted(to)


def _lines(value: stablehlo.Value, to: Sequence[int]) -> Lines:
    dims, bits = stablehlo.shape_and_bits(str(value.type))
    before = [d for d in reversed(range(len(dims))) if dims[d] > 1]
    after = [d for d in reversed(to) if dims[d] > 1]
    return lines_read(dims, before, after, bits / 8)
