"""Searches from end to end: what is promised of the result, of budgets, interrupts and crashes."""

import concurrent.futures
import dataclasses
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import api
from autoshard.lowering.lower import lower_step
from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Stage
from autoshard.rungs.profile import calibration as calibrate
from autoshard.rungs.profile import calibration_files as calibrations
from autoshard.rungs.profile import numerics
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.rungs.worker.process import worker_here
from autoshard.target.target import find_target
from autoshard.tuner import compiling
from autoshard.tuner import loop as driver_search
from autoshard.tuner import state as ledger
from autoshard.tuner.loop import FIRST_WAVE_ROUNDS
from tests import workloads
from tests.workloads import lines, mlp, write_lines

DEVICES = jax.devices()
BASELINES = {
    "replicated",
    "data parallel",
    "FSDP",
    "ZeRO-1",
    "tensor parallel",
    "FSDP x TP",
    "data x TP",
}


def until(searched, tmp_path, wanted):
    """The fixture's journal up to the first line that `wanted` is true of."""
    records = lines(searched.journal)
    end = next(i for i, r in enumerate(records) if wanted(r))
    return write_lines(tmp_path / "journal.jsonl", records[:end])


def resumed(searched, journal, **options):
    """The fixture's search once more, from another journal."""
    return autoshard.search(
        mlp,
        DEVICES,
        budget=workloads.MEASURED,
        journal=journal,
        calibration=searched.calibration,
        **options,
    )


def interrupting(stage, text=""):
    """A callback that presses Ctrl-C once at a stage, and keeps what it is told."""
    told = []

    def callback(event):
        told.append(event)
        pressed = sum(e.stage is stage and text in e.text for e in told)
        if event.stage is stage and text in event.text and pressed == 1:
            raise KeyboardInterrupt

    return callback, told


def final_times_s(measurement):
    """The median of each round of the final race."""
    pairs = list(zip(measurement.rounds, measurement.samples_s, strict=True))
    return {
        r: statistics.median(s for other, s in pairs if other == r)
        for r in measurement.rounds
        if r >= FIRST_WAVE_ROUNDS
    }


def test_the_winner_is_the_best_measured_and_the_ranking_holds_only_what_fits(searched):
    evidence = searched.plan.evidence
    ranked = [evidence.trials[i] for i in evidence.ranking]
    assert len(ranked) == len(set(evidence.ranking)) >= 4
    for trial in ranked:
        assert isinstance(trial.profiled, Measurement)
        assert trial.compiled.peak_memory_bytes <= evidence.memory_limit_bytes
        assert trial.profiled.numerics == "exact"
    finals = [final_times_s(t.profiled) for t in ranked]
    means = [statistics.geometric_mean(f.values()) for f in finals if f.keys() == finals[0].keys()]
    assert len(finals[0]) == workloads.MEASURED.rounds < 5, "too few to drop anyone, or to trim"
    assert len(means) > 1 and means[0] == min(means)
    assert {t.baseline for t in evidence.trials} >= BASELINES
    assert ranked[0].profiled.devices, "the winner was traced"
    assert evidence.notes == (), "the batch is real: nothing to note"


def test_the_callbacks_hear_of_every_stage(searched):
    stages = [e.stage for e in searched.events]
    assert list(dict.fromkeys(stages)) == list(Stage)
    assert all(e.done >= 0 and e.total > 0 and e.text for e in searched.events)
    assert all(e.done <= e.total for e in searched.events if e.stage is not Stage.PROPAGATE), (
        "the baselines alone may be more than the budget of candidates"
    )
    assert searched.events[0].best_s is None and searched.events[-1].best_s > 0


def test_a_calibration_is_told_of_where_there_is_none(quick, searched, tmp_path, monkeypatch):
    found = calibrations.calibrated(find_target(DEVICES), searched.calibration)
    monkeypatch.setattr(calibrate, "calibrate", lambda target: found)
    for expected in (True, False):
        told = []
        quick(calibration=tmp_path, callbacks=(told.append,))
        texts = [e.text for e in told if e.stage is Stage.TRACE]
        assert texts[:2] == ["tracing the step", "reading the program"]
        assert ("calibrating: once for a machine" in texts) == expected


def test_without_measuring_the_best_estimate_wins(quick, searched):
    plan = quick()
    evidence = plan.evidence
    assert plan.trial.profiled is None and evidence.ended == "finished"
    compiled = [t for t in evidence.trials if isinstance(t.compiled, Estimate)]
    assert len(compiled) == workloads.UNMEASURED.compiles
    assert plan.trial.compiled.time_s == min(t.compiled.time_s for t in compiled)
    _, metrics = plan.step(plan.init(), plan.put(workloads.batch_of(0)))
    assert jnp.isfinite(metrics["loss"])
    asked = [t.candidate for t in evidence.trials]
    assert len(set(asked)) == len(asked) == workloads.UNMEASURED.candidates
    assert asked == [t.candidate for t in searched.plan.evidence.trials], "same seed, same asks"


def test_the_baselines_are_judged_beyond_the_budget(quick):
    plan = quick(budget=autoshard.Budget(candidates=1, compiles=1, profiles=0))
    names = {t.baseline for t in plan.evidence.trials}
    assert names >= BASELINES and "" not in names


def test_a_tiny_limit_of_seconds_still_gives_a_plan_and_says_so(quick):
    plan = quick(budget=dataclasses.replace(workloads.MEASURED, seconds=1e-3, candidates=600))
    assert plan.evidence.ended == "out of time"
    assert sum(t.compiled is not None for t in plan.evidence.trials) == 1
    assert plan.trial.profiled is None, "there was no time to measure"
    assert "(out of time)" in str(plan)
    assert {t.baseline for t in plan.evidence.trials} == BASELINES


def test_a_search_that_has_time_left_says_what_was_cut_short(quick, monkeypatch):
    """The share of rung 1 is spent, and most of the time is not."""
    monkeypatch.setattr(driver_search, "RUNG1_SHARE", 0.0)
    plan = quick(budget=dataclasses.replace(workloads.UNMEASURED, seconds=3600.0))
    assert plan.evidence.ended == "cut short: judging layouts"
    assert "(cut short: judging layouts)" in str(plan)


@pytest.mark.parametrize(
    ("stage", "text"), [(Stage.PROPAGATE, "propagating"), (Stage.COMPILE, "compiling")]
)
def test_ctrl_c_before_measuring_gives_the_best_so_far(quick, stage, text):
    callback, told = interrupting(stage, text)
    plan = quick(budget=workloads.MEASURED, callbacks=(callback,))
    assert plan.evidence.ended == "interrupted" and "(interrupted)" in str(plan)
    assert any("interrupted" in e.text for e in told)
    assert isinstance(plan.trial.compiled, Estimate) and plan.trial.profiled is None
    plan.step(plan.init(), plan.put(workloads.batch_of(0)))


def test_ctrl_c_before_anything_was_judged(quick):
    callback, _ = interrupting(Stage.PROPAGATE)
    with pytest.raises(autoshard.NoPlanError, match="interrupted before a layout was judged"):
        quick(callbacks=(callback,))


def test_ctrl_c_at_every_event_from_some_moment_on_still_gives_a_plan(searched, tmp_path):
    """Someone who keeps the key down while compiled candidates are there."""
    journal = until(searched, tmp_path, lambda r: r.get("rung") == "profile")

    def callback(event):
        if event.stage is Stage.PROFILE:
            raise KeyboardInterrupt

    plan = resumed(searched, journal, callbacks=(callback,))
    assert plan.evidence.ended == "interrupted"


def test_a_callback_that_stops_from_the_first_compilation_on_gets_the_best_estimate(quick):
    def callback(event):
        if event.stage is not Stage.TRACE and event.stage is not Stage.PROPAGATE:
            raise KeyboardInterrupt

    plan = quick(callbacks=(callback,))
    assert plan.evidence.ended == "interrupted"
    assert isinstance(plan.trial.compiled, Estimate)


def test_ctrl_c_while_more_is_compiled_since_nothing_fits(quick):
    """The first Ctrl-C, however late."""
    callback, told = interrupting(Stage.COMPILE)
    with pytest.raises(autoshard.NoPlanError, match="no layout fits"):
        quick(memory_bytes=1, callbacks=(callback,))
    assert told[-1].text.startswith("interrupted")


def test_a_failed_check_and_no_time_for_others_leave_these_to_the_estimates(
    searched, tmp_path, monkeypatch
):
    """Not: nothing computes what it should, which nobody knows of the others."""
    journal = until(searched, tmp_path, lambda r: r.get("rung") == "profile")
    leaf = numerics.LeafError(path="state['w']", error=0.3, tolerance=1e-4)
    wrong = numerics.NumericsReport(steps=2, state=(leaf,), metrics=())
    checked = []
    monkeypatch.setattr(ChildRunner, "numerics", lambda *_: checked.append(_) or wrong)
    late = ledger.SearchState.late

    def is_late(self, share):
        return bool(checked) or late(self, share)

    monkeypatch.setattr(ledger.SearchState, "late", is_late)
    plan = resumed(searched, journal)
    assert len(checked) == 1 and plan.evidence.ended == "out of time"
    assert plan.trial.profiled is None and plan.trial.compiled is not None
    assert "1 of 1 programs that ran before the search ended compute something else" in str(plan)
    assert "Numerics: unchecked" in str(plan)


def test_ctrl_c_in_the_second_race_keeps_the_first(searched, tmp_path):
    journal = until(searched, tmp_path, lambda r: r.get("wave") == "final")
    callback, _ = interrupting(Stage.PROFILE)
    plan = resumed(searched, journal, callbacks=(callback,))
    assert plan.evidence.ended == "interrupted"
    assert isinstance(plan.trial.profiled, Measurement)
    assert plan.trial.profiled.numerics == "exact"


def test_a_crash_and_a_hang_of_the_compiler_cost_one_candidate_each(quick, monkeypatch):
    """The first program aborts its worker, the second makes it hang until the limit kills it."""
    calls = []

    def unlucky(request):
        calls.append(request)
        worker = worker_here(request.settings)
        if len(calls) == 1:
            return worker.call(os.abort, stage=Stage.COMPILE, time_limit_s=60)
        if len(calls) == 2:
            return worker.call(time.sleep, 600, stage=Stage.COMPILE, time_limit_s=0.5)
        return compiling_job(request)

    compiling_job = compiling.compile_in_process
    monkeypatch.setattr(compiling, "compile_in_process", unlucky)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        plan = quick(
            executor=executor, budget=autoshard.Budget(candidates=24, compiles=4, profiles=0)
        )
    failures = [t.failure for t in plan.evidence.trials if isinstance(t.compiled, Failure)]
    assert sorted(f.kind for f in failures) == [Kind.CRASH, Kind.TIMEOUT]
    assert all(f.stage is Stage.COMPILE and f.elapsed_s > 0 for f in failures)
    assert any("SIGABRT" in f.message for f in failures)
    assert sum(isinstance(t.compiled, Estimate) for t in plan.evidence.trials) == 2
    assert "failed in compile: timeout" in str(plan) and "failed in compile: crash" in str(plan)


class Broken(concurrent.futures.Executor):
    """Loses the first two jobs it is given, one when submitted, one later."""

    def __init__(self):
        self.jobs = 0
        self.inner = concurrent.futures.ThreadPoolExecutor(1)

    def submit(self, fn, /, *args, **kwargs):
        self.jobs += 1
        if self.jobs == 1:
            raise concurrent.futures.BrokenExecutor("the cluster is away")
        if self.jobs == 2:
            lost = concurrent.futures.Future()
            lost.set_exception(ConnectionError("the node is gone"))
            return lost
        return self.inner.submit(fn, *args, **kwargs)


def test_a_broken_executor_costs_candidates_and_is_not_held_against_them(quick, tmp_path):
    journal = tmp_path / "journal.jsonl"
    executor = Broken()
    plan = quick(
        executor=executor,
        journal=journal,
        budget=autoshard.Budget(candidates=24, compiles=3, profiles=0),
    )
    executor.inner.shutdown()
    messages = sorted(t.failure.message for t in plan.evidence.trials if t.failure)
    assert messages == [
        "BrokenExecutor: the cluster is away",
        "ConnectionError: the node is gone",
    ]
    compiled = [r for r in lines(journal) if r.get("rung") == "compile" and "outcome" in r]
    assert len(compiled) == 1, "what an executor lost may be tried again"


def test_an_executor_that_does_nothing_any_more(quick):
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(autoshard.NoPlanError, match=r"crash.*cannot schedule new futures"):
        quick(executor=executor)


def test_an_executor_for_live_accelerators_is_refused_before_anything_else(monkeypatch):
    """Its processes have CPUs alone: what they compile says nothing of a GPU."""
    live = dataclasses.replace(find_target(DEVICES), platform="gpu", shared_host=False)
    monkeypatch.setattr(api, "find_target", lambda *_: live)
    monkeypatch.setattr(api, "trace_all", None)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as executor,
        pytest.raises(autoshard.TargetError, match=r"an executor for 8 cpu.*leave executor out"),
    ):
        autoshard.search(mlp, DEVICES, executor=executor)


@pytest.mark.slow
def test_without_a_journal_nothing_is_told_to_lie_where_it_does_not(calibration):
    plan = autoshard.search(mlp, DEVICES, budget=workloads.MEASURED, calibration=calibration)
    measured = [t.profiled for t in plan.evidence.trials if isinstance(t.profiled, Measurement)]
    assert any(m.devices for m in measured) and not any(m.trace for m in measured)


def test_a_recorded_timeout_is_tried_again_with_more_time_only(quick, tmp_path, monkeypatch):
    journal = tmp_path / "journal.jsonl"
    calls = []

    def slow(request):
        calls.append(request)
        failure = Failure(
            stage=Stage.COMPILE, kind=Kind.TIMEOUT, message="slow", elapsed_s=request.time_limit_s
        )
        return failure if request.time_limit_s < 100 else compile_(request)

    compile_ = compiling.compile_in_process
    monkeypatch.setattr(compiling, "compile_in_process", slow)
    budget = autoshard.Budget(candidates=10, compiles=1, profiles=0, compile_seconds=10)
    with pytest.raises(autoshard.NoPlanError, match="timeout"):
        quick(journal=journal, budget=budget)
    first = len(calls)
    with pytest.raises(autoshard.NoPlanError):
        quick(journal=journal, budget=budget)
    assert len(calls) == first
    quick(journal=journal, budget=dataclasses.replace(budget, compile_seconds=200))
    assert len(calls) > first


@pytest.mark.slow
def test_a_candidate_that_computes_something_else_never_becomes_the_plan(
    searched, tmp_path, monkeypatch
):
    """The first to be measured, the fastest by rung 2, is made to learn at another rate."""
    journal = until(searched, tmp_path, lambda r: r.get("rung") == "profile")
    compiled = [r for r in lines(journal) if r.get("rung") == "compile" and "outcome" in r]
    fastest = min(compiled, key=lambda r: r["outcome"]["time_s"])
    culprit = Candidate.from_json(fastest["candidate"])
    target = searched.plan.target
    right = make_problem(trace(mlp()), target, "free", None)
    wrong = make_problem(trace(mlp(rate=0.101)), target, "free", None)
    key = minimal_constraints(right.analysis, right.space.specs(culprit.layout)).key()

    def lower(analysis, specs, target):
        return lower_step(wrong.analysis if specs.key() == key else analysis, specs, target)

    def search():
        return autoshard.search(
            mlp,
            DEVICES,
            budget=dataclasses.replace(workloads.MEASURED, profiles=4),
            journal=journal,
            calibration=searched.calibration,
        )

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "lower_step", lower)
        plan = search()
    assert plan.candidate != culprit
    (bad,) = (t for t in plan.evidence.trials if t.candidate == culprit)
    assert bad.profiled.kind is Kind.NUMERICS and "['w" in bad.profiled.message
    assert all(plan.evidence.trials[i].candidate != bad.candidate for i in plan.evidence.ranking)
    assert plan.trial.profiled.numerics == "exact"
    assert "failed in profile: numerics" in str(plan)

    def again():
        (trial,) = (t for t in search().evidence.trials if t.candidate == culprit)
        return trial.profiled

    assert again() == bad.profiled, "the journal knows it"
    monkeypatch.setattr(numerics, "REVISION", numerics.REVISION + 1)
    assert isinstance(again(), Measurement), "who judges by other rules asks again"


def test_one_device_has_nothing_to_shard_and_still_knobs_to_search(quick):
    plan = quick(
        lambda rate: mlp(rate),
        DEVICES[:1],
        knobs={"rate": (0.1, 0.2)},
        budget=autoshard.Budget(candidates=4, compiles=2, profiles=0),
    )
    assert plan.layout.mesh == () and plan.knobs["rate"] in (0.1, 0.2)
    assert {dict(t.candidate.knobs)["rate"] for t in plan.evidence.trials} == {0.1, 0.2}
    state, metrics = plan.step(plan.init(), plan.put(workloads.batch_of(0)))
    assert jnp.isfinite(metrics["loss"])
    assert plan.jit(lambda s, b: b["x"].sum())(state, workloads.batch_of(1, 8)).shape == ()
    assert "nothing is sharded" in str(plan)


def test_a_mesh_of_explicit_axes_gives_its_devices_and_names(quick):
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(explicit, explicit))
    plan = quick(mesh=mesh)
    assert set(plan.mesh.axis_names) <= {"data", "model", "z", "x", "y"}
    assert list(plan.mesh.devices.flat) == list(mesh.devices.flat)
    first = plan.evidence.trials[0].candidate.layout
    assert first.mesh[0][0] == "data"


def test_a_fixed_mesh_keeps_its_shape_and_order(quick):
    mesh = jax.sharding.Mesh(np.array(DEVICES)[::-1].reshape(2, 4), ("a", "b"))
    plan = quick(mesh=mesh, mesh_shape="fixed")
    assert plan.mesh.devices.tolist() == mesh.devices.tolist()
    assert {t.candidate.layout.mesh for t in plan.evidence.trials} == {(("a", 2), ("b", 4))}
    with pytest.raises(autoshard.WorkloadError, match='"free" or "fixed"'):
        quick(mesh=mesh, mesh_shape="loose")
    with pytest.raises(autoshard.WorkloadError, match=r"without one: give a jax.sharding.Mesh"):
        quick(mesh=DEVICES, mesh_shape="fixed")


def test_a_limit_of_next_to_nothing_says_what_would_help(quick):
    with pytest.raises(autoshard.NoPlanError, match="memory_bytes of at least"):
        quick(memory_bytes=1)


def test_fix_pins_an_axis_and_a_leaf_in_every_candidate(quick):
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
    fix = {"batch": "data", "['params']['w1']": jax.P(None, "model")}
    plan = quick(mesh=mesh, fix=fix)
    assert plan.batch_shardings["x"].spec == jax.P("data")
    assert plan.state_shardings["params"]["w1"].spec == jax.P(None, "model")
    assert plan.fixed_leaves == (("state['params']['w1']", ((), ("model",))),)
    for trial in plan.evidence.trials:
        assert dict(trial.candidate.layout.activation_rules)["batch"] == ("data",)
        assert "model" in dict(trial.candidate.layout.mesh)
    for given in (("data", "model"), jax.P("data", "model"), jax.P(("data", "model"), None)):
        both = quick(mesh=mesh, fix={"batch": given})
        assert both.batch_shardings["x"].spec == jax.P(("data", "model"))


def constrained(mesh, hidden=("data", "model")):
    """Two matrices; the author says where the batch and what lies between them are."""

    def model_fn():
        def step(state, batch):
            def loss(w):
                b = jax.lax.with_sharding_constraint(batch, jax.NamedSharding(mesh, jax.P("data")))
                h = jax.lax.with_sharding_constraint(
                    jnp.tanh(b @ w["a"]), jax.NamedSharding(mesh, jax.P(*hidden))
                )
                return jnp.mean((h @ w["b"]) ** 2)

            value, grads = jax.value_and_grad(loss)(state)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

        return autoshard.Workload(
            step=step,
            init=lambda: {"a": jnp.ones((64, 128)) * 0.01, "b": jnp.ones((128, 64)) * 0.02},
            batch=jax.ShapeDtypeStruct((32, 64), jnp.float32),
        )

    return model_fn


def test_the_users_own_constraints_are_a_baseline_or_kept(quick, tmp_path):
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
    model_fn = constrained(mesh)
    plan = quick(model_fn, mesh)
    written = [t for t in plan.evidence.trials if t.candidate.layout.as_annotated]
    assert [t.baseline for t in written] == ["as annotated"]
    assert isinstance(written[0].propagated, Estimate)
    kept = quick(model_fn, mesh, keep_constraints=True)
    assert kept.keep_constraints and not plan.keep_constraints
    assert not any(t.candidate.layout.as_annotated for t in kept.evidence.trials)
    assert {t.candidate.layout.mesh for t in kept.evidence.trials} == {(("data", 4), ("model", 2))}
    path = tmp_path / "kept.json"
    kept.save(path)
    loaded = autoshard.load_plan(path, model_fn, mesh)
    assert loaded.keep_constraints and loaded.lower().digest == kept.lower().digest
    batch = np.ones((32, 64), np.float32)
    losses = [p.step(p.init(), p.put(batch))[1]["loss"] for p in (plan, kept)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_a_step_as_written_is_another_with_other_constraints(quick, tmp_path, monkeypatch):
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
    model_fn, other = constrained(mesh), constrained(mesh, ("data",))
    journal = tmp_path / "journal.jsonl"
    plan = quick(model_fn, mesh, journal=journal)

    def asked(model_fn):
        """What of a search with the journal of the first was not answered by it."""
        before = len(lines(journal))
        quick(model_fn, mesh, journal=journal)
        return [r for r in lines(journal)[before:] if r["record"] == "outcome"]

    assert asked(model_fn) == []
    news = asked(other)
    assert news and {r["baseline"] for r in news} == {"as annotated"}

    subject = make_problem(trace(model_fn()), plan.target, "free", None)
    trials = plan.evidence.trials
    (index,) = (i for i, t in enumerate(trials) if t.candidate.layout.as_annotated)
    layout = trials[index].candidate.layout
    written = autoshard.Plan(
        subject.analysis_for(layout),
        subject.space,
        plan.target,
        layout,
        dataclasses.replace(plan.evidence, ranking=(index,)),
    )
    path = tmp_path / "written.json"
    written.save(path)
    assert autoshard.load_plan(path, model_fn, mesh).layout == layout
    with pytest.raises(autoshard.PlanError, match="same leaves, other computation"):
        autoshard.load_plan(path, other, mesh)
    # One of before its constraints were part of the digest.
    data = json.loads(path.read_text())
    data["program"]["digest"] = subject.analysis.digest
    path.write_text(json.dumps(data))
    assert autoshard.load_plan(path, model_fn, mesh).layout == layout


def test_the_users_own_constraints_are_left_out_where_they_are_not_as_fixed(quick):
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
    model_fn = constrained(mesh)

    def as_annotated(mesh=mesh, **options):
        trials = quick(model_fn, mesh, **options).evidence.trials
        return [t for t in trials if t.candidate.layout.as_annotated]

    assert as_annotated(mesh_shape="fixed")
    assert as_annotated(fix={"batch": "data"})
    assert not as_annotated(fix={"batch": ("data", "model")})
    assert not as_annotated(fix={"['a']": jax.P("data")})
    flat = jax.sharding.Mesh(np.array(DEVICES), ("data",))
    assert not as_annotated(flat, mesh_shape="fixed")


def test_knobs_are_searched_together_and_the_failing_are_noted(quick):
    def model_fn(remat, wide=True):
        if remat == "odd":
            raise RuntimeError("remat='odd' is not implemented\nat all")
        return mlp(0.1 if wide else 0.2)

    plan = quick(model_fn, knobs={"remat": ("none", "odd"), "wide": (True, False)})
    assert plan.knobs["remat"] == "none"
    tried = {t.candidate.knobs for t in plan.evidence.trials}
    assert tried == {
        (("remat", "none"), ("wide", True)),
        (("remat", "none"), ("wide", False)),
    }
    notes = [n for n in plan.evidence.notes if "cannot be traced" in n]
    assert len(notes) == 2
    assert notes[0].startswith("knobs {'remat': 'odd', 'wide': True} cannot be traced: remat='odd'")
    assert all("\n" not in n for n in notes)


def test_knobs_that_trace_and_cannot_be_analysed_are_noted_too(quick, monkeypatch):
    def refusing(*kinds):
        def analysed(program, *args, **kwargs):
            if dict(program.knobs)["kind"] in kinds:
                raise NotImplementedError("no rule for this platform")
            return make_problem(program, *args, **kwargs)

        return analysed

    def model_fn(kind):
        return mlp(0.1 if kind == "a" else 0.2)

    monkeypatch.setattr(api, "make_problem", refusing("b"))
    plan = quick(model_fn, knobs={"kind": ("a", "b")})
    assert plan.knobs == {"kind": "a"}
    assert "knobs {'kind': 'b'} cannot be analysed: no rule for this platform" in str(plan)
    monkeypatch.setattr(api, "make_problem", refusing("a", "b"))
    with pytest.raises(NotImplementedError, match="no rule for this platform"):
        quick(model_fn, knobs={"kind": ("a", "b")})


def test_a_measured_search_of_synthetic_batches_says_so(quick):
    def unsampled():
        return dataclasses.replace(mlp(), sample=None)

    budget = autoshard.Budget(candidates=4, compiles=1, profiles=1, rounds=2)
    plan = quick(unsampled, budget=budget)
    assert plan.evidence.notes == (
        "measured with synthetic batches: floats normal, integers 0 or 1",
    )
    assert not quick(unsampled).evidence.notes, "nothing was measured"


def test_labels_of_64_bits_are_held_in_32_as_jit_holds_them(calibration):
    rng = np.random.default_rng(0)

    def drawn(seed):
        shape = (workloads.BATCH,)
        labels = np.random.default_rng(seed).integers(0, 4, shape)
        return {"x": rng.normal(size=(*shape, 8)), "label": labels}

    def model_fn():
        def step(state, batch):
            def loss(w):
                logits = jax.nn.log_softmax(batch["x"].astype("float32") @ w)
                return -jnp.mean(jnp.take_along_axis(logits, batch["label"][:, None], 1))

            value, slope = jax.value_and_grad(loss)(state)
            return state - slope, {"loss": value}

        return autoshard.Workload(
            step=step,
            init=lambda: jnp.zeros((8, 4)),
            batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drawn(0)),
            sample=lambda key: drawn(int(jax.random.bits(key)) % 100),
        )

    assert drawn(0)["label"].dtype == np.int64
    budget = autoshard.Budget(candidates=4, compiles=1, profiles=1, rounds=2)
    plan = autoshard.search(model_fn, DEVICES[:2], budget=budget, calibration=calibration)
    assert plan.trial.profiled.numerics == "exact"
    state = plan.init()
    for batch in (drawn(1), plan.put(drawn(2))):
        state, metrics = plan.step(state, batch)
    assert np.isfinite(metrics["loss"])
    evaluated = plan.jit(lambda state, batch: jnp.max(batch["label"]))(state, drawn(3))
    assert evaluated == drawn(3)["label"].max()


def test_the_seed_reaches_the_strategy(calibration):
    seeds = []

    class Recording:
        def ask(self, space, seed, history):
            seeds.append(seed)
            return ()

    autoshard.search(
        workloads.mlp,
        DEVICES,
        budget=workloads.UNMEASURED,
        strategy=Recording(),
        seed=7,
        calibration=calibration,
    )
    assert seeds and set(seeds) == {7}
