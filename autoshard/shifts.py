"""Shifts: what devices send each other for a slice or a pad along a divided dimension.

The result is divided into as many parts as the operand, so its parts begin elsewhere. XLA's
partitioner sends what a device lacks in one of three ways. Where the parts lie near, each device
gets one piece from each of its neighbours, as far as the farthest reaches. Where some would get
pieces from far away, each source sends each device just what that needs, as many at once as have
another target each. Where most would go everywhere, all gather the operand and keep their places.
Source: `ExchangeHaloAndGetValidData`, `ExchangeHalo` and `ExchangeHaloCompact` in
xla/service/spmd/spmd_partitioner_util.cc (2026).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from autoshard.convolutions import Window
from autoshard.halos import places


class Needed(NamedTuple):
    """Places of the whole operand that each device needs, from and to (behind the last).

    Attributes:
      part: places that each device has, the last ones perhaps beyond the end.
      extent: of the operand.
      places: one for each device, in order.
    """

    part: int
    extent: int
    places: tuple[tuple[int, int], ...]


def sliced(extent: int, start: int, limit: int, stride: int) -> Window:
    """A slice of one dimension, as a window of one place."""
    return Window(
        data=extent, kernel=1, out=-(-(limit - start) // stride), stride=stride, low=-start
    )


def padded(extent: int, low: int, high: int, interior: int) -> Window:
    """A pad of one dimension, as a window of one place."""
    out = low + extent + high + interior * max(extent - 1, 0)
    return Window(data=extent, kernel=1, out=out, low=low, spread=interior + 1)


def moves(window: Window) -> bool:
    """Whether a place of the result is not the same place of the operand."""
    return window != Window(data=window.data, kernel=1, out=window.data)


@functools.lru_cache(maxsize=4096)
def pieces(window: Window, ways: int) -> tuple[int, ...] | None:
    """Places in each collective-permute, in order; None where the operand is gathered instead.

    Args:
      window: of one place.
      ways: devices that operand and result are divided among.
    """
    needed = Needed(-(-window.data // ways), window.data, places(window, ways))
    widest = max(end - first for first, end in needed.places)
    before, behind = _beyond(needed)
    if max(*before, *behind) > 2 * widest:
        return None if 2 * widest >= ways * needed.part else _apart(needed)
    return _chained(needed.part, before, behind)


def _beyond(needed: Needed) -> tuple[list[int], list[int]]:
    """What each device needs before and behind its own part; negative where not all of that."""
    own = [(i * needed.part, (i + 1) * needed.part) for i in range(len(needed.places))]
    both = list(zip(own, needed.places, strict=True))
    return [mine[0] - first for mine, (first, _) in both], [
        end - mine[1] for mine, (_, end) in both
    ]


def _chained(part: int, before: Sequence[int], behind: Sequence[int]) -> tuple[int, ...] | None:
    """Each device sends the same places, to those at a distance of one, of two and so on."""
    ways = len(before)
    left, right = max(before[1:]), max(behind[:-1])
    if left + right + part >= part * ways and max(left, right) > part:
        return None
    lowest, highest = -max(before), part + max(behind)  # that any device needs, of its own part on
    if lowest >= highest:
        return None
    found = []
    for hop in reversed(range(min(-(-left // part), ways - 1))):
        found.append(min(left - part * hop, part) - max(-hop * part - highest, 0))
    for hop in range(min(-(-right // part), ways - 1)):
        found.append(min(right - part * hop, part) - max(lowest - (hop + 1) * part, 0))
    return tuple(size for size in found if size > 0)


class _Piece(NamedTuple):
    """What one device needs of another: at which offset of what it makes, for whom, from and to."""

    offset: int
    device: int
    start: int
    limit: int


def _apart(needed: Needed) -> tuple[int, ...]:
    """Each source sends each device what it needs, one piece after another."""
    waiting = _by_source(needed)
    found = []
    while any(waiting):
        targets = set[int]()
        start, limit = needed.part, 0
        for queue in waiting:
            if not queue or (targets and _waits(queue[0], targets, start, limit, needed.part)):
                continue
            piece = queue.pop(0)
            targets.add(piece.device)
            start, limit = min(start, piece.start), max(limit, piece.limit)
        found.append(limit - start)
    return tuple(found)


def _waits(piece: _Piece, targets: set[int], start: int, limit: int, part: int) -> bool:
    """Whether it does not go with pieces that lie from `start` to `limit` in their parts.

    So where its target gets one of them, or they are the ends of parts and it is a beginning.
    """
    ends, begins = (start, limit), (piece.start, piece.limit)
    for lower, upper in ((begins, ends), (ends, begins)):
        if lower[0] == 0 and lower[1] < upper[0] and upper[1] == part:
            return True
    return piece.device in targets


def _by_source(needed: Needed) -> list[list[_Piece]]:
    part = needed.part
    found: list[list[_Piece]] = [[] for _ in needed.places]
    for device, (first, end) in enumerate(needed.places):
        place = max(first, 0)
        while place < min(end, needed.extent):
            source, upto = place // part, min((place // part + 1) * part, end)
            if source != device:
                own = source * part
                found[source].append(_Piece(place - first, device, place - own, upto - own))
            place = upto
    return [sorted(queue, key=lambda piece: piece.offset) for queue in found]
