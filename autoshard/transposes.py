"""Which arrays the kernels of a step transpose on CPU, where a transpose costs more than its bytes.

XLA brings the operands of every product to one order of dimensions (`dot_decomposer`): batch, free,
contracted on the left, batch, contracted, free on the right. XLA:CPU copies what lies otherwise,
but for matrices whose two dimensions change places, which its products read either way. It brings
those of a convolution to batch, space, features and space, features read, features made
(`ConvCanonicalization`), but for convolutions that it writes as loops. So seen with jax 0.10.2 and
0.12.0.1.
"""

from collections.abc import Sequence

from autoshard.cache_lines import Turn
from autoshard.compat import stablehlo
from autoshard.compat.convolution import convolution


def transposed_operands(operation: stablehlo.Operation) -> dict[int, Turn]:
    """Which operands of an operation XLA:CPU brings to another order, in it or for it.

    Of a transpose in the dimensions of what it makes, else in those of the operand.
    """
    orders: dict[int, Sequence[int]] = {}
    if operation.name == "stablehlo.transpose":
        orders[0] = stablehlo.permutation(operation)
    elif operation.name == "stablehlo.dot_general":
        orders = _orders_of_product(operation)
    elif operation.name == "stablehlo.convolution":
        read = convolution(operation)
        orders = {} if read.turned else dict(enumerate(read.orders))
    turns = {}
    for i, to in orders.items():
        dims, bits = stablehlo.shape_and_bits(str(operation.operands[i].type))
        if [d for d in to if dims[d] > 1] == [d for d in range(len(dims)) if dims[d] > 1]:
            continue
        before, after = reversed(range(len(dims))), reversed(to)
        if operation.name == "stablehlo.transpose":
            becomes = {d: place for place, d in enumerate(to)}
            before, after = (becomes[d] for d in before), (becomes[d] for d in after)
        turns[i] = Turn(tuple(before), tuple(after), bits / 8)
    return turns


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
