"""What devices send each other where windows reach beyond a device's own part.

A convolution, a pool, a slice or a pad along a divided dimension needs places that other devices
have. Those of the neighbours come by one collective-permute from each side; where some lie farther
away, the dimension is gathered (XLA's spmd_partitioner_util.cc, ExchangeHaloAndGetValidData, does
the same in more ways).
"""

from collections.abc import Iterator

from autoshard.records.subaxes import ways
from autoshard.records.trial import Collective
from autoshard.records.windows import Window, Windowed, reach
from autoshard.rungs.propagate.local_shapes import LocalShapes
from autoshard.rungs.propagate.operations import WindowedOperation


def window_exchanges(local: LocalShapes) -> list[Collective]:
    """Those of a step under one layout, without branches that are not taken."""
    ops = local.operations
    return [
        one
        for operation in ops.windowed
        if ops.trips[operation.tag]
        for one in _exchanged(operation, local)
    ]


def _exchanged(operation: WindowedOperation, local: LocalShapes) -> Iterator[Collective]:
    """One dimension after another."""
    ops, sizes = local.operations, local.sizes
    made, data = local.made_dims(operation.tag), operation.operands[0]
    read = local.read_axes(operation.tag, 0) or frozenset(axis for dim in made for axis in dim)
    bytes_ = ops.sizes[data] / ways(read, sizes)
    for one in operation.dimensions:
        window, axes = _divided(operation, one, local)
        parts = ways(axes, sizes)
        if parts == 1 or not bytes_:
            continue
        part = -(-window.data // parts)
        sides = [places for places in reach(window, parts) if places > 0]
        near = all(places <= part for places in sides)
        for places in sides if near else [part * parts]:
            yield Collective(
                kind="collective_permute" if near else "all_gather",
                group_size=parts,
                mesh_axes=axes,
                bytes=int(bytes_ * places / part),
                count=int(ops.trips[operation.tag]),
                source=operation.source,
            )


def _divided(
    operation: WindowedOperation, one: Windowed, local: LocalShapes
) -> tuple[Window, tuple[str, ...]]:
    """A window and the mesh axes that divide it.

    They divide the result, and the operand alike; or what both operands are summed over, as the
    gradient of a convolution's kernel has it: window and result then change their roles.
    """
    made = local.made_dims(operation.tag)
    if any(made) and made[one.result]:
        return one.window, made[one.result]
    if one.kernel < 0:
        return one.window, ()
    dims = local.dims(operation.operands[1])
    axes = dims[one.kernel] if dims else ()
    read = local.read_axes(operation.tag, 0) & local.read_axes(operation.tag, 1)
    return one.window.transposed(), tuple(axis for axis in axes if axis in read)
