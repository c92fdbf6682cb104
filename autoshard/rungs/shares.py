"""How far one layout divides each value of a step, and what a device has of it then."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.compat.judged import Judged
from autoshard.compat.reshards import Division
from autoshard.kernels import KernelTable
from autoshard.specs import Specs
from autoshard.subaxes import ways


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The values of a step under one layout.

    Attributes:
      kernels: the step's.
      judged: what the partitioner made of it; None where there is nothing to divide among.
      sizes: of the mesh axes.
      divided: (v,) in how many parts each value is; inf where the partitioner dropped it.
      local: (v,) bytes that a device has of each.
      contracted: parts of the arithmetic of what contracts, by the value that it makes.
    """

    kernels: KernelTable
    judged: Judged | None
    sizes: Mapping[str, int]
    divided: np.ndarray
    local: np.ndarray
    contracted: Mapping[int, float]
    _origins: "Origins"

    def dims(self, value: int) -> Division:
        """Mesh axes of each dimension of a value; none where the partitioner does not say."""
        judged = self.judged
        if judged is None:
            return ()
        if value in self._origins.arguments:
            return judged.argument_dims[self._origins.arguments[value]]
        tag, k = self._origins.results.get(value, (-1, 0))
        results = judged.dims.get(tag, ())
        parent = int(self.kernels.parents[value])
        if len(results) <= k and parent >= 0:
            return self.dims(parent)
        return results[k] if k < len(results) else ()

    def extents(self, value: int, whole: Sequence[int]) -> list[int]:
        """What a device has of a value's dimensions, which are so long in all."""
        return self._part(whole, self.dims(value))

    def made(self, tag: int, whole: Sequence[int]) -> list[int]:
        """What a device has of the dimensions of the first result of an operation."""
        return self._part(whole, self.made_dims(tag))

    def made_dims(self, tag: int) -> Division:
        """Mesh axes of each dimension of the first result of an operation, as `dims` has them."""
        (dims, *_) = (self.judged and self.judged.dims.get(tag)) or ((),)
        return dims

    def _part(self, whole: Sequence[int], dims: Division) -> list[int]:
        if not any(dims):
            return list(whole)
        return [math.ceil(n / ways(axes, self.sizes)) for n, axes in zip(whole, dims, strict=True)]

    def read_in(self, tag: int) -> int:
        """In how many parts an operation reads its first operand; 1 where nothing divides it."""
        axes = self.judged.operands.get(tag, ()) if self.judged else ()
        return ways(axes[0], self.sizes) if axes else 1

    def parts_made(self) -> Iterator[tuple[int, list[int]]]:
        """Values made by operations that mesh axes divide, with the parts of each dimension."""
        for tag, results in self.judged.dims.items() if self.judged else ():
            first, count = self.kernels.tags.get(tag, (0, 0))
            for value, dims in enumerate(results[:count], first):
                if any(dims):
                    yield value, [ways(axes, self.sizes) for axes in dims]

    def gathered_operands(self) -> Iterator[tuple[int, int, float]]:
        """Tag and operand of what reads more of it than was made, and how many bytes more.

        The partitioner puts no collective there: a compiler gathers in between.
        """
        operands_of = self.judged.operands if self.judged else {}
        for tag, operands in self.kernels.operands.items():
            for value, axes in zip(operands, operands_of.get(tag, ()), strict=False):
                read, divided = ways(axes, self.sizes), self.divided[value]
                if read < divided < math.inf:
                    yield tag, value, self.kernels.value_bytes[value] * (1 / read - 1 / divided)


class Origins:
    """Where the values of a step come from: its arguments, and results of operations."""

    def __init__(self, kernels: KernelTable):
        self._kernels = kernels
        self._site_of = dict(kernels.site_values)
        self.arguments = {value: i for i, value in enumerate(kernels.argument_values)}
        self.results = {
            first + k: (tag, k)
            for tag, (first, count) in kernels.tags.items()
            for k in range(count)
        }

    def shares(self, specs: Specs, judged: Judged | None) -> Shares:
        """The values under one layout, whose constraints are these."""
        sizes = dict(specs.mesh)
        divided = self._divided(specs, judged, sizes)
        return Shares(
            kernels=self._kernels,
            judged=judged,
            sizes=sizes,
            divided=divided,
            local=self._kernels.value_bytes / divided,
            contracted={
                self._kernels.tags[tag][0]: ways(axes, sizes)
                for tag, axes in (judged.contracted.items() if judged else ())
                if tag in self._kernels.tags
            },
            _origins=self,
        )

    def _divided(self, specs: Specs, judged: Judged | None, sizes: dict[str, int]) -> np.ndarray:
        kernels = self._kernels
        if judged is None:
            return np.ones(len(kernels.value_bytes))
        divided = np.full(len(kernels.value_bytes), np.inf)
        for value, axes in zip(kernels.argument_values, judged.argument_axes, strict=True):
            divided[value] = ways(axes, sizes)
        for numbers, said in ((kernels.tags, judged.shards), (kernels.entries, judged.entries)):
            for tag, shards in said.items():
                first, count = numbers.get(tag, (0, 0))
                for k in range(count):
                    divided[first + k] = ways(shards[k], sizes)
        for value in np.flatnonzero(kernels.parents >= 0).tolist():
            placed = specs.sites.get(self._site_of.get(value, -1))
            if placed is not None and not any(placed.open):
                divided[value] = ways((m for dim in placed.spec for m in dim), sizes)
            elif value in self._site_of or divided[value] == np.inf:
                # The partitioner keeps no constraint, the user's own neither.
                divided[value] = divided[kernels.parents[value]]
        return divided
