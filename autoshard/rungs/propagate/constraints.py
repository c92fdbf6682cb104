"""Which constraints of a layout the partitioner is told; the partition is the same without others.

A constraint is an operation. Even where it says what the partitioner would do anyway, it stands in
the way of what the compiler does before partitioning (products are no longer turned around, chains
are cut), and the choice of fusions may be another: a step of the Llama-3-8B class took 9 % longer,
by libtpu's own estimate, with a constraint at each of its 335 sites than with those at 104.
"""

import bisect
import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable

from autoshard.compat.shardy import shardings
from autoshard.compat.shardy.partitioned_program import Communication, PartitionedProgram
from autoshard.errors import PartitionerRefused
from autoshard.program.analysis import Analysis
from autoshard.program.sites import Place
from autoshard.records.layout import Constraints
from autoshard.rungs.propagate.operations import operations_of
from autoshard.rungs.propagate.partition import partitioned
from autoshard.space.specs import Specs

_MORE_ROUNDS = 4
"""Rounds beyond those after which so many constraints were added as there are sites."""

_JUDGED_SITES = 40_000
"""Sites in all the partitions that may be asked for to spare single constraints: half a minute."""


_FOUND: weakref.WeakKeyDictionary[Analysis, dict[object, Specs]] = weakref.WeakKeyDictionary()


def minimal_constraints(analysis: Analysis, specs: Specs) -> Specs:
    """`specs` with the constraints that are needed, found once for each analysis."""
    found = _FOUND.setdefault(analysis, {})
    key = specs.key()
    if key not in found:
        found[key] = _minimal_constraints(analysis, specs)
    return found[key]


def _minimal_constraints(analysis: Analysis, specs: Specs) -> Specs:
    """The same partition with the constraints that `specs.constraints` speaks of.

    What is partitioned alike is asked of the partitioner: every operation divided over the same
    mesh axes, and the same communication as often. Where fewer constraints cannot be found to do,
    all stay.
    """
    if not specs.mesh or not specs.sites or specs.constraints is Constraints.ALL:
        return specs
    asked = _Asked(analysis, specs)
    usual = [
        s.index
        for s in analysis.sites.sites
        if s.index in specs.sites and (s.storage or s.place is Place.USE)
    ]
    if specs.constraints is Constraints.USUAL:
        found = asked.enough(usual)
        return specs if found is None else asked.only(found)
    found = asked.enough(())
    if found is None:
        found = asked.enough(usual)
    return asked.only(asked.fewest(specs.sites if found is None else found))


class _Asked:
    """The partitioner, asked whether some constraints of a layout do what all of them do."""

    def __init__(self, analysis: Analysis, specs: Specs):
        self._analysis = analysis
        self._specs = specs
        self._attributes = shardings.Attributes(analysis.module.context)
        self._whole = partitioned(analysis, specs, self._attributes)

    def only(self, kept: Iterable[int]) -> Specs:
        """Constraints at these sites alone."""
        sites = self._specs.sites
        return dataclasses.replace(self._specs, sites={i: sites[i] for i in sorted(kept)})

    def enough(self, start: Iterable[int]) -> set[int] | None:
        """Sites, those of `start` among them, that give the same partition; None if not found.

        While something comes out otherwise, the constraint next to the first difference in the
        order of the program is added, then those next to the first two, the first four, since what
        follows often follows from it.
        """
        site_of = self._analysis.site_of_tag
        kept = set(start)
        tags = [t for t, site in sorted(site_of.items()) if site in self._specs.sites]
        for k in range(len(tags).bit_length() + _MORE_ROUNDS):
            places = self._differences(kept)
            if places is None:
                return kept
            spare = [tag for tag in tags if site_of[tag] not in kept]
            if not spare:
                break
            near = (spare[min(bisect.bisect_left(spare, p), len(spare) - 1)] for p in places)
            back = list(dict.fromkeys(near))[: 2**k]
            kept |= {site_of[tag] for tag in back}
        return None

    def fewest(self, kept: Iterable[int]) -> set[int]:
        """Of sites that are enough, enough of which no single one can be spared.

        Halves are tried first; the last pass is repeated until it spares none. In a program of many
        sites it ends before that: asking takes as long as the program is.
        """
        left = sorted(kept)
        size = max(1, len(left) // 2)
        asked, most = 0, _JUDGED_SITES // len(self._specs.sites)
        while True:
            before, i = len(left), 0
            while i < len(left):
                if asked >= most:
                    return set(left)
                asked += 1
                fewer = left[:i] + left[i + size :]
                if self._differences(fewer) is None:
                    left = fewer
                else:
                    i += size
            if size == 1 and len(left) == before:
                return set(left)
            size = max(1, size // 2)

    def _differences(self, kept: Iterable[int]) -> list[int] | None:
        """Tags next to which the partition differs from that of all constraints; None if nowhere.

        A collective may stand next to another operation, if it is as large and runs as often.
        """
        trips = operations_of(self._analysis).trips
        one = self._whole
        try:
            other = partitioned(self._analysis, self.only(kept), self._attributes)
        except PartitionerRefused:  # with fewer constraints the partitioner gives up
            return []

        def alike(one: Communication) -> tuple[object, ...]:
            return one.kind, one.axes, one.before, one.after, trips.get(one.block, 1.0), one.sum

        def sent(judged: PartitionedProgram) -> Counter[tuple[object, ...]]:
            return Counter(alike(one) for one in judged.communication)

        here, there = sent(one), sent(other)
        changed = (here - there) + (there - here)
        same_ends = (
            one.argument_dims == other.argument_dims and one.result_dims == other.result_dims
        )
        places = [t for t in one.shards if one.shards[t] != other.shards.get(t)]
        places += [t for t in one.contracted if one.contracted[t] != other.contracted.get(t)]
        for judged in (one, other):
            places += [one.tag for one in judged.communication if alike(one) in changed]
        return None if not places and same_ends else sorted(places)
