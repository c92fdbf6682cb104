"""What devices send each other, and copy, of convolutions whose places are divided (`halos`)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.compat.convolution import Convolution
from autoshard.compat.reshards import Division
from autoshard.convolutions import taps
from autoshard.cost import CostModel
from autoshard.halos import Reach, reach, reach_contracted
from autoshard.kernels import ConvolvedKernel, KernelTable
from autoshard.rungs.shares import Shares
from autoshard.subaxes import ways
from autoshard.trial import Collective

_JOINING_FLOPS = 6.0
"""Operations for each element of the array that a device joins: where it lies in the whole, whether
that is before the beginning or behind the end, and which of data and zero it is then."""


class Sent(NamedTuple):
    """Places that each device sends to the next one, to one side."""

    axes: tuple[str, ...]
    bytes: float


class Halo(NamedTuple):
    """What becomes of one convolution on a device.

    Attributes:
      sent: in order.
      bytes: of the data with what was received beside them; 0 if that is nothing.
      work: its arithmetic over its share of that of the whole.
    """

    sent: tuple[Sent, ...]
    bytes: float
    work: float


class Reaching(NamedTuple):
    """A convolution of which a device needs more than its own part."""

    convolution: ConvolvedKernel
    halo: Halo


NO_HALO = Halo((), 0.0, 1.0)


def halo_of(
    said: Convolution,
    data: Division,
    by: Division,
    made: Division,
    data_bytes: float,
    sizes: Mapping[str, int],
) -> Halo:
    """The halo of a convolution; `NO_HALO` where no dimension of space is divided.

    Args:
      data, by, made: mesh axes of each dimension of the data, of what they are convolved by, and of
        the result; () where nothing divides them.
      data_bytes: that a device has itself.
    """
    sent: list[Sent] = []
    bytes_, work = data_bytes, 1.0
    for window, *dims in zip(said.windows, *said.space, strict=True):
        axes, by_axes, made_axes = map(_axes, (data, by, made), dims)
        parts = ways(axes, sizes)
        found: Reach | None = None
        if parts > 1 and axes == made_axes:
            found = reach(window, parts)
        elif parts > 1 and axes == by_axes and not made_axes and window.spread == 1:
            found = reach_contracted(window, parts)
        if found is None:
            continue
        work *= found.pairs * parts / max(taps(window), 1)
        sent += [Sent(axes, bytes_ * n / found.part) for n in (found.before, found.behind) if n]
        bytes_ *= found.grown
    return Halo(tuple(sent), bytes_ if sent else 0.0, work)


def reaching(shares: Shares) -> list[Reaching]:
    """Convolutions of which a device needs more than its own part."""
    found = []
    for one in shares.kernels.convolutions:
        data = shares.dims(one.data)
        read = shares.judged.operands.get(one.tag, ()) if shares.judged else ()
        if not any(data) or not read:
            continue
        halo = halo_of(
            one.said,
            data,
            shares.dims(one.by),
            shares.made_dims(one.tag),
            float(shares.local[one.data]),
            shares.sizes,
        )
        if read[0] != frozenset(m for dim in data for m in dim):  # gathered in between
            halo = Halo((), 0.0, halo.work)
        if halo != NO_HALO:
            found.append(Reaching(one, halo))
    return found


def exchanged(
    halos: Sequence[Reaching], kernels: KernelTable, sizes: Mapping[str, int]
) -> list[Collective]:
    """What is sent for halos."""
    return [
        Collective(
            kind="collective_permute",
            group_size=ways(sent.axes, sizes),
            mesh_axes=sent.axes,
            bytes=int(sent.bytes),
            count=int(kernels.trips.get(one.tag, 1.0)),
            source="",
        )
        for one, halo in halos
        for sent in halo.sent
    ]


def joining_s(halos: Sequence[Reaching], kernels: KernelTable, cost: CostModel) -> float:
    """Seconds in which devices copy what they received beside their own."""
    joined = [(one, halo.bytes) for one, halo in halos if halo.bytes]
    if not joined:
        return 0.0
    data = [one.data for one, _ in joined]
    bytes_ = np.array([size for _, size in joined])
    elements = bytes_ * kernels.value_elements[data] / np.maximum(kernels.value_bytes[data], 1)
    return cost.kernels_s(
        _JOINING_FLOPS * elements,
        2.0 * (bytes_ + elements),  # and a byte each that says whether it is beyond the edge
        kernels.kernel_trips[[one.kernel for one, _ in joined]],
        [""] * len(joined),
    )


def _axes(division: Sequence[tuple[str, ...]], dimension: int) -> tuple[str, ...]:
    return tuple(division[dimension]) if division else ()
