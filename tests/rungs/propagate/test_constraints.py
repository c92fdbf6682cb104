"""Constraints that say nothing new are left out, and the partition stays what it was."""

import dataclasses
import types
import weakref
from collections import Counter

import pytest

from autoshard.errors import PartitionerRefused
from autoshard.records.layout import Constraints
from autoshard.rungs.propagate import constraints
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.rungs.propagate.operations import operations_of
from autoshard.rungs.propagate.partition import partitioned
from autoshard.space.baselines import baselines
from tests.analysed import baseline, subject

WORKLOADS = (
    "scanned_gpt",
    "gradient_accumulation",
    "conv_net",
    "mixture_of_experts",
    "grouped_experts",
    "adamw",
)


def footprint(of, specs):
    """What every operation and end is divided by; what is sent, by kind, bytes and trips."""
    judged = partitioned(of.analysis, specs)
    trips = operations_of(of.analysis).trips
    sent = Counter((c[0], c[1], c[2], c[3], trips.get(c[4], 1.0)) for c in judged.communication)
    return judged.shards, judged.contracted, judged.argument_dims, judged.result_dims, sent


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_baseline_is_partitioned_alike_with_fewer_constraints(name):
    of = subject(name)
    fewer = []
    for found in {b.name: b for b in baselines(of.space)}.values():
        specs = of.space.specs(found.candidate.layout)
        kept = minimal_constraints(of.analysis, specs)
        assert kept.sites.items() <= specs.sites.items()
        assert footprint(of, kept) == footprint(of, specs), found.name
        fewer.append(len(kept.sites) / len(specs.sites))
    assert sorted(fewer)[len(fewer) // 2] < 0.7


def with_constraints(of, layout, constraints):
    return of.space.specs(dataclasses.replace(layout, constraints=constraints))


@pytest.mark.parametrize("name", WORKLOADS)
def test_least_constraints_partition_alike_and_none_can_be_spared(name):
    of = subject(name)
    layout = baseline(of.space, "FSDP")
    specs = with_constraints(of, layout, Constraints.MINIMAL)
    kept = minimal_constraints(of.analysis, specs)
    whole = footprint(of, specs)
    assert footprint(of, kept) == whole
    assert len(kept.sites) < len(minimal_constraints(of.analysis, of.space.specs(layout)).sites)
    for spared in kept.sites:
        others = {i: s for i, s in kept.sites.items() if i != spared}
        assert footprint(of, dataclasses.replace(kept, sites=others)) != whole


def test_sparing_single_constraints_ends_early_in_long_programs(monkeypatch):
    of = subject("scanned_gpt")
    specs = with_constraints(of, baseline(of.space, "FSDP"), Constraints.MINIMAL)
    least = minimal_constraints(of.analysis, specs)
    asked = []

    def counted(analysis, specs, attributes):
        asked.append(specs)
        return partitioned(analysis, specs, attributes)

    monkeypatch.setattr(constraints, "partitioned", counted)
    monkeypatch.setattr(constraints, "_JUDGED_SITES", 0)
    monkeypatch.setattr(constraints, "_FOUND", weakref.WeakKeyDictionary())
    enough = minimal_constraints(of.analysis, specs)
    rounds = len(asked)
    assert len(enough.sites) > len(least.sites)
    monkeypatch.setattr(constraints, "_JUDGED_SITES", 3 * len(specs.sites))
    monkeypatch.setattr(constraints, "_FOUND", weakref.WeakKeyDictionary())
    asked.clear()
    fewer = minimal_constraints(of.analysis, specs)
    assert len(asked) == rounds + 3
    assert fewer.sites.items() <= enough.sites.items()
    assert footprint(of, fewer) == footprint(of, specs)


def test_what_is_refused_with_fewer_constraints_keeps_all(monkeypatch):
    of = subject("scanned_gpt")
    specs = with_constraints(of, baseline(of.space, "FSDP"), Constraints.MINIMAL)

    def refusing(analysis, asked, attributes):
        if len(asked.sites) < len(specs.sites):
            raise PartitionerRefused("no")
        return partitioned(analysis, asked, attributes)

    monkeypatch.setattr(constraints, "partitioned", refusing)
    monkeypatch.setattr(constraints, "_FOUND", weakref.WeakKeyDictionary())
    assert minimal_constraints(of.analysis, specs).sites == specs.sites


class ManyNeeded(constraints._Asked):
    """A partitioner of 3000 sites that needs every other one, and says where each is missing."""

    def __init__(self):
        sites = dict.fromkeys(range(3000))
        self._specs = types.SimpleNamespace(sites=sites)
        self._analysis = types.SimpleNamespace(site_of_tag={i: i for i in sites})

    def _differences(self, kept):
        return [i for i in range(0, 3000, 2) if i not in kept] or None


def test_long_programs_get_as_many_constraints_as_they_need():
    """Unrolled layers: 1500 have to stay, where ten rounds that double would add 1023."""
    assert ManyNeeded().enough(()) == set(range(0, 3000, 2))


def test_all_constraints_stay_where_a_layout_says_so():
    of = subject("scanned_gpt")
    specs = with_constraints(of, baseline(of.space, "FSDP"), Constraints.ALL)
    assert minimal_constraints(of.analysis, specs) is specs
    assert specs.key() != of.space.specs(baseline(of.space, "FSDP")).key()


def test_what_the_partitioner_must_be_told_stays():
    """Some constraint on an activation is needed for FSDP of this step; without it, another one."""
    of = subject("scanned_gpt")
    specs = of.space.specs(baseline(of.space, "FSDP"))
    kept = minimal_constraints(of.analysis, specs)
    sites = {s.index: s for s in of.analysis.sites.sites}
    storage = {i: s for i, s in kept.sites.items() if sites[i].storage}
    assert 0 < len(storage) < len(kept.sites)
    bare = dataclasses.replace(specs, sites=storage)
    assert footprint(of, bare) != footprint(of, specs)


def test_one_device_and_the_authors_own_constraints_are_left_alone():
    of = subject("with_constraints")
    written = next(b.candidate.layout for b in baselines(of.space) if b.name == "as annotated")
    specs = of.space.specs(written)
    assert minimal_constraints(of.analysis_for(written), specs) is specs
    alone = dataclasses.replace(specs, mesh=())
    assert minimal_constraints(of.analysis, alone) is alone
