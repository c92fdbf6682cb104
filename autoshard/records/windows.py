"""Windows: which places of its operand a convolution, a pool, a slice or a pad reads.

The names of dilations and padding are StableHLO's.
"""

import dataclasses
import functools
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One dimension of a window.

    Attributes:
      data, kernel, out: extents of the operand, of the window, and of the result.
      stride: places of the dilated operand from one result to the next.
      pad_low: padding in front of the operand; negative where a slice begins later.
      lhs_dilation: of the operand.
      rhs_dilation: of the window.
    """

    data: int
    kernel: int
    out: int
    stride: int = 1
    pad_low: int = 0
    lhs_dilation: int = 1
    rhs_dilation: int = 1

    @property
    def moves(self) -> bool:
        """Whether a place of the result is anything but the same place of the operand."""
        return self != Window(data=self.data, kernel=1, out=self.data)

    def transposed(self) -> "Window":
        """The same pairs of places with window and result in each other's role."""
        return dataclasses.replace(
            self,
            kernel=self.out,
            out=self.kernel,
            stride=self.rhs_dilation,
            rhs_dilation=self.stride,
        )


class Windowed(NamedTuple):
    """A dimension that windows go over.

    Attributes:
      window: what is read along it.
      operand, kernel, result: which dimension it is of each; kernel is -1 where there is none.
    """

    window: Window
    operand: int
    kernel: int
    result: int


@functools.lru_cache(maxsize=1024)
def taps(window: Window) -> int:
    """Pairs of (output position, kernel position) on one dimension that fall on data.

    >>> taps(Window(data=4, kernel=3, out=4, pad_low=1))
    10
    """
    extent = (window.data - 1) * window.lhs_dilation + 1 if window.data else 0
    common = math.gcd(window.stride, window.lhs_dilation)
    period = window.lhs_dilation // common
    total = 0
    for k in range(window.kernel):
        offset = k * window.rhs_dilation - window.pad_low
        if offset % common:
            continue
        # Output positions o with 0 <= o * stride + offset < extent that hit a multiple of the
        # operand's dilation.
        first = max(0, -(offset // window.stride))
        last = min(window.out - 1, (extent - 1 - offset) // window.stride)
        wanted = -(offset // common) * pow(window.stride // common, -1, period) % period
        first += (wanted - first) % period
        if first <= last:
            total += (last - first) // period + 1
    return total


@functools.lru_cache(maxsize=4096)
def reach(window: Window, ways: int) -> tuple[int, int]:
    """Places that a device needs at most in front of its own part of the operand, and behind it.

    Args:
      ways: devices that operand and result are divided among, in order.

    >>> reach(Window(data=8, kernel=3, out=8, pad_low=1), 4)
    (1, 1)
    >>> reach(Window(data=8, kernel=1, out=7, pad_low=-1), 4)  # x[1:]
    (0, 1)
    """
    part, made = -(-window.data // ways), -(-window.out // ways)
    before = behind = 0
    for device in range(ways):
        first_result, last_result = device * made, min((device + 1) * made, window.out) - 1
        if last_result < first_result:
            continue
        first = -(-(first_result * window.stride - window.pad_low) // window.lhs_dilation)
        last = last_result * window.stride - window.pad_low
        last = (last + (window.kernel - 1) * window.rhs_dilation) // window.lhs_dilation
        first, last = max(first, 0), min(last, window.data - 1)
        if first <= last:
            before = max(before, device * part - first)
            behind = max(behind, last + 1 - (device + 1) * part)
    return before, behind
