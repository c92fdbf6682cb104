"""What the kernels of a step do on one device, under one layout."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.convolutions import FEW_FEATURES
from autoshard.cost import Constants, CostModel
from autoshard.degenerate import elements
from autoshard.kernels import KernelTable
from autoshard.rows import MANY
from autoshard.rungs.halos import Reaching
from autoshard.rungs.shares import Shares
from autoshard.vectorization import PART_BYTES, is_vectorized


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
    transposed: np.ndarray
    collided: np.ndarray
    degenerate: np.ndarray
    degenerate_across: np.ndarray
    rows: np.ndarray
    patches: np.ndarray
    vectorized: np.ndarray | bool

    def seconds(self, cost: CostModel, peak: float) -> float:
        """Of all kernels of a step.

        Args:
          peak: bytes of a device in the step.
        """
        return cost.kernels_s(
            self.flops,
            self.traffic,
            self.trips,
            self.kernels.kernel_dtypes,
            transposed=self.transposed,
            collided=self.collided,
            degenerate=self.degenerate,
            degenerate_across=self.degenerate_across,
            rows=self.rows,
            patches=self.patches,
            turned=self.kernels.kernel_turned,
            touched=_touched(self.kernels, self.traffic, self.trips, peak),
            vectorized=self.vectorized,
        )


def kernel_shares(shares: Shares, halos: Sequence[Reaching], constants: Constants) -> KernelShares:
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
    moves = _transposes_made(shares)
    transposed, collided = _across_lines(shares, moves)
    along, across = _degenerate(shares).T
    rows, patches = _rows_and_patches(shares, moves, constants)
    return KernelShares(
        kernels=kernels,
        flops=flops,
        traffic=traffic,
        trips=np.where(np.isfinite(ways_of_kernel), kernels.kernel_trips, 0.0),
        transposed=transposed,
        collided=collided,
        degenerate=along,
        degenerate_across=across,
        rows=rows,
        patches=patches,
        vectorized=_vectorized(shares, flops, traffic, constants),
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


def _transposes_made(shares: Shares) -> list[bool]:
    """(t,) whether a transpose is made; else the product before it is turned around."""
    divided = shares.divided
    summed = {value for value, parts in shares.contracted.items() if parts > divided[value]}
    return [product < 0 or product in summed for product in shares.kernels.transposed_product]


def _across_lines(shares: Shares, moves: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """(k,) elements that are read across cache lines, and those whose lines collide.

    Args:
      moves: (t,) whether a transpose is made.
    """
    kernels = shares.kernels
    crossing = (kernels.value_elements / shares.divided)[kernels.transposed_value] * moves
    crossing = crossing * kernels.transposed_arrays
    lines = [
        turn.lines(shares.extents(value, extents), arrays)
        for value, extents, turn, arrays in zip(
            kernels.transposed_value.tolist(),
            kernels.transposed_extents,
            kernels.transposed_turns,
            kernels.transposed_arrays.tolist(),
            strict=True,
        )
    ]
    transposed, collided = (
        np.bincount(kernels.transposed_kernel, weights=weights, minlength=len(kernels.kernel_value))
        for weights in crossing * np.array(lines).reshape(-1, 2).T
    )
    return transposed, collided


def _degenerate(shares: Shares) -> np.ndarray:
    """(k, 2) `degenerate.Elements` of each kernel."""
    kernels = shares.kernels
    found = np.zeros((len(kernels.kernel_value), 2))
    for one in kernels.summed_products:
        found[one.kernel] += elements(shares.made(one.tag, one.extents), one.dimension)
    return found


def _rows_and_patches(
    shares: Shares, moves: Sequence[bool], constants: Constants
) -> tuple[np.ndarray, np.ndarray]:
    """(k,) rows of the result of each product that has few (else `MANY`), and elements of patches
    that are copied for a convolution.

    Args:
      moves: (t,) whether a transpose is made; else the product before it is turned around.
    """
    kernels = shares.kernels
    count = len(kernels.kernel_value)
    rows, patches = np.full(count, MANY), np.zeros(count)
    if constants.least_rows > 1.0:
        turned = {
            product
            for product, made in zip(kernels.transposed_product.tolist(), moves, strict=True)
            if product >= 0 and not made
        }
        few = constants.least_rows * math.prod(shares.sizes.values())
        for one in kernels.rowed_products:
            around = int(kernels.kernel_value[one.kernel]) in turned
            dimensions = one.columns if around else one.dimensions
            if math.prod(one.extents[d] for d in dimensions) < few:
                here = shares.made(one.tag, one.extents)
                rows[one.kernel] = max(math.prod(here[d] for d in dimensions), 1)
    for kernel in kernels.convolutions if constants.shared else ():
        said = kernel.said
        if said.turned:
            continue
        made = shares.made(kernel.tag, kernel.extents)
        data = shares.extents(kernel.data, kernel.data_extents)
        if said.fits and max(data[said.read], made[said.made]) > FEW_FEATURES:
            rows[kernel.kernel] = max(made[said.row], 1)
        else:
            patches[kernel.kernel] = said.patches / shares.read_in(kernel.tag)
    return rows, patches


def _vectorized(
    shares: Shares, flops: np.ndarray, traffic: np.ndarray, constants: Constants
) -> np.ndarray | bool:
    """Which kernels do not do their arithmetic element by element (`vectorization`)."""
    if not constants.unvectorized_flops_per_s:
        return True
    kernels = shares.kernels
    loops = np.flatnonzero(kernels.kernel_loops)
    of_value = dict(zip(kernels.kernel_value[loops].tolist(), loops.tolist(), strict=True))
    extents = kernels.kernel_extents.astype(float)
    for value, parts in shares.parts_made():
        if value in of_value:
            extents[of_value[value], : len(parts)] /= parts
    runs_in = np.clip(traffic // PART_BYTES, 1, constants.loop_parts)
    runs_in = np.where((runs_in == 2) & (flops > traffic), 3, runs_in)  # for arithmetic, some more
    return ~kernels.kernel_loops | is_vectorized(np.ceil(extents), runs_in)


def _touched(
    kernels: KernelTable, traffic: np.ndarray, trips: np.ndarray, peak: float
) -> np.ndarray:
    """(k,) bytes touched before a kernel's memory comes up again: of the step, or a loop's turn."""
    count = len(kernels.loops_around)
    inside = kernels.kernel_turns >= 0
    of = kernels.kernel_turns[inside]
    in_step = np.bincount(of, weights=(traffic * trips)[inside], minlength=count)
    turns = np.array(kernels.loop_turns)
    for loop in range(count):  # inner ones come before those that they stand in
        if kernels.loops_around[loop] >= 0:
            in_step[kernels.loops_around[loop]] += in_step[loop]
    touched = np.full(len(traffic), peak)
    per_turn = in_step / np.maximum(turns, 1.0)
    for loop in reversed(range(count)):  # what runs once comes up again with what is around it
        around = kernels.loops_around[loop]
        if turns[loop] <= (turns[around] if around >= 0 else 1.0):
            per_turn[loop] = per_turn[around] if around >= 0 else peak
    touched[inside] = np.minimum(per_turn[of], peak)
    return touched
