"""What a device holds at a time, under one layout: values, what is received, copies beside them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.compat.judged import Communication
from autoshard.cost import Constants
from autoshard.kernels import KernelTable
from autoshard.rungs.halos import Reaching
from autoshard.rungs.sending import folded
from autoshard.rungs.shares import Shares
from autoshard.sites import site_of_location


class Received(NamedTuple):
    """A buffer beside the values, which a collective writes or a copy: bytes, needed between two
    positions."""

    first: int
    last: int
    bytes: float


def received(
    kernels: KernelTable,
    communication: Iterable[Communication],
    halos: Iterable[Reaching],
    constants: Constants,
) -> list[Received]:
    """The buffers that receive what is sent, and those that it is joined in."""
    value_of: Mapping[int, int] = {site: value for value, site in kernels.site_values}
    found = []
    for one in communication:
        position = kernels.positions.get(one.tag, 0)
        # A constraint's gather makes a value of its own.
        site = site_of_location(one.location) if one.kind == "all_gather" else None
        if one.moved:  # the loop reads it in every turn
            until = kernels.ends[one.tag]
            own = None if site is None else value_of.get(site)
            found += _around(kernels, own, Received(position, until, one.after))
        elif not folded(one, constants) and site is None:
            found.append(Received(position, position + 1, one.after))
    for convolution, halo in halos:
        position = kernels.positions.get(convolution.tag, 0)
        found.append(Received(position, position + 1, halo.bytes))
    return found


def copied_whole(shares: Shares) -> list[Received]:
    """Copies of operands that were gathered and are needed in another order: beyond those of a
    device's own part (`KernelTable.scratch`)."""
    kernels = shares.kernels
    early = {(one.value, one.last): one.first for one in kernels.scratch}
    copied = []
    for tag, value, extra in shares.gathered_operands():
        if (kernels.tags[tag][0], value) in kernels.copied:
            last = kernels.positions[tag]
            copied.append(Received(early.get((value, last), last), last, extra))
    return copied


def peak_of(kernels: KernelTable, local: np.ndarray, beside: Sequence[Received]) -> float:
    """Largest sum of live buffers over the step, bytes; arguments not included.

    Args:
      local: (v,) bytes that a device has of each value.
    """
    change = np.zeros(kernels.length + 2)
    sizes, live_to = buffers(kernels, local)
    held = kernels.live_from >= 0
    np.add.at(change, kernels.live_from[held], sizes[held])
    np.add.at(change, live_to[held] + 1, -sizes[held])
    for value, scale, first, last in kernels.scratch:
        change[first] += scale * local[value]
        change[last + 1] -= scale * local[value]
    for first, last, bytes_ in beside:
        change[first] += bytes_
        change[min(last + 1, len(change) - 1)] -= bytes_
    return float(np.cumsum(change).max(initial=0.0))


def buffers(kernels: KernelTable, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of each buffer, that of the largest value in it; position of its last need).

    A constraint that keeps the size of what it constrains is the same array; else it is another
    one, and what it constrains is not needed any longer for its sake.
    """
    bytes_ = np.where(np.isfinite(local), local, 0.0)
    sizes = np.zeros(len(local))
    np.maximum.at(sizes, kernels.buffer, bytes_)
    live_to = kernels.live_to.copy()
    constraints = np.flatnonzero(kernels.parents >= 0)
    parents = kernels.parents[constraints]
    same = bytes_[constraints] == bytes_[parents]
    sizes[constraints[same]] = 0.0
    kept = kernels.buffer[parents]
    for c, buffer, one in zip(
        constraints[::-1].tolist(), kept[::-1].tolist(), same[::-1].tolist(), strict=True
    ):
        until = live_to[c] if one else kernels.live_from[c]
        if until > live_to[buffer]:
            live_to[buffer] = until
    return sizes, live_to


def _around(kernels: KernelTable, value: int | None, whole: Received) -> list[Received]:
    """The part of the time in which a value does not hold what was received."""
    if value is None or kernels.live_from[value] < 0:
        return [whole]
    first, last = int(kernels.live_from[value]), int(kernels.live_to[value])
    parts = whole._replace(last=first - 1), whole._replace(first=last + 1)
    return [part for part in parts if part.first <= part.last]
