"""Bad input gets an error that says what was got, what was expected, where, and what to do."""

import concurrent.futures
import dataclasses
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import JournalError, LayoutError, NoPlanError, TargetError, WorkloadError
from autoshard.records.numerics import LeafError, NumericsReport
from autoshard.records.trial import Estimate, Failure, Kind, Stage
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.tuner import compiling
from autoshard.tuner import diagnosis as no_plan
from tests import workloads
from tests.workloads import mlp, stateless

DEVICES = jax.devices()
SMALL = autoshard.Budget(candidates=16, compiles=1, profiles=0)
MEASURE = autoshard.Budget(candidates=16, compiles=2, profiles=2, rounds=2)


def keep(state, batch):
    return state, {"mean": batch.mean()}


def raise_in_step(state, batch):
    raise ZeroDivisionError("the user's own mistake")


def test_a_step_that_does_not_trace_raises_the_users_own_error(quick):
    with pytest.raises(ZeroDivisionError, match="the user's own mistake") as caught:
        quick(stateless(raise_in_step))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "raise_in_step" and frames[-1].filename == __file__
    assert any("while tracing step(state, batch)" in n for n in caught.value.__notes__)

    def shapes(state, batch):
        return {"w": state["w"] @ batch}, {}

    with pytest.raises(TypeError, match="dot_general"):
        quick(stateless(shapes))

    def branches(state, batch):
        return (state, {}) if batch.sum() > 0 else (state, {"x": 1.0})

    with pytest.raises(jax.errors.TracerBoolConversionError):
        quick(stateless(branches))


def test_an_init_that_does_not_trace_raises_the_users_own_error(quick):
    def init():
        raise OSError("no checkpoint")

    with pytest.raises(OSError, match="no checkpoint") as caught:
        quick(stateless(keep, init=init))
    assert any("while tracing init()" in n for n in caught.value.__notes__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"w": s["w"].T},
            r"state\['w'\]: got float32\[16, 8\], expected float32\[8, 16\]",
        ),
        (
            lambda s: {"w": s["w"].astype(jnp.bfloat16)},
            r"state\['w'\]: got bfloat16.*cast or reshape",
        ),
        (lambda s: {}, r"missing: state\['w'\]"),
        (lambda s: {**s, "v": s["w"]}, r"unexpected: state\['v'\]"),
        (lambda s: [s["w"]], r"missing: state\['w'\]; unexpected: state\[0\]"),
        (lambda s: {"w": (s["w"],)}, r"missing: state\['w'\]; unexpected: state\['w'\]\[0\]"),
    ],
)
def test_a_new_state_that_differs_from_the_old_names_the_leaf(quick, change, message):
    with pytest.raises(WorkloadError, match=message):
        quick(stateless(lambda s, b: (change(s), {})))


def test_a_step_that_returns_something_else(quick):
    with pytest.raises(WorkloadError, match=r"must return .new state, metrics., got dict"):
        quick(stateless(lambda s, b: s))
    with pytest.raises(WorkloadError, match="got tuple of 3"):
        quick(stateless(lambda s, b: (s, {}, {})))


def test_a_model_fn_that_returns_something_else(quick):
    with pytest.raises(WorkloadError, match=r"must return an autoshard.Workload, got tuple"):
        quick(lambda: (keep, None, None))
    with pytest.raises(WorkloadError, match="got NoneType"):
        quick(lambda: None)
    with pytest.raises(TypeError):
        quick("model.py")


def test_a_batch_of_values_is_no_batch_of_shapes(quick):
    with pytest.raises(WorkloadError, match=r"pytree of jax.ShapeDtypeStruct, got a leaf 3"):
        quick(stateless(keep, batch={"x": 3}))


def test_examples_that_no_mesh_axis_divides_are_left_together(quick):
    plan = quick(lambda: mlp(batch=7))
    # Whether dividing the model pays, and an example's features with it, is for this machine's
    # calibration to say.
    for sharding in plan.batch_shardings.values():
        assert sharding.shard_shape((7, workloads.WIDTH))[0] == 7, sharding
    judged = [t for t in plan.evidence.trials if isinstance(t.propagated, Estimate)]
    held = [t.propagated.state_bytes for t in judged]
    assert min(held) <= max(held) / 4, "the model still divides"
    state, metrics = plan.step(plan.init(), plan.put(workloads.batch_of(0, 7)))
    del state
    assert jnp.isfinite(metrics["loss"])


def test_a_workload_that_nothing_divides_is_replicated(quick):
    def step(state, batch):
        return {"w": state["w"] + batch.sum()}, {"mean": batch.mean()}

    odd = {"init": lambda: {"w": jnp.ones((7, 5))}, "batch": jax.ShapeDtypeStruct((3,), "float32")}
    plan = quick(stateless(step, **odd))
    assert plan.layout.activation_rules == plan.layout.state_rules == ()
    state, _ = plan.step(plan.init(), plan.put(np.ones(3, np.float32)))
    np.testing.assert_array_equal(state["w"], np.full((7, 5), 4.0))


@pytest.mark.parametrize(
    ("step", "init", "batch"),
    [
        (lambda s, b: (s, {"mean": b.mean()}), dict, jax.ShapeDtypeStruct((16, 8), "float32")),
        (lambda s, b: ({"w": s["w"] * 2}, {}), lambda: {"w": jnp.ones((8, 8))}, {}),
        (lambda s, b: ({"w": s["w"] * b}, {}), lambda: {"w": jnp.ones(8)}, jnp.float32(3)),
        (lambda s, b: (s, {}), lambda: {"n": jnp.int8(1)}, jax.ShapeDtypeStruct((0, 4), "bool")),
    ],
    ids=["no state", "no batch", "a scalar batch", "nothing at all"],
)
def test_empty_and_scalar_parts_work(quick, step, init, batch):
    plan = quick(lambda: autoshard.Workload(step=step, init=init, batch=batch), budget=SMALL)
    values = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), batch)
    state, metrics = plan.step(plan.init(), plan.put(values))
    expected = step(init(), values)
    jax.tree.map(np.testing.assert_array_equal, (state, metrics), expected)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ([], "the mesh is empty"),
        ((), "the mesh is empty"),
        (jax.sharding.Mesh(np.empty((), object), ()), "the mesh is empty"),
        (jax.sharding.Mesh(np.empty((0,), object), ("x",)), "the mesh is empty"),
        ([DEVICES[0], DEVICES[0]], "names a device twice"),
        ("v5p", r"no readable shape.*v5p:"),
        ("v5p:4x4", "got 2 extents"),
        ("h100:0x8", "h100:0x8"),
        ("cpu", r"expected 'chip:shape'.*autoshard.targets\(\)"),
        (8, "sequence of devices, got int"),
        (None, "sequence of devices, got NoneType"),
        ([0, 1], "expected JAX devices, got int: 0"),
        (jax.sharding.AbstractMesh((8,), ("x",)), "got AbstractMesh"),
    ],
)
def test_a_mesh_that_names_no_devices(mesh, message):
    with pytest.raises(TargetError, match=message):
        autoshard.search(mlp, mesh)


def test_memory_that_is_no_memory():
    with pytest.raises(TargetError, match="memory_bytes must be positive, got 0"):
        autoshard.search(mlp, DEVICES, memory_bytes=0)
    for headroom in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="memory_headroom must be in"):
            autoshard.search(mlp, DEVICES, memory_headroom=headroom)


def test_a_model_that_fits_no_layout_is_told_how_far_it_is_and_what_helps(quick):
    with pytest.raises(NoPlanError) as caught:
        quick(memory_bytes=30_000, budget=SMALL)
    text = str(caught.value)
    assert "no layout fits 28 KiB a device on 8 fake cpu devices (memory_bytes" in text
    assert "too much (state" in text and "mesh " in text
    assert "a batch of about 0." in text and "devices instead of 8" in text
    assert "not searched, if they save memory: ['rate=0.1'," in text
    needed = int(text.split("memory_bytes of at least ")[1].split(",")[0])
    plan = quick(memory_bytes=needed, budget=SMALL)
    assert plan.trial.compiled.peak_memory_bytes <= 0.95 * needed + 1
    closest = text.split("closest needs ")[1].split(",")[0]
    assert closest.endswith("KiB") and abs(float(closest.split()[0]) - 0.95 * needed / 1024) < 1


@pytest.mark.parametrize("kind", [Kind.CRASH, Kind.TIMEOUT])
def test_layouts_that_fit_and_do_not_compile_are_not_told_to_be_too_large(
    quick, searched, monkeypatch, kind
):
    """Beside a baseline that rung 1 alone finds too large."""
    peaks = {
        t.baseline: t.propagated.peak_memory_bytes
        for t in searched.plan.evidence.trials
        if t.baseline and isinstance(t.propagated, Estimate)
    }
    limit = sum(sorted(peaks.values())[-2:]) // 2
    assert min(peaks.values()) < limit < max(peaks.values())
    failure = Failure(stage=Stage.COMPILE, kind=kind, message="the compiler is unwell")
    monkeypatch.setattr(compiling, "compile_in_process", lambda request: failure)
    with pytest.raises(NoPlanError) as caught:
        quick(memory_bytes=limit, memory_headroom=0.0, budget=SMALL)
    text = str(caught.value)
    assert f" {kind})" in text and f"in compile: {kind}: the compiler is unwell" in text
    assert f"  - {kind}: " in text and "too large by rung 1 alone" in text
    assert "no layout fits" not in text and "memory_bytes of at least" not in text


def in_parts(parts: int, width: int = 16) -> autoshard.Workload:
    """Its activations are nearly all its memory, and those of one part of the batch at a time."""

    def step(w, x):
        def part(total, rows):
            def loss(w):
                return jnp.sum(jnp.tanh(rows @ w) ** 2)

            return total + jax.grad(loss)(w), None

        total, _ = jax.lax.scan(part, jnp.zeros_like(w), x.reshape(parts, -1, width))
        return w - 1e-3 * total, {"loss": jnp.sum(total)}

    return autoshard.Workload(
        step=step,
        init=lambda: jnp.ones((width, 8 * width)),
        batch=jax.ShapeDtypeStruct((2**14, width), jnp.float32),
    )


def test_what_fits_nowhere_is_told_which_knob_value_would_do(quick):
    with pytest.raises(NoPlanError) as caught:
        quick(in_parts, knobs={"parts": (1, 2)}, memory_bytes=800_000, budget=SMALL)
    text = str(caught.value)
    assert "smallest peaks are: parts=2" in text
    assert "not searched, if they save memory: ['width=16']" in text
    (value,) = {int(x) for x in re.findall(r"parts=(\d+): by rung 1 about", text)}
    assert value > 2
    plan = quick(in_parts, knobs={"parts": (value,)}, memory_bytes=800_000, budget=SMALL)
    assert plan.knobs == {"parts": value}


def test_advice_traces_the_model_once_for_each_knob_and_says_what_it_raised(quick):
    """Tracing a large model takes minutes."""
    traced = []

    def model_fn(parts: int, other: int) -> autoshard.Workload:
        traced.append((parts, other))
        if other > 1:
            raise ArithmeticError("the user's own: other is 1 at most\nand more lines")
        return in_parts(1)

    with pytest.raises(NoPlanError) as caught:
        quick(model_fn, knobs={"parts": (1,), "other": (1,)}, memory_bytes=100_000, budget=SMALL)
    text = str(caught.value)
    assert traced == [(1, 1), (1, 8), (8, 1)]
    said = "other=8 cannot be judged: ArithmeticError: the user's own: other is 1 at most."
    assert said in text.splitlines()
    assert re.search(
        r"^parts=8: by rung 1 about .* MiB on .*, which is still too much\.$", text, re.M
    )


def test_only_what_fits_is_planned(quick, searched):
    """With room for some layouts, the plan is one of them, whatever is faster."""
    compiled = [t.compiled for t in searched.plan.evidence.trials if t.compiled and t.baseline]
    limit = min(c.peak_memory_bytes for c in compiled) + 1000
    judged = [t.propagated.peak_memory_bytes for t in searched.plan.evidence.trials]
    assert max(judged) > 2 * limit
    plan = quick(
        memory_bytes=limit,
        memory_headroom=0.0,
        budget=autoshard.Budget(candidates=16, compiles=4, profiles=0),
    )
    assert plan.trial.compiled.peak_memory_bytes <= limit == plan.evidence.memory_limit_bytes
    ranked = [plan.evidence.trials[i].compiled.peak_memory_bytes for i in plan.evidence.ranking]
    assert max(ranked) <= limit


def test_outputs_that_are_never_finite(calibration):
    def model_fn():
        return stateless(
            lambda s, b: ({"w": s["w"] + jnp.mean(b @ s["w"])}, {"mean": b.mean()}),
            init=lambda: {"w": jnp.full((8, 16), jnp.nan)},
        )()

    with pytest.raises(NoPlanError, match="no candidate computes what the unsharded") as caught:
        autoshard.search(model_fn, DEVICES, budget=MEASURE, calibration=calibration)
    assert "state['w']" in str(caught.value) and "not finite" in str(caught.value)


def test_steps_that_differ_from_the_unsharded_one_name_the_leaf(calibration, monkeypatch):
    """Every candidate is judged wrong here, as by a compiler that is."""
    leaf = LeafError(path="state['w']", error=0.3, tolerance=1e-4)
    report = NumericsReport(steps=2, state=(leaf,), metrics=())
    monkeypatch.setattr(ChildRunner, "numerics", lambda *_: report)
    with pytest.raises(NoPlanError, match="no candidate computes what the unsharded") as caught:
        autoshard.search(lambda: mlp(), DEVICES, budget=MEASURE, calibration=calibration)
    said = r"\d of \d: after 2 steps 1 of 1 leaves differ .* state\['w'\]: error 0.3, tolerance"
    assert re.search(said, str(caught.value))


def test_what_took_too_long_on_the_devices_is_to_have_longer_there():
    def told(*stages):
        late = [Failure(stage=s, kind=Kind.TIMEOUT, message="killed") for s in stages]
        return "\n".join(no_plan._why_stopped(late))

    assert "Budget(measure_seconds=...)" in told(Stage.PROFILE)
    assert "compile_seconds" not in told(Stage.PROFILE)
    assert "measure_seconds" not in told(Stage.COMPILE)
    both = told(Stage.COMPILE, Stage.PROFILE)
    assert "measure_seconds" in both and "compile_seconds" in both


def test_unknown_knobs_and_knobs_without_values(quick):
    def model_fn(rate=0.1):
        return mlp(rate)

    with pytest.raises(WorkloadError, match="takes no knob 'rat'; it takes 'rate'"):
        quick(model_fn, knobs={"rat": (1,)})
    with pytest.raises(WorkloadError, match="takes no knob 'rate'; it takes none"):
        quick(lambda: mlp(), knobs={"rate": (1,)})
    for values in ((), "none", 3, {1, 2}):
        with pytest.raises(WorkloadError, match="knob 'rate': expected a sequence of values, got"):
            quick(model_fn, knobs={"rate": values})
    with pytest.raises(WorkloadError, match="values are str, int, float, bool or None, got array"):
        quick(model_fn, knobs={"rate": (np.ones(2),)})
    with pytest.raises(TypeError, match="required"):
        quick(lambda rate: mlp(rate))


def test_knobs_that_change_the_global_batch(quick):
    with pytest.raises(WorkloadError, match="may not change the global batch") as caught:
        quick(lambda size: mlp(batch=size), knobs={"size": (32, 64)})
    assert "batch['x'] is float32[32, 64] with {'size': 32} and float32[64, 64] with" in str(
        caught.value
    )
    with pytest.raises(WorkloadError, match=r"batch\['z'\] is absent with {'more': False} and"):
        quick(
            lambda more: dataclasses.replace(
                mlp(),
                batch={**mlp().batch, **({"z": mlp().batch["x"]} if more else {})},
                step=lambda s, b: mlp().step(s, {"x": b["x"], "y": b["y"]}),
            ),
            knobs={"more": (False, True)},
        )


def test_when_no_knob_value_traces_the_first_error_is_raised(quick):
    def model_fn(kind):
        raise LookupError(f"no {kind}")

    with pytest.raises(LookupError, match="no a"):
        quick(model_fn, knobs={"kind": ("a", "b")})


def test_keys_whose_values_depend_on_the_sharding_are_refused(quick):
    def init(impl="rbg"):
        return {"w": jnp.ones((8, 16)), "key": jax.random.key(0, impl=impl)}

    with pytest.raises(WorkloadError, match=r"state\['key'\] is a non-partitionable RNG key.*fry"):
        quick(stateless(keep, init=init))

    def step(state, batch):
        noise = jax.random.normal(jax.random.key(1, impl="unsafe_rbg"), (8, 16))
        return {"w": state["w"] + noise}, {}

    with pytest.raises(WorkloadError, match=r"non-partitionable RNG.*test_bad_input.py"):
        quick(stateless(step))

    def random_init():
        return {"w": jax.random.normal(jax.random.key(0, impl="rbg"), (8, 16))}

    with pytest.raises(WorkloadError, match="non-partitionable RNG"):
        quick(stateless(keep, init=random_init))


def test_large_closures_are_warned_about_with_sizes(quick):
    table = np.ones((600, 512), np.float32)
    inner = jnp.ones((513, 512))

    def step(state, batch):
        extra = jax.jit(lambda x: x + inner[0, 0])(batch.sum()) + jnp.asarray(table)[0, 0]
        return {"w": state["w"] + extra}, {}

    with pytest.warns(UserWarning, match="step closes over 2279424 bytes") as caught:
        quick(stateless(step), budget=SMALL)
    (warning,) = caught
    assert "float32[600, 512] (1228800 bytes), float32[513, 512] (1050624 bytes)" in str(
        warning.message
    )

    def init():
        return {"w": jnp.asarray(table)[:8, :16]}

    with pytest.warns(UserWarning, match=r"init closes over 1228800 bytes"):
        quick(stateless(keep, init=init), budget=SMALL)
    quick(stateless(lambda s, b: ({"w": s["w"] + table[0, :16]}, {})), budget=SMALL)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (lambda key: jnp.ones((8, 7)), r"gives batch as float32\[8, 7\], expected float32\[8, 8\]"),
        (
            lambda key: np.ones((8, 8), "float16"),
            r"gives batch as float16\[8, 8\], expected float32",
        ),
        (lambda key: {"x": jnp.ones((8, 8))}, "must have the structure of batch"),
        (lambda key: 1.0, r"gives batch as float\[\], expected"),
    ],
)
def test_a_sample_of_the_wrong_kind_is_told_before_anything_is_searched(
    calibration, sample, message
):
    told = []
    with pytest.raises(WorkloadError, match=message):
        autoshard.search(
            stateless(keep, sample=sample),
            DEVICES,
            budget=MEASURE,
            calibration=calibration,
            callbacks=(told.append,),
        )
    assert [e.text for e in told] == ["tracing the step"]


def test_a_sample_that_raises_is_the_users_own(calibration):
    def sample(key):
        raise FileNotFoundError("corpus.bin")

    with pytest.raises(FileNotFoundError, match=r"corpus.bin") as caught:
        autoshard.search(stateless(keep, sample=sample), DEVICES, calibration=calibration)
    assert any("sample(key)" in n for n in caught.value.__notes__)


def test_fix_that_names_nothing(quick):
    with pytest.raises(LayoutError, match=r"fix\['bach'\] names nothing: expected a logical axis"):
        quick(fix={"bach": "x"})
    with pytest.raises(LayoutError, match=r"state\['count'\]|path of a state leaf"):
        quick(fix={"state['params']['w3']": "x"})
    with pytest.raises(LayoutError, match=r"fix\['batch'\] names mesh axes \['data'\], expected"):
        quick(fix={"batch": "data"})
    with pytest.raises(LayoutError, match=r"has 3 dimensions, the leaf 2"):
        quick(fix={"['params']['w1']": ("x", None, None)})
    with pytest.raises(LayoutError, match=r"w'\]\[0\] of 7 is fixed to x, which takes 8 ways"):
        quick(
            stateless(
                lambda s, b: ({"w": s["w"] + b.mean()}, {}), init=lambda: {"w": jnp.ones((7, 2))}
            ),
            fix={"['w']": "x"},
        )
    one = jax.sharding.Mesh(np.array(DEVICES[:1]), ("data",))
    assert quick(mesh=one, fix={"batch": "data"}).layout.mesh == ()


def test_a_journal_that_is_none_is_refused_before_anything_is_searched(quick, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my precious notes\n")
    with pytest.raises(JournalError, match="is not an autoshard journal"):
        quick(journal=path)
    assert path.read_text() == "my precious notes\n"


def test_budgets_that_are_none():
    for bad in ({"candidates": 0}, {"compiles": 0}, {"profiles": -1}, {"rounds": 1.5}):
        with pytest.raises(ValueError, match=f"Budget.{next(iter(bad))} must be a positive whole"):
            autoshard.Budget(**bad)
    for bad in (
        {"seconds": 0},
        {"compile_seconds": -1.0},
        {"compile_seconds": None},
        {"measure_seconds": float("nan")},
    ):
        with pytest.raises(ValueError, match=f"Budget.{next(iter(bad))} must be positive"):
            autoshard.Budget(**bad)


def test_a_seed_that_draws_no_batch_is_told_at_once():
    with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
        autoshard.search(None, jax.devices(), seed=-1)


@pytest.mark.parametrize("stage", [Stage.TRACE, Stage.PROPAGATE, Stage.COMPILE])
def test_a_callback_that_raises_costs_no_search(quick, caplog, stage):
    told, others = [], []

    def callback(event):
        told.append(event)
        if event.stage is stage:
            raise ZeroDivisionError("the user's own mistake")

    plan = quick(callbacks=(callback, others.append))
    assert plan.evidence.ended == "finished"
    assert told[-1].stage is stage and sum(e.stage is stage for e in told) == 1
    assert len(others) > len(told)
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert "not called again" in record.message and "own mistake" in caplog.text


def test_an_executor_of_processes_works(calibration):
    """What is submitted pickles: nothing of the model goes with it."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        plan = autoshard.search(
            mlp, DEVICES, executor=executor, budget=SMALL, calibration=calibration
        )
    assert isinstance(plan.trial.compiled, Estimate)
