"""Where nothing is measured, the best is compiled again with other constraints; the faster wins."""

import autoshard
from autoshard.layout import Constraints


def constraints_of(trial):
    return trial.candidate.layout.constraints


def test_the_best_is_asked_for_in_other_words_within_the_budget(quick):
    plan = quick(budget=autoshard.Budget(candidates=24, compiles=6, profiles=0))
    trials = plan.evidence.trials
    compiled = [t for t in trials if t.was_compiled]
    assert len(compiled) <= 6
    again = [t for t in compiled if constraints_of(t) is not Constraints.LEAN]
    assert {constraints_of(t) for t in again} <= {Constraints.ALL, Constraints.LEAST}
    assert again, "no other words were tried"
    lean = [t for t in compiled if constraints_of(t) is Constraints.LEAN]
    best = min(lean, key=lambda t: t.compiled.time_s)
    assert {t.candidate.with_constraints(Constraints.LEAN).key for t in again} == {
        best.candidate.key
    }
    assert all(t.propagated == best.propagated for t in again)
    assert plan.trial.compiled.time_s == min(t.compiled.time_s for t in compiled)


def test_two_compilations_are_for_two_layouts(quick):
    plan = quick(budget=autoshard.Budget(candidates=24, compiles=2, profiles=0))
    assert {constraints_of(t) for t in plan.evidence.trials} == {Constraints.LEAN}


def test_what_is_measured_is_not_reworded(quick):
    plan = quick(budget=autoshard.Budget(candidates=12, compiles=4, profiles=3, rounds=2))
    assert {constraints_of(t) for t in plan.evidence.trials} == {Constraints.LEAN}
