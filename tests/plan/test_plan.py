"""The plan at work: init, place, put, step, jit, and that what runs is what was judged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import PlanError, WorkloadError
from autoshard.lowering.lower import lower_step
from autoshard.lowering.problem import make_problem
from autoshard.plan import evaluation
from autoshard.plan import verify as checked
from autoshard.plan.plan import Plan, _number
from autoshard.program.program import Leaf, trace
from autoshard.records.evidence import Evidence
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Stage
from autoshard.rungs.profile.runner import LocalRunner
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.space.baselines import baselines
from autoshard.target.target import find_target
from tests import programs, workloads
from tests.analysed import analyse, baseline


@pytest.fixture(scope="module")
def plan(fsdp):
    """One that divides its state: where everything is whole no sharding could be wrong."""
    return fsdp


@pytest.fixture(scope="module")
def unsharded():
    """States and metrics of three steps on one device, from the plan's own initial state."""
    workload = workloads.mlp()
    step = jax.jit(workload.step)
    state = workload.init()
    states, metrics = [state], []
    for k in range(3):
        state, m = step(state, workloads.batch_of(k))
        states.append(state)
        metrics.append(m)
    return states, metrics


@pytest.fixture(scope="module")
def fsdp():
    return fsdp_plan()


def fsdp_plan():
    """A plan that shards its state, whichever layout is fastest on this machine today."""
    target = find_target(jax.devices())
    subject = make_problem(trace(workloads.mlp()), target, "free", None)
    chosen = next(b for b in baselines(subject.space) if b.name == "FSDP")
    return Plan(subject.analysis, subject.space, target, chosen.candidate.layout, Evidence())


def shardings_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def values(tree):
    def value(x):
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return jax.tree.map(value, tree)


def assert_close(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), values(a), values(b)
    )


def test_the_state_is_born_sharded_as_the_plan_says(fsdp, unsharded):
    plan, state = fsdp, fsdp.init()
    assert shardings_of(state) == plan.state_shardings
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state))
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(plan.state_shardings), strict=True):
        assert x.addressable_shards[0].data.shape == s.shard_shape(x.shape)
    assert_close(state, unsharded[0][0])


def test_many_steps_keep_the_shardings_and_compile_once(plan):
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    state, _ = plan.step(state, batch)
    compiled = []

    def listen(name, seconds, **_):
        if "compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(4):
            state, metrics = plan.step(state, batch)
            assert shardings_of(state) == plan.state_shardings
        assert not compiled
        jax.jit(lambda x: x * 3 - 1)(jnp.ones(5))
        assert compiled, "the listener would have heard"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert all(m.sharding.is_fully_replicated for m in jax.tree.leaves(metrics))
    assert int(metrics["count"]) == 4 and int(state["count"]) == 5


def test_steps_compute_what_the_unsharded_step_computes(plan, unsharded):
    state = plan.init()
    for k in range(3):
        state, metrics = plan.step(state, plan.put(workloads.batch_of(k)))
        assert_close(metrics, unsharded[1][k])
        assert_close(state, unsharded[0][k + 1])


def test_the_state_is_donated_and_the_batch_is_not(plan):
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    new, _ = plan.step(state, batch)
    jax.block_until_ready(new)
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.size > 1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    plan.step(new, batch)


def test_what_was_donated_is_named_and_nothing_runs(plan):
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    mean = plan.jit(lambda state, batch: jnp.mean(batch["x"] @ state["params"]["w1"]))
    mean(state, batch)
    new, _ = plan.step(state, batch)
    gone = r"state\['.*: got an array that is deleted"
    with pytest.raises(PlanError, match=gone):
        plan.step(state, batch)
    with pytest.raises(PlanError, match=gone):
        plan.step(state, jax.tree.map(np.asarray, batch))
    with pytest.raises(PlanError, match=gone):
        plan.place(state)
    with pytest.raises(PlanError, match=gone):
        mean(state, batch)
    jax.tree.leaves(batch)[0].delete()
    with pytest.raises(PlanError, match=r"batch\['x'\]: got an array that is deleted"):
        plan.step(new, batch)
    plan.step(new, plan.put(workloads.batch_of(0)))


def test_put_shards_the_batch_and_checks_it(plan):
    host = jax.tree.map(np.asarray, workloads.batch_of(0))
    placed = plan.put(host)
    assert shardings_of(placed) == plan.batch_shardings
    assert_close(placed, host)
    with pytest.raises(
        PlanError, match=r"batch\['y'\]: got float32\[4, 64\], expected float32\[32"
    ):
        plan.put({**host, "y": host["y"][:4]})
    with pytest.raises(PlanError, match=r"batch\['x'\]: got float16"):
        plan.put({**host, "x": host["x"].astype(np.float16)})
    with pytest.raises(PlanError, match="the batch has structure"):
        plan.put((host["x"], host["y"]))


@pytest.mark.parametrize("where", ["host", "one device", "replicated", "as planned"])
def test_place_takes_states_from_anywhere_and_leaves_them_usable(plan, unsharded, where):
    given = unsharded[0][1]
    if where == "host":
        given = {**values(given), "key": given["key"]}
    elif where == "replicated":
        whole = jax.NamedSharding(plan.mesh, jax.P())
        given = jax.tree.map(lambda x: jax.device_put(x, whole), given)
    elif where == "as planned":
        given = jax.tree.map(jax.device_put, given, plan.state_shardings)
    before = values(given)
    placed = plan.place(given)
    assert shardings_of(placed) == plan.state_shardings
    assert_close(placed, given)
    new, _ = plan.step(placed, plan.put(workloads.batch_of(1)))
    assert_close(new, unsharded[0][2])
    after = values(given)  # not donated with what was placed, nor written to
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_place_names_the_leaf_that_does_not_fit(plan, unsharded):
    state = unsharded[0][0]
    wrong = {**state, "params": {**state["params"], "w1": jnp.zeros((64, 64))}}
    with pytest.raises(PlanError, match=r"state\['params'\]\['w1'\]: got float32\[64, 64\], exp"):
        plan.place(wrong)
    double = np.zeros(state["params"]["w1"].shape)  # jit would drop half of its bits
    with pytest.raises(PlanError, match=r"\['w1'\]: got float64\[\d+, \d+\], expected float32"):
        plan.place({**state, "params": {**state["params"], "w1": double}})
    with pytest.raises(PlanError, match=r"count'\]: got int64\[\], expected int32"):
        plan.place({**state, "count": np.int64(2**40)})
    counted = plan.place({**state, "count": np.int64(3)})  # as Python and NumPy count
    assert counted["count"] == 3 and counted["count"].dtype == state["count"].dtype
    with pytest.raises(PlanError, match="the state has structure"):
        plan.place({k: v for k, v in state.items() if k != "count"})


def test_step_takes_arrays_that_lie_elsewhere(unsharded):
    plan = fsdp_plan()
    with pytest.warns(UserWarning, match=r"plan\.put"):
        new, _ = plan.step(plan.place(unsharded[0][0]), workloads.batch_of(0))
    assert shardings_of(new) == plan.state_shardings
    assert_close(new, unsharded[0][1])
    with pytest.raises(PlanError, match=r"batch\['x'\]: got"):
        plan.step(new, {"x": jnp.zeros((8, 64)), "y": jnp.zeros((8, 64))})


def evaluate(state, batch):
    h = jnp.tanh(batch["x"] @ state["params"]["w1"])
    error = (h @ state["params"]["w2"] - batch["y"]) ** 2
    return {"loss": jnp.mean(error), "each": jnp.mean(error, axis=1), "count": state["count"]}


def test_a_step_on_arrays_in_their_places_does_not_look_at_each(plan, monkeypatch):
    """A look at each of 34 leaves takes 0.3 % of a step of 13 ms."""
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    monkeypatch.setattr(Plan, "_placed", lambda *_: pytest.fail("each leaf was looked at"))
    state, _ = plan.step(state, batch)
    plan.step(state, batch)


def test_arrays_that_are_moved_are_named_once():
    plan = fsdp_plan()
    state, batch = plan.init(), workloads.batch_of(0)
    state["params"] = jax.device_put(state["params"], jax.NamedSharding(plan.mesh, jax.P()))
    with pytest.warns(UserWarning) as caught:
        state, _ = plan.step(state, batch)
    first, second = (str(w.message) for w in caught)
    assert first.startswith("plan.step moves state['params']['w1'] (and 1 more leaves)")
    assert "got NamedSharding(" in first and "expected NamedSharding(" in first
    assert "plan.place(state)" in first
    assert second.startswith("plan.step moves batch['x'] (and 1 more leaves)")
    assert "plan.put(batch)" in second
    assert {w.filename for w in caught} == {__file__}
    plan.step(state, batch)  # warnings are errors here: none comes a second time


def test_arrays_that_jax_itself_moves_are_named_too():
    """They are not committed to the device on which they lie."""
    plan = fsdp_plan()
    with pytest.warns(UserWarning, match=r"moves batch\['x'\]"):
        plan.step(plan.init(), workloads.batch_of(0))


def test_arrays_that_must_be_moved_or_lie_as_planned_are_no_reason_to_warn():
    plan, batch = fsdp_plan(), workloads.batch_of(0)
    plan.step(plan.init(), jax.tree.map(np.asarray, batch))
    plan.step(plan.init(), plan.put(batch))
    alone = plan_of(scaled(ones), "replicated", jax.devices()[:1])
    alone.step(ones(), {"x": jnp.ones((16, 8)), "rate": jnp.float32(1)})


def test_evaluation_keeps_the_programs_of_the_last_shapes(fsdp, monkeypatch):
    monkeypatch.setattr(evaluation, "_MOST_SHAPES", 2)
    run, state = fsdp.jit(lambda s, b: jnp.sum(b["x"])), fsdp.init()
    built = []
    build = evaluation.Evaluation._build
    monkeypatch.setattr(
        evaluation.Evaluation, "_build", lambda *a: built.append(len(a[2]["x"])) or build(*a)
    )
    for size in (1, 2, 1, 3, 1, 2):
        run(state, workloads.batch_of(0, size))
    assert built == [1, 2, 3, 2] and len(run._compiled) == 2


def test_a_step_that_is_refused_leaves_the_state_usable():
    plan = fsdp_plan()
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    with pytest.raises(PlanError, match=r"batch\['y'\]: got"):
        plan.step(state, {**batch, "y": batch["y"][:8]})
    with pytest.raises(PlanError, match="the batch has structure"):
        plan.step(state, (batch["x"], batch["y"]))
    with pytest.warns(UserWarning, match=r"plan\.put"):
        new, _ = plan.step(state, jax.device_put(batch, jax.devices()[1]))
    assert shardings_of(new) == plan.state_shardings


def test_evaluation_equals_the_unsharded_one_for_any_batch_size(plan, unsharded):
    run = plan.jit(evaluate)
    state = plan.init()
    for size in (workloads.BATCH, 16, 8, 7, 1, workloads.BATCH):
        batch = workloads.batch_of(3, size)
        got = run(state, batch)
        assert_close(got, jax.jit(evaluate)(unsharded[0][0], batch))
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(got))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert len(run._compiled) == 5, "one program for each batch size"


def test_evaluation_takes_host_batches_and_states(plan, unsharded):
    host = jax.tree.map(np.asarray, workloads.batch_of(3))
    run = plan.jit(lambda s, b: evaluate(s, b)["loss"])
    expected = evaluate(unsharded[0][0], host)["loss"]
    for batch in (host, jax.device_put(host, jax.devices()[3]), plan.put(host)):
        assert_close(run(plan.place(unsharded[0][0]), batch), expected)
    assert_close(run(unsharded[0][0], host), expected)


def test_evaluation_takes_plain_numbers_beside_arrays(plan, unsharded):
    run = plan.jit(lambda s, b: evaluate(s, b["batch"])["loss"] * b["scale"])
    batch = workloads.batch_of(3)
    expected = evaluate(unsharded[0][0], batch)["loss"]
    for scale in (0.5, 2.0):
        assert_close(run(plan.init(), {"batch": batch, "scale": scale}), expected * scale)
    assert len(run._compiled) == 1


def kept(monkeypatch):
    """The programs that are compiled from now on."""
    compile_, programs = jax.stages.Lowered.compile, []

    def compile_and_keep(lowered):
        programs.append(compile_(lowered))
        return programs[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_keep)
    return programs


@pytest.mark.parametrize("kind", ["tensor parallel", "data parallel", "FSDP"])
def test_evaluation_is_divided_as_the_step_is(kind, monkeypatch):
    """Each device multiplies its part, and no weight is gathered that the step would not gather."""
    target = find_target(jax.devices())
    subject = make_problem(trace(workloads.mlp()), target, "free", None)
    layout = next(b for b in baselines(subject.space) if b.name == kind).candidate.layout
    plan = Plan(subject.analysis, subject.space, target, layout, Evidence())
    compiled, state = kept(monkeypatch), plan.init()
    plan.jit(lambda s, b: evaluate(s, b)["loss"])(state, workloads.batch_of(0, 16))
    text = compiled[-1].as_text()
    rows, columns = (16, 128 // 8) if kind == "tensor parallel" else (16 // 8, 128)
    assert f"f32[{rows},{columns}]{{1,0}} dot(" in text
    assert ("all-gather" in text) == (kind == "FSDP")


def test_evaluation_leaves_small_arrays_replicated_as_the_step_does(monkeypatch):
    """A router scores all experts for the tokens that are here: nothing is gathered."""
    subject = analyse(programs.grouped_experts(width=2 * programs.MLP))
    layout = baseline(subject.space, "data x EP, small replicated", 2)
    target = find_target(jax.devices())
    plan = Plan(subject.analysis, subject.space, target, layout, Evidence())
    compiled, state = kept(monkeypatch), plan.init()
    batch = subject.analysis.program.workload.batch
    x = np.ones(batch.shape, batch.dtype)
    plan.jit(lambda s, x: jnp.mean(jax.nn.softmax(x @ s["router"])[..., 0]))(state, x)
    assert "all-reduce" in compiled[-1].as_text() and "all-gather" not in compiled[-1].as_text()


def test_evaluation_errors_are_the_users_own(plan):
    def broken(state, batch):
        return batch["z"]

    with pytest.raises(KeyError, match="z") as caught:
        plan.jit(broken)(plan.init(), workloads.batch_of(0))
    assert "plan.jit" in "".join(caught.value.__notes__)
    with pytest.raises(WorkloadError, match="the state has structure"):
        plan.jit(lambda s, b: b["x"].sum())({"w": jnp.ones(3)}, workloads.batch_of(0))


def test_the_running_step_is_the_program_that_was_judged(searched):
    """Lowered anew from the trial's candidate, as rungs 2 and 3 do, it has the same digest."""
    plan = searched.plan
    subject = make_problem(plan.program, plan.target, "free", None)
    candidate = plan.trial.candidate
    specs = minimal_constraints(subject.analysis, subject.space.specs(candidate.layout))
    judged = lower_step(subject.analysis, specs, plan.target)
    assert plan.lower().digest == judged.digest
    assert plan.candidate == candidate
    other = next(t for t in plan.evidence.trials if t.candidate != candidate and t.compiled)
    specs = minimal_constraints(subject.analysis, subject.space.specs(other.candidate.layout))
    other = lower_step(subject.analysis, specs, plan.target)
    assert other.digest != judged.digest


@pytest.mark.slow
def test_the_program_that_runs_was_given_to_the_compiler_and_the_bench(quick, monkeypatch):
    from autoshard.tuner import compiling, measuring

    compiled, raced = [], []
    compile_, judge = compiling.compile_in_process, measuring.profile.judge

    def judged(bench, finalists, *args, **more):
        raced.extend(finalist.module.digest for finalist in finalists)
        return judge(bench, finalists, *args, **more)

    monkeypatch.setattr(
        compiling,
        "compile_in_process",
        lambda r: (compiled.append(r.module.digest), compile_(r))[1],
    )
    monkeypatch.setattr(measuring.profile, "judge", judged)
    plan = quick(budget=workloads.MEASURED)
    assert plan.lower().digest in compiled and plan.lower().digest in raced


def test_the_evidence_holds_every_trial(searched):
    evidence = searched.plan.evidence
    assert len(evidence.trials) >= workloads.MEASURED.candidates
    assert len({(t.candidate.key, t.baseline) for t in evidence.trials}) == len(evidence.trials)
    winner = evidence.trials[evidence.ranking[0]]
    assert winner.candidate == searched.plan.candidate
    assert isinstance(winner.compiled, Estimate) and isinstance(winner.profiled, Measurement)
    assert winner.profiled.numerics == "exact" and winner.profiled.numerics_error < 1e-4
    assert winner.compiled.peak_memory_bytes <= evidence.memory_limit_bytes
    assert {"propagate", "compile", "profile", "all"} <= set(evidence.elapsed_s)
    assert evidence.ended == "finished"
    names = {t.baseline for t in evidence.trials}
    assert {"replicated", "data parallel", "FSDP", "tensor parallel", "FSDP x TP"} <= names


def test_a_plan_says_what_it_is(searched):
    plan = searched.plan
    assert dict(plan.mesh.shape) == (dict(plan.layout.mesh) or {"x": 1})
    assert set(plan.mesh.devices.flat) == set(jax.devices())
    assert all(t == jax.sharding.AxisType.Auto for t in plan.mesh.axis_types)
    assert plan.knobs == {}
    assert repr(plan).startswith("<Plan {'mesh'")
    assert isinstance(plan, autoshard.Plan)


def test_a_plan_is_checked_where_it_runs(plan):
    report = plan.check()
    assert report.passed and report.steps == 2
    assert {leaf.path for leaf in report.state} == {leaf.path for leaf in plan.program.state}
    assert 0 < report.worst.error < 1e-4


def test_a_check_takes_the_steps_and_the_batches_it_is_asked_for(fsdp, monkeypatch):
    seeds = []
    made = checked.make_inputs

    def recorded(program, target, seed, steps):
        seeds.append((seed, steps))
        return made(program, target, seed, steps)

    monkeypatch.setattr(checked, "make_inputs", recorded)
    assert fsdp.check(steps=3, seed=5).steps == 3
    assert seeds == [(5, 3)]


@pytest.mark.slow
def test_a_state_that_several_devices_make_is_checked(calibration):
    """init() with a manual region: no program for one device makes it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.P("data")

    def init():
        def part():
            return jnp.ones((4, 16)) + jax.lax.axis_index("data")

        return jax.shard_map(part, mesh=mesh, in_specs=(), out_specs=rows)()

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), {}

    workload = autoshard.Workload(
        step=step, init=init, batch=jax.ShapeDtypeStruct((32, 4 * len(jax.devices())), jnp.float32)
    )
    budget = autoshard.Budget(candidates=4, compiles=1, profiles=0)
    plan = autoshard.search(lambda: workload, jax.devices(), budget=budget, calibration=calibration)
    assert plan.check().passed
    whole = 1.0 + np.repeat(np.arange(len(jax.devices())), 4)[:, None]
    np.testing.assert_array_equal(plan.init(), np.broadcast_to(whole, (len(whole), 16)))


def test_in_a_job_of_many_processes_each_gives_its_part_of_the_batch(fsdp, monkeypatch):
    given = []

    def from_parts(sharding, part, shape):
        given.append((sharding, part, shape))
        return part

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "make_array_from_process_local_data", from_parts)
    mine = jax.tree.map(lambda x: np.asarray(x[: len(x) // 2]), workloads.batch_of(0))
    put = fsdp.put(mine)
    jax.tree.map(np.testing.assert_array_equal, put, mine)
    assert [sharding for sharding, _, _ in given] == jax.tree.leaves(fsdp.batch_shardings)
    assert [shape for _, _, shape in given] == [leaf.shape for leaf in fsdp.program.batch]


def test_no_device_holds_the_whole_of_the_state_while_it_is_made(fsdp, monkeypatch):
    made = []
    compile_ = jax.stages.Lowered.compile

    def compile_and_keep(lowered):
        made.append(compile_(lowered))
        return made[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_keep)
    monkeypatch.setattr(jax, "device_put", None)
    fsdp.init()
    (one,) = made
    memory = one.memory_analysis()
    parts = sum(
        np.prod(s.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize
        for leaf, s in zip(fsdp.program.state, jax.tree.leaves(fsdp.state_shardings), strict=True)
    )
    assert parts < fsdp.program.state_bytes / 4
    assert memory.output_size_in_bytes == pytest.approx(parts, rel=0.1)


def test_a_step_with_manual_regions_is_checked_against_the_same_with_nothing_divided():
    of = make_problem(trace(programs.manual_region()), find_target(jax.devices()), "free", None)
    layouts = [found.candidate.layout for found in baselines(of.space)]
    divided = next(layout for layout in layouts if any(map(any, of.space.specs(layout).inputs)))
    plan = Plan(of.analysis, of.space, find_target(jax.devices()), divided, Evidence())
    report = plan.check()
    assert report.passed and report.worst.error < 1e-4


def test_a_plan_that_computes_something_else_is_told(fsdp, monkeypatch):
    """Its step is lowered from another workload: one that learns twice as fast."""
    target = find_target(jax.devices())
    other = make_problem(trace(workloads.mlp(rate=0.2)), target, "free", None)
    wrong = Plan(other.analysis, other.space, target, fsdp.layout, Evidence()).lower()
    monkeypatch.setattr(Plan, "lower", lambda self: wrong)
    with pytest.raises(PlanError, match=r"not compute what it should: .*\n.*state\['params'\]"):
        fsdp.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "trust",
            "nothing to compare with, the unsharded step does not run: no room",
        ),
        ("set_inputs", "init\\(\\) does not run unsharded: no room"),
        ("load", "the plan's step cannot be loaded: no room"),
        ("numerics", "the plan's step does not run: no room"),
    ],
)
def test_what_keeps_a_check_from_running_is_told(fsdp, monkeypatch, call, message):
    full = Failure(stage=Stage.PROFILE, kind=Kind.OOM, message="no room")
    monkeypatch.setattr(LocalRunner, call, lambda *_: full)
    with pytest.raises(PlanError, match=message):
        fsdp.check()


def scaled(init):
    def step(state, batch):
        return {"w": state["w"] + jnp.mean(batch["x"]) * batch["rate"]}, {"m": jnp.mean(batch["x"])}

    shapes = {"x": jax.ShapeDtypeStruct((16, 8), "float32"), "rate": jax.ShapeDtypeStruct((), "f4")}
    return autoshard.Workload(step=step, init=init, batch=shapes)


def plan_of(workload, name="FSDP", mesh=None):
    target = find_target(jax.devices() if mesh is None else mesh)
    subject = make_problem(trace(workload), target, "free", None)
    chosen = next(b for b in baselines(subject.space) if b.name == name)
    layout = chosen.candidate.layout
    return Plan(subject.analysis_for(layout), subject.space, target, layout, Evidence())


def ones():
    return {"w": jnp.ones((64, 64))}


def test_plain_numbers_are_taken_as_jit_takes_them():
    plan = plan_of(scaled(ones))
    x = np.ones((16, 8), np.float32)
    for rate in (1, 1.0, True):
        state, _ = plan.step(plan.init(), {"x": x, "rate": rate})
        placed, _ = plan.step(plan.init(), plan.put({"x": x, "rate": rate}))
        np.testing.assert_array_equal(state["w"], np.full((64, 64), 2.0))
        np.testing.assert_array_equal(placed["w"], state["w"])
    for wrong in ("1", 1j):
        with pytest.raises(PlanError, match=r"batch\['rate'\]: got .*, expected float32\[\]"):
            plan.put({"x": x, "rate": wrong})
    whole = Leaf(path="batch['n']", key="['n']", shape=(), dtype=np.dtype("int32"))
    assert _number(True, whole) == 1 and _number(7, whole).dtype == whole.dtype
    for wrong in (1.5, 1 << 40):
        with pytest.raises(PlanError, match=r"batch\['n'\]: got .*, expected int32\[\]"):
            _number(wrong, whole)


@pytest.mark.parametrize("name", ["FSDP", "replicated"])
def test_what_is_placed_shares_no_memory_with_numpy_either(name):
    raw = np.zeros(64 * 64 * 4 + 64, np.uint8)  # so placed, XLA:CPU takes an array as it is
    start = -raw.ctypes.data % 64
    w = raw[start : start + 64 * 64 * 4].view(np.float32).reshape(64, 64)
    placed = plan_of(scaled(ones), name).place({"w": w})
    jax.block_until_ready(placed)
    w[:] = 7
    assert np.max(placed["w"]) == 0


@pytest.mark.parametrize("count", [4, 8])
def test_constraints_in_init_are_taken_out_as_those_of_the_step_are(count):
    """They are for other devices, or the same in another order."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count][::-1]), ("data",))
    over = jax.NamedSharding(mesh, jax.P("data"))

    def init():
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, over), ones())

    plan = plan_of(scaled(init))
    state = plan.init()
    assert shardings_of(state) == plan.state_shardings
    np.testing.assert_array_equal(state["w"], np.ones((64, 64)))


def test_a_mesh_that_is_set_is_for_the_users_functions_alone(tmp_path):
    """Constraints of bare PartitionSpecs need one; what is lowered must not depend on it."""

    def init():
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, jax.P("data")), ones())

    def evaluate(state, batch):
        return jax.lax.with_sharding_constraint(state["w"] * 2, jax.P("data"))

    def sample(key):
        x = jax.jit(lambda: jnp.ones((16, 8)), out_shardings=jax.P("data"))()
        return {"x": x, "rate": jnp.float32(1)}

    outside = plan_of(scaled(ones))
    outside.save(str(tmp_path / "plan.json"))
    batch = {"x": np.ones((16, 8), np.float32), "rate": np.float32(1)}
    devices = np.array(jax.devices()[::-1]).reshape(4, 2)
    with jax.set_mesh(jax.sharding.Mesh(devices, ("data", "model"))):
        inside = plan_of(dataclasses.replace(scaled(init), sample=sample))
        state, _ = inside.step(inside.init(), inside.put(batch))
        doubled = inside.jit(evaluate)(state, batch)
        assert inside.check().passed
        digest = inside.lower().digest
        loaded = autoshard.load_plan(tmp_path / "plan.json", lambda: scaled(ones), jax.devices())
        placed = loaded.place(inside.init())
        alone = plan_of(scaled(ones), "replicated", jax.devices()[:1])
        both = alone.jit(lambda state, batch: state["w"] + batch)(alone.init(), np.float32(1))
    assert (inside.digest, digest) == (outside.digest, outside.lower().digest)
    np.testing.assert_array_equal(doubled, np.full((64, 64), 4.0))
    np.testing.assert_array_equal(placed["w"], np.ones((64, 64)))
    np.testing.assert_array_equal(both, np.full((64, 64), 2.0))
    assert loaded.digest == outside.digest


def test_a_mesh_of_explicit_axes_that_is_set_leaves_nothing_to_search():
    explicit = jax.make_mesh((8,), ("data",))
    with (
        jax.set_mesh(explicit),
        pytest.raises(WorkloadError, match="whose axes 'data' are Explicit"),
    ):
        autoshard.search(lambda: scaled(ones), jax.devices())


def test_evaluation_of_a_step_as_written_keeps_what_every_evaluation_does():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    by_rows = jax.NamedSharding(mesh, jax.P("data"))

    def step(state, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], by_rows)
        return {"w": state["w"] + jnp.mean(x)}, {"m": jnp.mean(x)}

    workload = autoshard.Workload(
        step=step, init=ones, batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")}
    )
    plan = plan_of(workload, "as annotated", mesh)
    x = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    twice = plan.jit(lambda state, batch: batch["x"] * 2)
    for batch in ({"x": x}, plan.put({"x": x}), {"x": jax.device_put(x, jax.devices()[1])}):
        result = twice(plan.init(), batch)
        assert result.sharding.is_fully_replicated
        np.testing.assert_array_equal(result, 2 * x)
    np.testing.assert_array_equal(twice(plan.init(), {"x": x[:3]}), 2 * x[:3])
    np.testing.assert_array_equal(twice(plan.init(), {"x": x[0]}), 2 * x[0])
