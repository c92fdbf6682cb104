"""Logical axes of a whole step, read from the partitioner's own factor mapping. No annotation.

Every operation of the sited module carries, from Shardy, which dimensions of its operands and
results go together. Tying them all, through loops and calls, gives the factors that the program
keeps together; a logical axis is such a class, or several that repeated layers make alike.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from autoshard.program.sites import Site

FactorList = tuple[tuple[str | None, int], ...]
"""One dimension: (logical axis or None if unknown, size) of each factor, major to minor."""

Dimensions = tuple[FactorList, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalAxis:
    """A set of array dimensions, or factors of them, that the program ties together.

    Attributes:
      name: the model's own name for it, "batch", or the path that shows it first, with its size.
      size: number of elements; where tied dimensions differ (S and S+1), the largest.
      sizes: all of them, ascending.
      is_batch: examples of the batch lie along it.
      is_data: the batch carries it and the state does not.
      is_loop: a loop runs over it one slice at a time; not sharded by default.
      is_contracted: some matrix product sums over it.
      is_selected: values that depend on the data choose along it: a lookup, a scatter, or a
        comparison with an iota (one-hot). Tokens choose experts so.
      where: `path[dimension]` for each input that holds it; else what makes it, and where.
      repeats: how many alike axes of repeated layers it stands for.
      label: a short name for people: the model's own, else its role in the data flow
        (`axis_labels`), else the end of the path. Files keep `name`.
    """

    name: str
    size: int
    sizes: tuple[int, ...]
    is_batch: bool = False
    is_data: bool = False
    is_loop: bool = False
    is_contracted: bool = False
    is_selected: bool = False
    where: tuple[str, ...] = ()
    repeats: int = 1
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The logical axes of a program and where each array holds them.

    Attributes:
      axes: all of them, in order of first appearance: batch, state, then the rest.
      inputs, outputs: factors of each dimension of each flat input and output.
      sites: the same for each site that survives lowering; sites left out are open.
      chains: (axis, ...) pairs of one matrix product's output axis that the next one contracts:
        sharding such an axis keeps both products local up to one all-reduce.
      meetings: (axis, axis) pairs of which some tensor holds the first along a dimension before
        one of the second; both may be the same axis.
      opaque: operations the partitioner has no rule for, which count as replicated; and custom
        calls in manual regions.
    """

    axes: tuple[LogicalAxis, ...]
    inputs: tuple[Dimensions, ...]
    outputs: tuple[Dimensions, ...]
    sites: dict[int, Dimensions]
    chains: tuple[str, ...]
    meetings: tuple[tuple[str, str], ...]
    opaque: tuple[str, ...]

    def axis(self, name: str) -> LogicalAxis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)


def owned(sites: Iterable[Site], dims: Mapping[int, Dimensions]) -> list[str]:
    """Axes along which each element of an activation meets a parameter of its own.

    Args:
      dims: of the sites, by index.
    """
    return list(
        dict.fromkeys(
            axis
            for site in sites
            if site.index in dims
            for d in site.owned
            for axis, _ in dims[site.index][d]
            if axis is not None
        )
    )
