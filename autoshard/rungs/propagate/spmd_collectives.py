"""The collectives that a compiler sends for those that the partitioner put.

XLA's partitioner takes apart what Shardy's says in one (seen with jaxlib 0.10.2 and 0.12.0.1 for
CPU, 0.10.2 for H100, libtpu 0.0.42 for v5e: docs/decisions/0014).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from autoshard.compat.shardy.partitioned_program import Communication, Sum
from autoshard.compat.shardy.stablehlo import source_of
from autoshard.records.subaxes import ways
from autoshard.records.trial import Collective
from autoshard.target.cost import Constants

_Axes = tuple[str, ...]


class Sent(NamedTuple):
    """One collective of the compiled program: kind, mesh axes, payload of one execution."""

    kind: str
    axes: _Axes
    bytes: float


def spmd_collectives(
    communication: Iterable[Communication],
    trips: Mapping[int, float],
    sizes: Mapping[str, int],
    constants: Constants,
) -> list[Collective]:
    """What a compiler sends for the partitioner's collectives.

    Args:
      trips: executions of each block in a step.
      sizes: of the mesh axes.
    """
    return [
        Collective(
            kind=each.kind,
            group_size=ways(each.axes, sizes),
            mesh_axes=each.axes,
            bytes=int(each.bytes),
            count=int(trips.get(one.block, 1.0)),
            source=source_of(one.location),
        )
        for one in communication
        for each in sent_for(one, sizes, constants)
    ]


def is_folded(one: Communication, constants: Constants) -> bool:
    """Whether a compiler adds before it sends, so that this sum goes with an earlier one."""
    return one.sum is not None and one.sum.added and constants.folds_sums


def sent_for(one: Communication, sizes: Mapping[str, int], constants: Constants) -> list[Sent]:
    """The collectives that a compiler makes of one, in order; none where it is folded."""
    if is_folded(one, constants):
        return []
    if one.sum is not None:
        return _summed(one, one.sum, sizes, constants)
    kind = "all_gather" if one.kind == "sharded_to_unreduced" else one.kind
    if constants.gathers_by_dimension and sum(map(bool, one.gathered)) > 1:
        return _gathered(one, sizes)
    return [Sent(kind, one.axes, max(one.before, one.after))]


def _gathered(one: Communication, sizes: Mapping[str, int]) -> list[Sent]:
    """One dimension after another, the last first."""
    found = []
    bytes_ = one.before
    for axes in filter(None, reversed(one.gathered)):
        bytes_ *= ways(axes, sizes)
        found.append(Sent("all_gather", axes, bytes_))
    return found


def _summed(
    one: Communication, of: Sum, sizes: Mapping[str, int], constants: Constants
) -> list[Sent]:
    """A product is summed first over what its result is divided by afterwards, then the part that a
    device keeps over the rest. Other sums are reduced whole, unless that is all there is."""
    cut = tuple(axis for dim in of.cut for axis in dim)
    every, whole = set(one.axes), one.before
    kind = "all_reduce"
    if constants.forms_reduce_scatter and len(of.cut) == 1:
        kind = "reduce_scatter"
    if of.product and of.fresh and cut and set(cut) <= every:
        rest = tuple(axis for axis in one.axes if axis not in cut)
        at_once = (_in_order(cut, one.axes),) if constants.folds_sums else of.cut
        found = [Sent(kind, axes, whole) for axes in reversed(at_once)]
        return [*found, *([Sent("all_reduce", rest, whole / ways(cut, sizes))] if rest else [])]
    if not constants.folds_sums:
        return [Sent("all_reduce", axes, whole) for axes in reversed(of.summed)]
    return [Sent(kind if set(cut) == every else "all_reduce", one.axes, whole)]


def _in_order(axes: _Axes, order: _Axes) -> _Axes:
    return tuple(axis for axis in order if axis in axes)
