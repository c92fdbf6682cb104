"""How far one layout divides each value of a step, and what a device has of it then."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.compat.shardy.partitioned_program import PartitionedProgram
from autoshard.compat.shardy.reshards import Division
from autoshard.records.subaxes import ways
from autoshard.rungs.propagate.operations import Operations
from autoshard.space.specs import Specs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalShapes:
    """The values of a step under one layout; `n` values.

    Attributes:
      operations: the step's.
      judged: what the partitioner made of it; None where there is nothing to divide among.
      sizes: of the mesh axes.
      divided: (n,) in how many parts each value is; inf where the partitioner dropped it.
      bytes: (n,) bytes that a device has of each.
      work: parts of the arithmetic of what contracts, by the value that it makes.
    """

    operations: Operations
    judged: PartitionedProgram | None
    sizes: Mapping[str, int]
    divided: np.ndarray
    bytes: np.ndarray
    work: Mapping[int, float]
    _origins: "ValueOrigins"

    def dims(self, value: int) -> Division:
        """Mesh axes of each dimension of a value; () where the partitioner does not say."""
        if self.judged is None:
            return ()
        if value in self._origins.arguments:
            return self.judged.argument_dims[self._origins.arguments[value]]
        tag, k = self._origins.results.get(value, (-1, 0))
        results = self.judged.dims.get(tag, ())
        parent = self.operations.parents[value]
        if len(results) <= k and parent >= 0:
            return self.dims(parent)
        return results[k] if k < len(results) else ()

    def made_dims(self, tag: int) -> Division:
        """Mesh axes of each dimension of the first result of an operation, as `dims` has them."""
        (dims, *_) = (self.judged and self.judged.dims.get(tag)) or ((),)
        return dims

    def read_axes(self, tag: int, operand: int) -> frozenset[str]:
        """The mesh axes that divide an operand of a product or convolution as it is read."""
        read = self.judged.operands.get(tag, ()) if self.judged else ()
        return read[operand] if operand < len(read) else frozenset()

    def gathered_operands(self) -> Iterator[tuple[int, float]]:
        """(value, more bytes) for each product that reads more of an operand than was made.

        The value is the product's. The partitioner puts no collective there: a compiler gathers in
        between.
        """
        ops = self.operations
        for tag, operands in ops.contracting.items():
            read = self.judged.operands.get(tag, ()) if self.judged else ()
            for value, axes in zip(operands, read, strict=False):
                parts, divided = ways(axes, self.sizes), self.divided[value]
                if parts < divided < math.inf:
                    yield ops.tags[tag][0], ops.sizes[value] * (1 / parts - 1 / divided)


class ValueOrigins:
    """Where the values of a step come from: its arguments, and results of operations."""

    def __init__(self, operations: Operations):
        self._operations = operations
        self._bytes = np.array(operations.sizes)
        self._site_of = dict(operations.site_values)
        self.arguments = {value: i for i, value in enumerate(operations.arguments)}
        self.results = {
            first + k: (tag, k)
            for tag, (first, count) in operations.tags.items()
            for k in range(count)
        }

    def local_shapes(self, specs: Specs, judged: PartitionedProgram | None) -> LocalShapes:
        """The values under one layout, whose constraints are these."""
        ops, sizes = self._operations, dict(specs.mesh)
        divided = self._divided(specs, judged, sizes)
        return LocalShapes(
            operations=ops,
            judged=judged,
            sizes=sizes,
            divided=divided,
            bytes=self._bytes / divided,
            work={
                ops.tags[tag][0]: ways(axes, sizes)
                for tag, axes in (judged.contracted.items() if judged else ())
                if tag in ops.tags
            },
            _origins=self,
        )

    def _divided(
        self, specs: Specs, judged: PartitionedProgram | None, sizes: Mapping[str, int]
    ) -> np.ndarray:
        ops = self._operations
        if judged is None:
            return np.ones(len(ops.sizes))
        divided = np.full(len(ops.sizes), np.inf)
        for value, axes in zip(ops.arguments, judged.argument_axes, strict=True):
            divided[value] = ways(axes, sizes)
        for numbers, said in ((ops.tags, judged.shards), (ops.entries, judged.entries)):
            for tag, shards in said.items():
                first, count = numbers.get(tag, (0, 0))
                divided[first : first + count] = _ways_of(shards[:count], sizes)
        for value, parent in enumerate(ops.parents):
            if parent < 0:
                continue
            placed = specs.sites.get(self._site_of.get(value, -1))
            if placed is not None and not any(placed.open):
                divided[value] = ways((m for dim in placed.spec for m in dim), sizes)
            elif value in self._site_of or divided[value] == np.inf:
                # The partitioner keeps no constraint, the user's own neither.
                divided[value] = divided[parent]
        return divided


def _ways_of(shards: Sequence[frozenset[str]], sizes: Mapping[str, int]) -> list[int]:
    return [ways(axes, sizes) for axes in shards]
