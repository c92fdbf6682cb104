"""Halos: what a device needs of its neighbours for its part of a convolution in space.

XLA's partitioner lets each device make the places of the result that lie on its part of the data.
Windows reach beyond that part: the places next to it come from the devices that have them, one
collective-permute from each side, and are copied beside its own into one array, in which what lies
beyond the edge of the data is zero. So its windows fall on data everywhere, where padding needs no
arithmetic. For the gradient of a kernel the data meet another array as large: each device
multiplies its part of that one. Source: `ExchangeHaloAndGetValidData` in
xla/service/spmd/spmd_partitioner_util.cc, and convolution_handler.cc (2026).
"""

from collections.abc import Callable
from typing import NamedTuple

from autoshard.convolutions import Window, taps


class Reach(NamedTuple):
    """One dimension of space on one device.

    Attributes:
      part: places of the data that a device has itself.
      before, behind: places that it gets of those in front and behind.
      pairs: of its positions of the result and of the kernel that meet data.
    """

    part: int
    before: int
    behind: int
    pairs: int

    @property
    def grown(self) -> float:
        """Places of its array over those that it has itself."""
        return (self.before + self.part + self.behind) / self.part


def places(window: Window, ways: int) -> tuple[tuple[int, int], ...]:
    """Places of the data that each device's part of the result needs: the first, behind the last.

    They may lie before the data or behind them.

    Args:
      ways: devices that the result is divided among, in order.
    """
    made = -(-window.out // ways)

    def first(device: int) -> int:  # that the first window begins at
        return -(-(device * made * window.stride - window.low) // window.spread)

    def end(device: int) -> int:  # behind the last one of the last window
        last = ((device + 1) * made - 1) * window.stride - window.low
        return (last + (window.kernel - 1) * window.step) // window.spread + 1

    return tuple((first(device), end(device)) for device in range(ways))


def reach(window: Window, ways: int) -> Reach:
    """Of data and results that are divided alike.

    Args:
      ways: among so many devices.
    """
    part, made = -(-window.data // ways), -(-window.out // ways)
    needed = places(window, ways)
    before, behind = _needed(lambda i: needed[i][0], lambda i: needed[i][1], part, ways)
    whole = Window(
        data=before + part + behind,
        kernel=window.kernel,
        out=made,
        stride=window.stride,
        low=window.low - before * window.spread,
        spread=window.spread,
        step=window.step,
    )
    return Reach(part, before, behind, taps(whole))


def reach_contracted(window: Window, ways: int) -> Reach:
    """Of data and of what they are convolved with, divided alike; results are summed over devices.

    The data are not spread: those of a kernel's gradient are not.
    """
    part, kernel = -(-window.data // ways), -(-window.kernel // ways)

    def first(device: int) -> int:
        return device * kernel * window.step - window.low

    def end(device: int) -> int:
        last = ((device + 1) * kernel - 1) * window.step - window.low
        return last + (window.out - 1) * window.stride + 1

    return Reach(part, *_needed(first, end, part, ways), kernel * window.out)


def _needed(
    first: Callable[[int], int], end: Callable[[int], int], part: int, ways: int
) -> tuple[int, int]:
    """The most that any device needs of those in front of it and behind it."""
    before = max((device * part - first(device) for device in range(1, ways)), default=0)
    behind = max((end(device) - (device + 1) * part for device in range(ways - 1)), default=0)
    return max(before, 0), max(behind, 0)
