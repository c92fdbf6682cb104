"""What the kernels of a step do on one device, under one layout."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.cost import CostModel
from autoshard.kernels import KernelTable
from autoshard.rungs.halos import Reaching
from autoshard.rungs.shares import Shares


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelShares:
    """Of each kernel, on one device: (k,) arrays, as `CostModel.kernels_s` has them.

    Attributes:
      traffic: bytes it reads and writes.
      trips: how often it runs in a step; 0 of what the partitioner dropped.
    """

    kernels: KernelTable
    flops: np.ndarray
    traffic: np.ndarray
    trips: np.ndarray

    def seconds(self, cost: CostModel) -> float:
        """Of all kernels of a step."""
        return cost.kernels_s(self.flops, self.traffic, self.trips, self.kernels.kernel_dtypes)


def kernel_shares(shares: Shares, halos: Sequence[Reaching]) -> KernelShares:
    """What one device does of every kernel.

    Args:
      halos: of the convolutions that need more than a device's own part.
    """
    kernels, contracted = shares.kernels, shares.contracted
    ways_of_kernel = shares.divided[kernels.kernel_value].copy()
    for k, value in enumerate(kernels.kernel_value):
        if value in contracted:
            ways_of_kernel[k] = contracted[value]
    flops = kernels.kernel_flops / ways_of_kernel
    for one, halo in halos:
        flops[one.kernel] *= halo.work
    traffic = _traffic(shares)
    return KernelShares(
        kernels=kernels,
        flops=flops,
        traffic=traffic,
        trips=np.where(np.isfinite(ways_of_kernel), kernels.kernel_trips, 0.0),
    )


def _traffic(shares: Shares) -> np.ndarray:
    """(k,) bytes; of what is gathered in between a product reads more than was made."""
    kernels, local = shares.kernels, shares.local
    traffic = local[kernels.kernel_value] * kernels.kernel_writes + np.bincount(
        kernels.read_kernel,
        weights=local[kernels.read_value] * kernels.read_scale,
        minlength=len(kernels.kernel_value),
    )
    gathered: dict[int, float] = {}
    for tag, _, extra in shares.gathered_operands():
        made = kernels.tags[tag][0]
        gathered[made] = gathered.get(made, 0.0) + extra
    for k, value in enumerate(kernels.kernel_value):
        traffic[k] += gathered.get(value, 0.0)
    return traffic
