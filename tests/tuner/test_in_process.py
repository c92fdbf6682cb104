"""Measuring as on accelerators, in the search's own process: here by CPU devices that say so."""

import contextlib
import dataclasses

import jax
import pytest

import autoshard
from autoshard import api
from autoshard.errors import WorkerError
from autoshard.records.trial import Failure, Kind, Measurement, Stage
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.rungs.profile.runner import LocalRunner
from autoshard.target.target import find_target
from autoshard.tuner.journal import Journal, opened
from tests import workloads
from tests.workloads import lines

BUDGET = autoshard.Budget(candidates=12, compiles=3, profiles=3, rounds=3)


@pytest.fixture
def search(calibration, monkeypatch):
    """Searches of a target that calls itself GPUs."""
    here = find_target(jax.devices())
    cost = cost_model(here, calibration, lambda: None)
    gpu = dataclasses.replace(here, platform="gpu", shared_host=False)
    monkeypatch.setattr(api, "find_target", lambda *_: gpu)
    monkeypatch.setattr(api, "cost_model", lambda *_: cost)

    def run(model_fn=workloads.mlp, **options):
        return autoshard.search(model_fn, jax.devices(), **{"budget": BUDGET, **options})

    return run


def measured(plan):
    outcomes = [t.profiled for t in plan.evidence.trials if t.profiled is not None]
    assert all(isinstance(x, Measurement) for x in outcomes), outcomes
    return outcomes


def test_a_search_measures_here(search):
    plan = search()
    assert {m.numerics for m in measured(plan)} == {"exact"}
    _, metrics = plan.step(plan.init(), plan.put(workloads.batch_of()))
    assert metrics["loss"] > 0


@pytest.mark.slow
def test_what_is_interrupted_in_good_order_never_counts_as_a_crash(search, tmp_path):
    journal = tmp_path / "journal.jsonl"
    for text in ("racing", "racing", "checking", "checking", "lowering", "lowering"):
        pressed = []

        def interrupt(event, text=text, pressed=pressed):
            if event.text.startswith(text) and not pressed:
                pressed.append(event)
                raise KeyboardInterrupt

        search(journal=journal, callbacks=(interrupt,))
    assert measured(search(journal=journal))
    begun = {r["key"] for r in lines(journal) if r.get("record") == "started"}
    with opened(journal) as log:
        assert begun and not any(log.attempts(key) for key in begun)


def test_an_interrupted_race_is_planned_by_and_kept(search, tmp_path, monkeypatch):
    journal = tmp_path / "journal.jsonl"
    real, called = LocalRunner.run, []

    def run(bench, name, steps):
        called.append(name)
        if len(called) == 4 * BUDGET.profiles:
            raise KeyboardInterrupt
        return real(bench, name, steps)

    with monkeypatch.context() as patched:
        patched.setattr(LocalRunner, "run", run)
        plan = search(journal=journal)
    assert plan.evidence.ended == "interrupted"
    assert isinstance(plan.trial.profiled, Measurement)
    kept = [r for r in lines(journal) if r.get("record") == "outcome" and r["rung"] == "profile"]
    assert len(kept) >= len({*called})
    assert measured(search(journal=journal))


@contextlib.contextmanager
def killed(monkeypatch, method, dies):
    """Inside, the process dies in a method of the bench: its journal is left as it would be.

    Args:
      dies: of the names of the programs that it was called for, in order.
    """
    called = []
    real, write = getattr(LocalRunner, method), Journal._write

    def call(bench, name, argument):
        called.append(name)
        if dies(called):
            raise SystemExit
        return real(bench, name, argument)

    def kept(log, record):
        if not dies(called):
            write(log, record)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(LocalRunner, method, call)
        patched.setattr(Journal, "_write", kept)
        yield


def test_who_takes_the_process_down_twice_is_known_and_nobody_else(search, tmp_path, monkeypatch):
    journal = tmp_path / "journal.jsonl"
    for _ in range(2):
        with killed(monkeypatch, "numerics", lambda called: len(called) > 1):
            search(journal=journal)
    outcomes = [t.profiled for t in search(journal=journal).evidence.trials if t.profiled]
    crashed = [x for x in outcomes if isinstance(x, Failure)]
    assert [x.kind for x in crashed] == [Kind.CRASH] and "died twice" in crashed[0].message
    assert len(outcomes) == BUDGET.profiles


@pytest.mark.slow
def test_an_unsharded_step_that_takes_the_process_down_twice_is_left_out(
    search, tmp_path, monkeypatch
):
    """Programs are compared with each other then, and that is told."""
    journal = tmp_path / "journal.jsonl"
    for _ in range(2):
        with killed(monkeypatch, "trust", lambda called: "reference 0" in called):
            search(journal=journal)
    for _ in range(2):  # the second time from the journal alone
        plan = search(journal=journal)
        assert {m.numerics for m in measured(plan)} == {"relative"}
    plan = search(journal=journal, seed=1)
    (note,) = [n for n in plan.evidence.notes if "the unsharded step does not run here" in n]
    assert "crash: the process died twice" in note


@pytest.mark.slow
def test_a_race_that_is_killed_twice_blames_who_ran(search, tmp_path, monkeypatch):
    """Not all who raced: the others are measured by the next search."""
    journal = tmp_path / "journal.jsonl"
    later = BUDGET.profiles + 1
    for _ in range(2):
        with killed(
            monkeypatch,
            "run",
            lambda called: len(called) > later and called[-1] == called[0],
        ):
            search(journal=journal)
    outcomes = [t.profiled for t in search(journal=journal).evidence.trials if t.profiled]
    blamed = [x for x in outcomes if isinstance(x, Failure)]
    assert len(blamed) == 1 and "died twice" in blamed[0].message
    assert sum(isinstance(x, Measurement) for x in outcomes) == BUDGET.profiles - 1


def test_without_an_initial_state_the_best_estimate_is_planned_and_that_is_told(
    search, monkeypatch
):
    full = Failure(stage=Stage.PROFILE, kind=Kind.OOM, message="RESOURCE_EXHAUSTED: 9 GiB")
    monkeypatch.setattr(LocalRunner, "set_inputs", lambda *_: full)
    plan = search()
    assert measured(plan) == []
    (note,) = [n for n in plan.evidence.notes if "not measured" in n]
    assert "the initial state cannot be made unsharded: RESOURCE_EXHAUSTED: 9 GiB" in note
    assert note in str(plan)


@pytest.mark.parametrize("call", ["set_inputs", "trust", "trace"])
def test_where_no_process_can_be_started_the_search_plans_by_what_it_has(search, monkeypatch, call):
    def refuse(*args, **kwargs):
        raise WorkerError("no worker process could be started")

    monkeypatch.setattr(LocalRunner, call, refuse)
    plan = search()
    assert bool(measured(plan)) == (call == "trace")
    what = "traced" if call == "trace" else "measured"
    assert f"not {what}: no worker process could be started" in str(plan)


def test_the_initial_state_is_made_on_the_host(search, monkeypatch):
    """Not on one of the accelerators, which may not hold the whole of it."""
    compiled = []
    compile_ = LocalRunner._compile
    monkeypatch.setattr(
        LocalRunner,
        "_compile",
        lambda self, module: compiled.append(module) or compile_(self, module),
    )
    search(budget=dataclasses.replace(BUDGET, profiles=1, compiles=1))
    assert compiled and all(module.inputs for module in compiled)
