"""Which constraints of a layout the partitioner needs to be told; the others are left out.

A constraint is an operation. Even where it says what the partitioner would do anyway, it stands in
the way of what the compiler does before partitioning (products are no longer turned around, chains
are cut), and the choice of fusions may be another: a step of the Llama-3-8B class took 9 % longer,
by libtpu's own estimate, with a constraint at each of its 335 sites than with those at 104.
"""

import bisect
import dataclasses
from collections import Counter

from autoshard.analysis import Analysis
from autoshard.compat import partitioner, shardings
from autoshard.partitioned import partitioned
from autoshard.sites import Place
from autoshard.specs import Specs

_ROUNDS = 10


def lean(analysis: Analysis, specs: Specs) -> Specs:
    """The same partition with fewer constraints, if there is one; else `specs`.

    What is partitioned alike is asked of the partitioner: every operation divided over the same
    mesh axes, and the same communication as often. It begins with the constraints of storage and of
    parameters where they are used. While something comes out otherwise, the constraint next to the
    first difference in the order of the program is put back, then those next to the first two, the
    first four, since what follows often follows from it.
    """
    if not specs.mesh or not specs.sites:
        return specs
    attributes = shardings.Attributes(analysis.module.context)
    trips = analysis.kernels.trips
    whole = partitioned(analysis, specs, attributes)
    kept = {
        s.index
        for s in analysis.sites.sites
        if s.index in specs.sites and (s.storage or s.place is Place.USE)
    }
    tags = [t for t, site in sorted(analysis.site_of_tag.items()) if site in specs.sites]
    for k in range(_ROUNDS):
        fewer = dataclasses.replace(
            specs, sites={i: s for i, s in specs.sites.items() if i in kept}
        )
        places = _differences(whole, partitioned(analysis, fewer, attributes), trips)
        if places is None:
            return fewer
        spare = [tag for tag in tags if analysis.site_of_tag[tag] not in kept]
        if not spare:
            break
        near = (spare[min(bisect.bisect_left(spare, p), len(spare) - 1)] for p in places)
        back = list(dict.fromkeys(near))[: 2**k]
        kept |= {analysis.site_of_tag[tag] for tag in back}
    return specs


def _differences(
    one: partitioner.Judged, other: partitioner.Judged, trips: dict[int, float]
) -> list[int] | None:
    """Tags next to which two partitions differ, in order; None where they are one program.

    A collective may stand next to another operation, if it is as large and runs as often.
    """

    def sent(judged: partitioner.Judged) -> Counter[tuple[object, ...]]:
        return Counter(
            (kind, axes, before, after, trips.get(block, 1.0), sliced)
            for kind, axes, before, after, block, _, sliced, _ in judged.communication
        )

    here, there = sent(one), sent(other)
    changed = (here - there) + (there - here)
    same_ends = one.argument_dims == other.argument_dims and one.result_dims == other.result_dims
    places = [t for t in one.shards if one.shards[t] != other.shards.get(t)]
    places += [t for t in one.contracted if one.contracted[t] != other.contracted.get(t)]
    for judged in (one, other):
        for kind, axes, before, after, block, tag, sliced, _ in judged.communication:
            if (kind, axes, before, after, trips.get(block, 1.0), sliced) in changed:
                places.append(tag)
    return None if not places and same_ends else sorted(places)
