"""Layouts partitioned in other processes come out as they do in this one."""

import dataclasses
import random
import re

import pytest

from autoshard.compat.shardy.partitioned_program import PartitionedProgram
from autoshard.errors import PartitionerRefused
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.propagate import in_workers as partitioning
from autoshard.rungs.propagate.partition import Partition, partitioned
from autoshard.space.specs import Specs
from tests.analysed import baseline, subject

PROGRAMS = ("scanned_gpt", "grouped_experts", "manual_region", "key_in_state", "conv_net", "loops")


@pytest.fixture(scope="module")
def partitioners():
    analyses = [subject(name).analysis for name in PROGRAMS]
    with partitioning.opened(analyses, 2, None, 120.0) as opened:
        yield opened


def told(judged: PartitionedProgram) -> dict[str, object]:
    """All that was read off, but where source ranges end: of one from column 0 that is lost."""
    found = dataclasses.asdict(judged)
    found["communication"] = [
        one._replace(location=re.sub(r" to (\d+)?:\d+", "", one.location))
        for one in judged.communication
    ]
    return found


def drawn(name: str, count: int) -> list[Specs]:
    """Layouts that the partitioner may be asked about."""
    space, rng, found = subject(name).space, random.Random(0), []
    while len(found) < count:
        candidate = space.sample(rng)
        assert candidate is not None
        specs = space.specs(candidate.layout)
        found += [specs] * bool(specs.mesh)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_process_says_what_this_one_says(partitioners, name):
    several = drawn(name, 4)
    answers = [partitioners.ask(PROGRAMS.index(name), specs) for specs in several]
    for specs, answer in zip(several, answers, strict=True):
        said = answer.result()
        assert isinstance(said, Partition), said
        # The order of collectives and their source locations too.
        assert told(said.judged) == told(partitioned(subject(name).analysis, specs))
        assert said.judged.shards and said.elapsed_s > 0


def test_what_cannot_be_read_is_unsupported(partitioners):
    unreadable = dataclasses.replace(drawn("scanned_gpt", 1)[0], mesh=(('"', 8),))
    with pytest.raises(PartitionerRefused, match="parse"):
        partitioned(subject("scanned_gpt").analysis, unreadable)
    said = partitioners.ask(0, unreadable).result()
    assert isinstance(said, Failure) and said.kind is Kind.UNSUPPORTED


def test_a_bug_in_a_worker_is_raised_here(partitioners):
    """It says nothing of the layout: a journal must not keep it."""
    asked = partitioning.annotations(subject("scanned_gpt").analysis, drawn("scanned_gpt", 1)[0])
    no_mesh = asked._replace(mesh=None)
    with pytest.raises(RuntimeError, match=r"rung 1 raised in a worker process:\n.*Traceback"):
        partitioning._partition(partitioners._settings, partitioners._base(0), no_mesh, 60.0)


def test_a_partitioner_that_dies_takes_one_answer_with_it():
    of = subject("scanned_gpt")
    specs = of.space.specs(baseline(of.space, "data parallel"))
    # Its shardings name axes that this mesh does not have: Shardy ends the process.
    deadly = dataclasses.replace(specs, mesh=(("elsewhere", 8),))
    with partitioning.opened([of.analysis], 1, None, 120.0) as one:
        answers = [one.ask(0, asked) for asked in (specs, deadly, specs)]
        first, dead, after = [answer.result() for answer in answers]
    assert isinstance(dead, Failure) and (dead.stage, dead.kind) == (Stage.PROPAGATE, Kind.CRASH)
    assert isinstance(first, Partition) and isinstance(after, Partition)
    assert dataclasses.asdict(first.judged) == dataclasses.asdict(after.judged)


def test_two_programs_of_one_worker_are_told_apart():
    gpt, conv = subject("scanned_gpt"), subject("conv_net")
    with partitioning.opened([gpt.analysis, conv.analysis], 1, None, 120.0) as one:
        for index, of in ((0, gpt), (1, conv), (0, gpt)):
            specs = of.space.specs(baseline(of.space, "data parallel"))
            said = one.ask(index, specs).result()
            assert isinstance(said, Partition)
            assert said.judged.shards == partitioned(of.analysis, specs).shards
