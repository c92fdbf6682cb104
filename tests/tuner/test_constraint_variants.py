"""Where nothing is measured, the best is compiled again in other words; the faster wins."""

import dataclasses
import types

import pytest

import autoshard
from autoshard.records.layout import Constraints
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.tuner import loop as search
from autoshard.tuner import selection
from autoshard.tuner.selection import constraint_variants
from tests.tuner.test_selection import row
from tests.workloads import mlp

SIX = autoshard.Budget(candidates=24, compiles=6, profiles=0)


def wording_of(trial):
    return trial.candidate.layout.constraints


def test_the_best_is_asked_for_in_other_words_within_the_budget(quick, tmp_path):
    journal = tmp_path / "journal.jsonl"
    plan = quick(budget=SIX, journal=journal)
    trials = plan.evidence.trials
    compiled = [t for t in trials if t.was_compiled]
    assert len(compiled) == 6
    lean = [t for t in compiled if wording_of(t) is Constraints.USUAL]
    again = [t for t in compiled if wording_of(t) is not Constraints.USUAL]
    assert sorted(wording_of(t) for t in again) == [Constraints.ALL, Constraints.MINIMAL]
    best = min(lean[:4], key=lambda t: t.compiled.time_s)
    assert {t.candidate.with_constraints(Constraints.USUAL) for t in again} == {best.candidate}
    assert all(t.propagated == best.propagated for t in again)
    fastest = min(t.compiled.time_s for t in compiled)
    assert plan.trial.compiled.time_s <= fastest * 1.0001
    assert plan.evidence.candidates == len(trials) - len(again)
    resumed = quick(budget=SIX, journal=journal)
    assert [t.candidate for t in resumed.evidence.trials] == [t.candidate for t in trials]


def test_fewer_compilations_are_for_layouts(quick):
    plan = quick(budget=dataclasses.replace(SIX, compiles=5))
    assert {wording_of(t) for t in plan.evidence.trials} == {Constraints.USUAL}


@pytest.mark.slow
def test_what_is_measured_is_not_reworded(quick):
    plan = quick(budget=dataclasses.replace(SIX, profiles=3, rounds=2))
    assert {wording_of(t) for t in plan.evidence.trials} == {Constraints.USUAL}


@pytest.mark.slow
def test_what_other_words_do_not_need_goes_to_further_layouts(quick, monkeypatch):
    monkeypatch.setattr(search, "constraint_variants", lambda ledger, known: iter(()))
    plan = quick(budget=SIX)
    assert sum(t.was_compiled for t in plan.evidence.trials) == 6


@pytest.mark.parametrize("constraints", [Constraints.ALL, Constraints.MINIMAL])
def test_a_plan_in_other_words_is_saved_and_loaded(quick, monkeypatch, tmp_path, constraints):
    monkeypatch.setattr(search, "_WORTH", -0.9)  # other words win
    names = types.SimpleNamespace(ALL=constraints, MINIMAL=constraints, USUAL=Constraints.USUAL)
    monkeypatch.setattr(selection, "Constraints", names)
    plan = quick(budget=SIX)
    assert plan.layout.constraints is constraints
    plan.save(str(tmp_path / "plan.json"))
    loaded = autoshard.load_plan(str(tmp_path / "plan.json"), mlp, plan.mesh)
    assert loaded.layout == plan.layout
    assert loaded.lower().digest == plan.lower().digest


class Rows:
    """What `constraint_variants` reads of a state: trials that fit, and their programs."""

    def __init__(self, rows, programs, late=(False, False, False), times_s=(1.0,)):
        self.trials = list(rows)
        self._times_s = times_s
        self._programs = programs
        self._late = iter(late)
        self.lowered = []

    def fitting(self, indices):
        return list(range(len(self._times_s)))

    def estimated_s(self, index):
        return self._times_s[index]

    def specs_of(self, row):
        return types.SimpleNamespace(sites={0: ()})

    def stops(self, work, share):
        return next(self._late)

    def module_of(self, row):
        self.lowered.append(row.candidate.layout.constraints)
        return self._programs[row.candidate.layout.constraints]


FAILED = Failure(stage=Stage.COMPILE, kind=Kind.UNSUPPORTED, message="cannot be lowered")


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ("a b c", [Constraints.ALL, Constraints.MINIMAL]),
        ("a a c", [Constraints.MINIMAL]),
        ("a b b", [Constraints.ALL]),
        ("a a a", []),
        (("a", FAILED, "c"), [Constraints.MINIMAL]),
    ],
)
def test_programs_that_are_equal_or_cannot_be_lowered_are_passed_over(programs, expected):
    programs = programs.split() if isinstance(programs, str) else programs
    words = dict(
        zip((Constraints.USUAL, Constraints.ALL, Constraints.MINIMAL), programs, strict=True)
    )
    ledger = Rows([row(0, baseline="FSDP")], words)
    found = list(constraint_variants(ledger, lambda row: False))
    assert [ledger.trials[i].candidate.layout.constraints for i in found] == expected
    assert len(ledger.trials) == 1 + len(expected)


@pytest.mark.parametrize(
    ("times_s", "second"), [((2.0, 1.0, 3.0), 0), ((1.0, 3.0, 1.0), 1), ((1.0, 1.0, 1.0), None)]
)
def test_the_next_that_takes_another_time_is_asked_for_with_all_constraints(times_s, second):
    words = {constraints: str(constraints) for constraints in Constraints}
    ledger = Rows([row(i, baseline=f"row {i}") for i in range(3)], words, times_s=times_s)
    found = [ledger.trials[i] for i in constraint_variants(ledger, lambda row: False)]
    best = times_s.index(1.0)
    expected = [(f"row {best}", Constraints.ALL), (f"row {best}", Constraints.MINIMAL)]
    expected += [] if second is None else [(f"row {second}", Constraints.ALL)]
    assert [(r.baseline, r.candidate.layout.constraints) for r in found] == expected


@pytest.mark.slow
def test_of_nine_compilations_three_are_for_other_words(quick):
    plan = quick(budget=dataclasses.replace(SIX, compiles=9))
    compiled = [t for t in plan.evidence.trials if t.was_compiled]
    again = [t for t in compiled if wording_of(t) is not Constraints.USUAL]
    assert len(compiled) == 9 and len(again) == 3
    assert len({t.candidate.with_constraints(Constraints.USUAL) for t in again}) == 2


def test_when_the_time_is_up_nothing_is_lowered():
    ledger = Rows([row(0, baseline="FSDP")], {}, late=(True,))
    assert not list(constraint_variants(ledger, lambda row: False)) and len(ledger.trials) == 1


def test_what_the_journal_knows_is_not_lowered():
    ledger = Rows([row(0, baseline="FSDP")], {})
    assert list(constraint_variants(ledger, lambda row: True)) == [1, 2]
    assert ledger.lowered == []
