"""Convolutions: which taps fall on data, and which of them XLA:CPU does how.

It hands most to a library (YNNPACK). Of the others Eigen multiplies patches: for each place of the
result what the kernel covers there is copied first (`extract_image_patches`); where data are spread
alone it multiplies first and adds what falls on one place then.

XLA turns a convolution around where the kernel covers more places than the data have: the data are
taken for the kernel, and read backwards (`AlgebraicSimplifierVisitor::SwapConvOperands`). XLA:CPU
has no library for what is read backwards (`PotentiallyImplementedAsEigenConvolution`) and writes
loops over it, an element at a time. So seen with jax 0.10.2 and 0.12.0.1.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

FEW_FEATURES = 16
"""XLA:CPU's library takes no convolution that neither reads nor makes more, on one device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One dimension of a convolution's window.

    Attributes:
      data, kernel, out: extents of what is convolved, with what, and of the result.
      stride: places of the data from one result to the next.
      low: padding in front of the data.
      spread: dilation of the data.
      step: dilation of the kernel.
    """

    data: int
    kernel: int
    out: int
    stride: int = 1
    low: int = 0
    spread: int = 1
    step: int = 1


@functools.lru_cache(maxsize=1024)
def taps(window: Window) -> int:
    """Pairs of (output position, kernel position) on one dimension that fall on data."""
    extent = (window.data - 1) * window.spread + 1 if window.data else 0
    common = math.gcd(window.stride, window.spread)
    period = window.spread // common
    total = 0
    for k in range(window.kernel):
        offset = k * window.step - window.low
        if offset % common:
            continue
        # Output positions o with 0 <= o * stride + offset < extent that hit a multiple of spread.
        first = max(0, -(offset // window.stride))
        last = min(window.out - 1, (extent - 1 - offset) // window.stride)
        wanted = -(offset // common) * pow(window.stride // common, -1, period) % period
        first += (wanted - first) % period
        if first <= last:
            total += (last - first) // period + 1
    return total


def is_turned_around(windows: Sequence[Window], groups: int) -> bool:
    """Whether XLA takes the data for the kernel and the kernel for the data.

    Args:
      groups: of features, or of the batch; 1 for none.
    """
    kernel = math.prod(window.kernel for window in windows)
    data = math.prod(w.kernel if _meets_one_place(w) else w.data for w in windows)
    return groups == 1 and kernel > data


def fits_library(windows: Sequence[Window], groups: int) -> bool:
    """Whether XLA:CPU's library takes a convolution, if it has features enough.

    Source: `IsConvolutionOpSupportedByYnn` (xla/backends/cpu/ynn_support.cc, 2026).

    Args:
      windows: one for each dimension of space.
      groups: of the batch; 1 for none.
    """
    return (
        len(windows) == 2
        and groups == 1
        and all(w.spread == 1 and max(w.kernel, w.out) <= w.data for w in windows)
    )


def patch_elements(
    windows: Sequence[Window], batch: int, features: int, feature_groups: int
) -> int:
    """Elements of all patches that Eigen copies; 0 where it goes another way.

    Source: `CanUseCustomTransposedConv` (xla/backends/cpu/runtime, 2026).

    Args:
      features: that it reads, of all groups.
    """
    spread_alone = any(w.spread > 1 for w in windows) and all(
        w.stride == w.step == 1 for w in windows
    )
    if spread_alone and feature_groups == 1:
        return 0
    return batch * features * math.prod(window.out * window.kernel for window in windows)


def _meets_one_place(window: Window) -> bool:
    """Whether a kernel is laid over a single place of data in all ways: XLA leaves that alone."""
    over_all = window.low == window.kernel - 1 and window.out == window.kernel
    return window.data == 1 and window.stride == window.step == 1 and over_all
