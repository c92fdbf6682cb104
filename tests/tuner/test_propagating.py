"""Rung 1 of a search: strategies share the budget, and a user's own may ask for anything."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import autoshard
from autoshard.errors import WorkerError
from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate, Kind, Stage
from autoshard.rungs.propagate import in_workers as partitioning
from autoshard.tuner import propagating
from autoshard.tuner.strategy import Beam, RandomSearch, beam
from autoshard.tuner.strategy.one_axis import one_axis_layouts
from tests.workloads import mlp

BUDGET = autoshard.Budget(candidates=20, compiles=1, profiles=0)


class Asking:
    """A strategy that asks for a list of layouts, the same each time."""

    def __init__(self, *layouts, knobs=()):
        self.candidates = tuple(Candidate(layout=x, knobs=knobs) for x in layouts)
        self.asked = 0

    def ask(self, space, seed, history):
        self.asked += 1
        return self.candidates


def trials_of(plan):
    return [t for t in plan.evidence.trials if not t.baseline]


def test_a_users_strategy_chooses_the_candidates(quick):
    data = Layout(mesh=(("x", 4), ("y", 2)), activation_rules=(("batch", ("y",)),))
    strategy = Asking(data, data)
    plan = quick(strategy=strategy, budget=BUDGET)
    (trial,) = trials_of(plan)
    assert trial.candidate.layout == data and isinstance(trial.propagated, Estimate)
    assert strategy.asked == 2, "asked until it has nothing new"


def test_what_is_no_member_of_the_space_is_one_failed_trial(quick):
    foreign = [
        Layout(mesh=(("x", 4),), activation_rules=(("batch", ("x",)),)),
        Layout(mesh=(("x", 8),), activation_rules=(("nonsense", ("x",)),)),
        Layout(mesh=(("x", 8),), as_annotated=True),
    ]
    plan = quick(strategy=Asking(*foreign), budget=BUDGET)
    trials = trials_of(plan)
    assert [t.candidate.layout for t in trials] == foreign
    assert all(t.propagated.kind is Kind.INFEASIBLE for t in trials)
    assert "4 devices, the target 8" in trials[0].propagated.message
    assert "no logical axis 'nonsense'" in trials[1].propagated.message
    other = Asking(Layout(mesh=(("x", 8),)), knobs=(("rate", 3),))
    (trial,) = trials_of(quick(strategy=other, budget=BUDGET))
    assert "knobs are {'rate': 3}" in trial.propagated.message


def test_what_one_space_does_not_hold_another_may(quick, tmp_path):
    asked = Asking(Layout(mesh=(("x", 4), ("y", 2)), activation_rules=(("batch", ("y",)),)))
    both = {"journal": tmp_path / "journal", "budget": BUDGET, "strategy": asked}
    flat = Mesh(np.array(jax.devices()[:8]), ("x",))
    (refused,) = trials_of(quick(mesh=flat, mesh_shape="fixed", **both))
    assert "the mesh is fixed to" in refused.propagated.message
    (judged,) = trials_of(quick(**both))
    assert isinstance(judged.propagated, Estimate)


def test_knob_values_share_the_budget_evenly(quick):
    budget = dataclasses.replace(BUDGET, candidates=60)
    plan = quick(
        lambda rate: mlp(rate),
        knobs={"rate": (0.1, 0.2)},
        strategy=RandomSearch(batch=1),
        budget=budget,
    )
    count = Counter(t.candidate.knobs for t in plan.evidence.trials)
    assert sum(count.values()) == 60 and max(count.values()) - min(count.values()) <= 1


def test_a_users_strategy_keeps_what_it_derives_from_each_space(quick, monkeypatch):
    """Knob settings take turns: one strategy for all would derive everything at each turn."""
    derived = []

    def counted(space):
        derived.append(space)
        return one_axis_layouts(space)

    monkeypatch.setattr(beam, "one_axis_layouts", counted)
    quick(
        strategy=Beam(10**9, batch=4),
        knobs={"rate": (0.1, 0.2)},
        budget=dataclasses.replace(BUDGET, candidates=60),
    )
    assert len(derived) == 2 == len({id(space) for space in derived})


def test_a_strategy_that_cannot_be_copied_is_shared_and_that_is_noted(quick):
    strategy = Asking()
    strategy.lock = threading.Lock()  # type: ignore[attr-defined]
    budget = dataclasses.replace(BUDGET, candidates=60)
    plan = quick(strategy=strategy, knobs={"rate": (0.1, 0.2)}, budget=budget)
    assert strategy.asked == 2
    (note,) = (n for n in plan.evidence.notes if "share the strategy" in n)
    assert "cannot be copied: cannot pickle" in note


def test_the_baselines_come_first_and_more_are_told_of_as_they_come(quick):
    told = []
    plan = quick(budget=BUDGET, callbacks=(told.append,))
    names = [bool(t.baseline) for t in plan.evidence.trials]
    assert names == sorted(names, reverse=True)
    told = [e for e in told if e.stage is Stage.PROPAGATE]
    assert told[0].text == "judging the baselines" and told[0].total == 20
    assert [e.done for e in told if e.text == "propagating layouts"] == [10, 20]


def test_the_baselines_are_being_compiled_while_rung_1_goes_on(calibration):
    begun = []

    class Watching(concurrent.futures.ThreadPoolExecutor):
        def submit(self, function, *args, **kwargs):
            begun.append(function)
            return super().submit(function, *args, **kwargs)

    class Noting(RandomSearch):
        def ask(self, space, seed, history):
            seen.append(len(begun))
            return super().ask(space, seed, history)

    seen = []
    with Watching(1) as executor:
        plan = autoshard.search(
            mlp,
            jax.devices(),
            budget=dataclasses.replace(BUDGET, compiles=4),
            calibration=calibration,
            executor=executor,
            strategy=Noting(batch=4),
        )
    assert seen[0] == 2, "half of the compilations were begun before the strategy was asked"
    compiled = [t for t in plan.evidence.trials if t.compiled is not None]
    assert len(compiled) == 4 and all(isinstance(t.compiled, Estimate) for t in compiled)


@pytest.fixture
def asked(monkeypatch):
    """How many layouts other processes were asked about."""
    count = []
    ask = partitioning.Partitioners.ask

    def counted(self, index, specs):
        count.append(specs)
        return ask(self, index, specs)

    monkeypatch.setattr(partitioning.Partitioners, "ask", counted)
    return count


def judged_by(plan):
    """Every trial but for the seconds that judging it took."""
    return [
        (t.candidate, t.baseline, dataclasses.replace(t.propagated, elapsed_s=0.0))
        for t in plan.evidence.trials
    ]


def test_other_processes_change_no_answer(quick, monkeypatch, asked):
    budget = dataclasses.replace(BUDGET, candidates=60)
    alone = quick(budget=budget)
    assert not asked, "a small program is not worth another process"
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)
    monkeypatch.setattr(propagating, "cores", lambda: 1)
    assert judged_by(quick(budget=budget)) == judged_by(alone) and not asked
    monkeypatch.setattr(propagating, "cores", lambda: 2)
    plan = quick(budget=budget)
    assert len(plan.evidence.trials) == 60
    assert judged_by(plan) == judged_by(alone)
    assert 20 < len(asked) < 60, "all but baselines, and each program once"


def test_of_what_a_users_strategy_asks_only_members_are_partitioned(quick, monkeypatch, asked):
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)
    foreign = Layout(mesh=(("x", 4),), activation_rules=(("batch", ("x",)),))
    data = Layout(mesh=(("x", 4), ("y", 2)), activation_rules=(("batch", ("y",)),))
    plan = quick(strategy=Asking(foreign, data), budget=BUDGET)
    refused, judged = trials_of(plan)
    assert refused.propagated.kind is Kind.INFEASIBLE
    assert isinstance(judged.propagated, Estimate) and len(asked) == 1


def test_what_the_journal_holds_is_not_partitioned_again(quick, monkeypatch, asked, tmp_path):
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)
    kept = {"journal": tmp_path / "journal", "budget": BUDGET}
    first = quick(**kept)
    count = len(asked)
    assert count and judged_by(quick(**kept)) == judged_by(first)
    assert len(asked) == count


def test_without_another_process_this_one_goes_on(quick, monkeypatch):
    alone = quick(budget=BUDGET)
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)

    def none(settings):
        raise WorkerError("no room for a process")

    monkeypatch.setattr(partitioning, "worker_here", none)
    plan = quick(budget=BUDGET)
    assert judged_by(plan) == judged_by(alone)
    (note,) = [n for n in plan.evidence.notes if "process" in n]
    assert note == "rung 1 had to do with one process: no room for a process"


def test_a_layout_that_kills_the_partitioner_is_one_failed_trial(quick, monkeypatch):
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)
    ask = partitioning.Partitioners.ask
    deadly = []

    def once(self, index, specs):
        if deadly:
            return ask(self, index, specs)
        deadly.append(specs)
        # Shardings name axes that this mesh does not have: Shardy ends the process.
        return ask(self, index, dataclasses.replace(specs, mesh=(("elsewhere", 8),)))

    monkeypatch.setattr(partitioning.Partitioners, "ask", once)
    plan = quick(budget=BUDGET)
    failed = [t.propagated for t in trials_of(plan) if not isinstance(t.propagated, Estimate)]
    assert [(f.stage, f.kind) for f in failed] == [(Stage.PROPAGATE, Kind.CRASH)]
    assert len(plan.evidence.trials) == 20


def test_an_interrupt_ends_the_processes_and_keeps_what_is_judged(quick, monkeypatch, asked):
    monkeypatch.setattr(propagating, "_WORTH_S", 0.0)
    ended = []
    worker_threads = partitioning.worker_threads

    @contextlib.contextmanager
    def noting(count, name):
        with worker_threads(count, name) as pool:
            try:
                yield pool
            finally:
                ended.extend(t for t in threading.enumerate() if t.name.startswith(name))

    def interrupt(event):
        if event.text == "propagating layouts" and event.done == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(partitioning, "worker_threads", noting)
    plan = quick(budget=dataclasses.replace(BUDGET, candidates=60), callbacks=(interrupt,))
    assert plan.evidence.ended == "interrupted" and len(plan.evidence.trials) == 20
    assert asked and ended
    for thread in ended:
        thread.join(10.0)
        assert not thread.is_alive()
