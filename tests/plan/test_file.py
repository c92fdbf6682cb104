"""Saving plans, loading them, and saying field by field why one does not belong here."""

import copy
import dataclasses
import json
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autoshard
from autoshard import api
from autoshard.errors import PlanError
from autoshard.lowering.problem import make_problem
from autoshard.plan import load as validity
from autoshard.plan.file import describe_target, read_plan
from autoshard.plan.plan import Plan
from autoshard.program.program import trace
from autoshard.records.evidence import Evidence
from autoshard.records.trial import Collective, Estimate
from autoshard.rungs.worker import process as worker_module
from autoshard.space.baselines import baselines
from autoshard.target.catalogue import catalogue
from autoshard.target.target import Target, find_target
from autoshard.target.topology import parse_topology
from tests import workloads
from tests.hardware import needs
from tests.workloads import mlp

DEVICES = jax.devices()


@pytest.fixture(scope="module")
def saved(searched, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "deep" / "plan.json"
    searched.plan.save(path)
    return path


@pytest.fixture(scope="module")
def data(saved):
    return json.loads(saved.read_text())


@pytest.fixture
def altered(data, tmp_path):
    """The saved plan with one thing changed."""

    def alter(change):
        new = copy.deepcopy(data)
        change(new)
        path = tmp_path / "altered.json"
        path.write_text(json.dumps(new))
        return path

    return alter


@pytest.fixture
def no_compiler(monkeypatch):
    """For errors that must come before anything is compiled."""

    def refuse(*_):
        raise AssertionError("compiled before the check")

    monkeypatch.setattr(validity, "_compile_here", refuse)
    monkeypatch.setattr(validity, "compile_in_process", refuse)


def refused(path, model_fn=mlp, mesh=DEVICES, **options):
    with pytest.raises(PlanError) as caught:
        autoshard.load_plan(path, model_fn, mesh, **options)
    return caught.value


def test_a_loaded_plan_is_the_saved_one(searched, saved, tmp_path):
    old, new = searched.plan, autoshard.load_plan(saved, mlp, DEVICES)
    assert new.layout == old.layout and new.knobs == old.knobs
    assert new.state_shardings == old.state_shardings
    assert new.batch_shardings == old.batch_shardings
    assert new.lower().digest == old.lower().digest
    assert new.evidence == old.evidence
    assert str(new) == str(old)
    state, metrics = new.step(new.init(), new.put(workloads.batch_of(0)))
    expected = old.step(old.init(), old.put(workloads.batch_of(0)))
    np.testing.assert_array_equal(metrics["loss"], expected[1]["loss"])
    np.testing.assert_array_equal(state["params"]["w1"], expected[0]["params"]["w1"])
    again = tmp_path / "again.json"
    new.save(again)
    a, b = json.loads(saved.read_text()), json.loads(again.read_text())
    assert {**a, "created": ""} == {**b, "created": ""}


def test_saving_is_whole_or_not_at_all(searched, saved, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("precious")
    broken = copy.copy(searched.plan)
    broken.evidence = dataclasses.replace(broken.evidence, notes=(object(),))
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["plan.json"]
    searched.plan.save(path)
    assert read_plan(path).candidate == searched.plan.candidate
    assert os.listdir(tmp_path) == ["plan.json"]


def test_no_file_and_no_plan_file(tmp_path, saved):
    with pytest.raises(PlanError, match=r"cannot read the plan .*nowhere.json"):
        read_plan(tmp_path / "nowhere.json")
    with pytest.raises(PlanError, match="cannot read the plan"):
        read_plan(tmp_path)
    path = tmp_path / "plan.json"
    for text, message in (
        ("", "not JSON"),
        ("step,loss\n1,2\n", "not JSON"),
        ("[1, 2]", "format is 'list'"),
        ('{"format": "autoshard-journal", "schema": 1}', "format is 'autoshard-journal'"),
        ('{"format": "autoshard-plan", "schema": 0}', "schema 0, this version reads 1"),
        ('{"format": "autoshard-plan", "schema": 2}', "search again"),
        ('{"format": "autoshard-plan", "schema": 1}', "damaged"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            read_plan(path)
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(PlanError, match="cannot read"):
        read_plan(path)


def test_a_torn_file_is_refused_wherever_it_ends(saved, tmp_path):
    text = saved.read_text()
    path = tmp_path / "torn.json"
    for cut in range(1, len(text) - 2, len(text) // 40):
        path.write_text(text[:cut])
        with pytest.raises(PlanError, match="cut off"):
            read_plan(path)


def places(data, at=()):
    """Every place in a JSON value, lists by their first element only."""
    if at:
        yield at
    if isinstance(data, (dict, list)):
        inner = data.items() if isinstance(data, dict) else enumerate(data[:1])
        for key, value in inner:
            yield from places(value, (*at, key))


def test_a_damaged_field_is_a_plan_error_and_nothing_else(data, tmp_path):
    """Removes or replaces each field in turn: read, or refused as damaged; never another error."""
    small = {**data, "evidence": {**data["evidence"]}}
    best = data["evidence"]["ranking"][0]
    small["evidence"]["trials"] = [data["evidence"]["trials"][best]]
    small["evidence"]["ranking"] = [0]
    path = tmp_path / "damaged.json"
    refusals = 0
    for place in places(small):
        for value in (None, "nonsense", -1, [], {"a": [1]}, "remove"):
            new = copy.deepcopy(small)
            holder = new
            for key in place[:-1]:
                holder = holder[key]
            if value == "remove":
                del holder[place[-1]]
            else:
                holder[place[-1]] = value
            path.write_text(json.dumps(new))
            try:
                read_plan(path)
            except PlanError:
                refusals += 1
    assert refusals > 200


def test_a_plan_that_is_not_its_winner_is_damaged(altered):
    def change(data):
        evidence = data["evidence"]
        winner = evidence["trials"][evidence["ranking"][0]]["candidate"]
        others = (t["candidate"] for t in evidence["trials"] if t["candidate"] != winner)
        data["candidate"] = next(others)

    with pytest.raises(PlanError, match="not its candidate"):
        read_plan(altered(change))
    with pytest.raises(PlanError, match="IndexError"):
        read_plan(altered(lambda d: d["evidence"]["ranking"].append(10**6)))


def test_another_model_is_told_leaf_by_leaf(saved, no_compiler):
    error = refused(saved, lambda: mlp(width=32))
    assert "is for another model" in str(error)
    assert "state['params']['w1']: recorded float32[64, 128], got float32[32, 128]" in str(error)
    assert "batch['x']: recorded float32[32, 64], got float32[32, 32]" in error.differences
    assert len(error.differences) == 6, "two matrices, their momenta, x and y; nothing else"
    assert all(d.strip() in str(error) for d in error.differences)


def test_another_batch_dtype_and_structure(saved, no_compiler):
    error = refused(saved, lambda: mlp(batch=64))
    assert error.differences == (
        "batch['x']: recorded float32[32, 64], got float32[64, 64]",
        "batch['y']: recorded float32[32, 64], got float32[64, 64]",
    )
    assert any("bfloat16" in d for d in refused(saved, lambda: mlp(dtype="bfloat16")).differences)

    def smaller():
        w = mlp()

        def init():
            return {k: v for k, v in w.init().items() if k != "count"}

        def step(state, batch):
            new, metrics = w.step({**state, "count": jnp.int32(0)}, batch)
            return {k: v for k, v in new.items() if k != "count"}, metrics

        return dataclasses.replace(w, init=init, step=step)

    error = refused(saved, smaller)
    assert error.differences == ("state['count']: recorded int32[], got nothing",)


def test_the_same_leaves_and_another_computation(saved, no_compiler):
    error = refused(saved, lambda: mlp(rate=0.2))
    (difference,) = error.differences
    assert difference.startswith("program digest: recorded")
    assert "other computation" in difference


def test_a_plan_whose_digest_depends_on_sites_is_told_to_be_old(altered, no_compiler):
    """As plans were before digests were those of the step alone."""
    error = refused(altered(lambda d: d["program"].update(digest="0" * 24)))
    assert "made by an earlier autoshard" in str(error) and "search again" in str(error)


def test_another_number_of_devices(saved, no_compiler):
    error = refused(saved, mesh=DEVICES[:4])
    assert error.differences == ("device_count: recorded 8, got 4",)
    error = refused(saved, mesh=DEVICES[:4], check_target=False)
    assert error.differences == ("device_count: recorded 8, got 4",)


def test_another_kind_of_device_unless_that_is_allowed(altered, saved):
    def change(data):
        data["target"].update(platform="tpu", device_kind="TPU v5p")

    path = altered(change)
    error = refused(path)
    assert error.differences == (
        "platform: recorded 'tpu', got 'cpu'",
        "device_kind: recorded 'TPU v5p', got 'cpu'",
    )
    plan = autoshard.load_plan(path, mlp, DEVICES, check_target=False)
    assert plan.lower().digest == autoshard.load_plan(saved, mlp, DEVICES).lower().digest
    assert refused(path, lambda: mlp(width=32), check_target=False).differences


def test_an_incompatible_version(altered, no_compiler):
    error = refused(altered(lambda d: d["versions"].update(jax="9.1.0")))
    assert error.differences == (f"jax: recorded 9.1.0, got {jax.__version__}",)


def test_a_version_that_lowers_differently_is_noted(altered):
    def change(data):
        data["versions"]["jax"] = "0.9.9"
        data["program"]["digest"] = "0" * 24

    plan = autoshard.load_plan(altered(change), mlp, DEVICES)
    assert any("lowers differently than with jax 0.9.9" in n for n in plan.evidence.notes)


def test_knobs_the_model_no_longer_takes(saved, quick, tmp_path, no_compiler):
    path = tmp_path / "knobs.json"
    quick(lambda rate: mlp(rate), knobs={"rate": (0.1,)}).save(path)
    error = refused(path, lambda: mlp())
    assert "knobs: recorded {'rate': 0.1}" in error.differences[0]
    assert "no knob 'rate'" in error.differences[0]


def test_too_much_memory_is_an_error_before_anything_is_allocated(saved, monkeypatch):
    monkeypatch.setattr(jax, "device_put", None)
    error = refused(saved, memory_bytes=30_000)
    assert "the plan needs" in str(error) and "29 KiB (memory_bytes)" in str(error)


def test_a_plan_that_no_longer_compiles_is_an_error(saved, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", broken("INTERNAL: the compiler is unwell"))
    assert "does not compile here: crash: INTERNAL: the compiler is unwell" in str(refused(saved))


def broken(text):
    """A compiler that refuses everything."""

    def compile_(lowered):
        raise jax.errors.JaxRuntimeError(text)

    return compile_


def test_the_program_that_is_checked_is_the_program_that_runs(saved, monkeypatch):
    compiled = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda low: compiled.append(low) or compile_(low)
    )
    monkeypatch.setattr(worker_module.WorkerProcess, "_start", None)  # no worker compiles
    plan = autoshard.load_plan(saved, mlp, DEVICES)
    assert len(compiled) == 1
    state, batch = plan.init(), plan.put(workloads.batch_of(0))
    heard = []

    def listen(name, seconds, **_):
        if "compile" in name:
            heard.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        plan.step(state, batch)
        assert heard == []
        jax.jit(lambda x: x * 5 - 1)(jnp.ones(5))
        assert heard, "the listener would have heard"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_compiling_takes_as_long_as_it_takes_unless_that_is_limited(saved, monkeypatch):
    begun, let_go = threading.Event(), threading.Event()
    compile_ = jax.stages.Lowered.compile

    def slow(lowered):
        begun.set()
        let_go.wait(30)
        return compile_(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    error = refused(saved, compile_seconds=0.2)
    let_go.set()
    assert begun.is_set()
    assert "does not compile here: timeout: it took longer than 0.2 s (compile_seconds)" in str(
        error
    )
    assert autoshard.load_plan(saved, mlp, DEVICES, compile_seconds=600.0).compiled is not None
    monkeypatch.setattr(jax.stages.Lowered, "compile", broken("INTERNAL: the compiler is unwell"))
    assert "the compiler is unwell" in str(refused(saved, compile_seconds=600.0))
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="compile_seconds must be above 0"):
            autoshard.load_plan(saved, mlp, DEVICES, compile_seconds=wrong)


def test_a_kernel_of_another_platform_is_a_plan_error(saved, tmp_path):
    """A Pallas kernel can be lowered for TPUs and GPUs, not for CPU devices."""

    def model_fn():
        workload = mlp()

        def step(state, batch):
            new, metrics = workload.step(state, batch)
            doubled = pl.pallas_call(
                lambda x, y: y.__setitem__(..., x[...] * 2),
                out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            )(jnp.ones((8, 128)) * metrics["loss"])
            return new, {**metrics, "loss": doubled[0, 0]}

        return dataclasses.replace(workload, step=step)

    error = refused(saved, model_fn)
    assert "cannot be lowered for 8 fake cpu devices: Only interpret mode" in str(error)


def test_a_plan_too_large_for_a_live_accelerator_is_a_plan_error(saved, monkeypatch):
    """There the compiler itself refuses what does not fit, in this process."""
    live = dataclasses.replace(find_target(DEVICES), platform="tpu", shared_host=False)
    monkeypatch.setattr(api, "find_target", lambda *_: live)
    text = "RESOURCE_EXHAUSTED: Used 65.97G of 15.75G hbm. Exceeded hbm capacity by 50.22G."

    monkeypatch.setattr(jax.stages.Lowered, "compile", broken(text))
    error = str(refused(saved, check_target=False))
    assert "needs 50.22 GiB more than 8 cpu devices have" in error and text in error
    text = "INTERNAL: the compiler is unwell"
    monkeypatch.setattr(jax.stages.Lowered, "compile", broken(text))
    assert f"does not compile here: crash: {text}" in str(refused(saved, check_target=False))


def test_collectives_that_differ_are_listed(altered, searched):
    """Of a layout that communicates, whichever was fastest."""
    trials = searched.plan.evidence.trials
    index, actual = next(
        (i, {c.kind for c in t.compiled.collectives})
        for i, t in enumerate(trials)
        if isinstance(t.compiled, Estimate) and t.compiled.collectives
    )

    def change(data):
        evidence = data["evidence"]
        evidence["ranking"] = [index]
        data["candidate"] = evidence["trials"][index]["candidate"]
        evidence["trials"][index]["compiled"]["collectives"] = [
            {
                "kind": "all_to_all",
                "group_size": 4,
                "mesh_axes": [],
                "bytes": 2**20,
                "count": 3,
                "source": "",
            }
        ]

    notes = autoshard.load_plan(altered(change), mlp, DEVICES).evidence.notes
    assert (
        "collectives differ from the record: all_to_all in groups of 4: recorded 3.0 MiB a step,"
        " now 0 B" in notes
    )
    assert all(any(kind in n and "recorded 0 B" in n for n in notes) for kind in actual)


def described(name: str) -> tuple[dict[str, object], Target]:
    """A named target, and what a plan file says of it."""
    topology = parse_topology(name, catalogue())
    target = dataclasses.replace(
        find_target(DEVICES),
        devices=(),
        shared_host=False,
        platform={"cuda": "gpu"}.get(topology.chip.platform, topology.chip.platform),
        topology=topology,
    )
    return describe_target(target), target


@pytest.mark.parametrize(
    "then, now, said",
    [
        ("v5p:4x8x8", "v5p:4x4x16", "torus 4x8x8, here hosts 64, slices 1, torus 4x4x16"),
        ("v5e:8x16", "v5e:8x8*2", "slices 1, torus 8x16, here hosts 32, slices 2, torus 8x8"),
        ("h100:8x8", "h100:16x4", "recorded: hosts 8, here hosts 16"),
    ],
)
def test_devices_that_stand_otherwise_are_noted(then, now, said):
    (recorded, before), (_, target) = described(then), described(now)
    (note,) = validity.target_notes(recorded, target)
    assert "stand otherwise" in note and said in note
    old = {key: value for key, value in recorded.items() if key != "arrangement"}
    assert validity.target_notes(old, target) == [note], "files of before say the topology's name"
    assert validity.target_notes(json.loads(json.dumps(recorded)), before) == []
    assert validity.target_notes(recorded, find_target(DEVICES)) == [], "a fake mesh has no links"


TORUS = {"hosts": [2], "slices": [1], "torus": [2, 4]}


@pytest.mark.parametrize(
    ("then", "now", "platform", "apart"),
    [
        (TORUS, {**TORUS, "hosts": [1]}, "tpu", False),  # one process holds all chips of v5e-8
        (TORUS, {**TORUS, "torus": [8]}, "tpu", True),
        ({"hosts": [4]}, {"hosts": [8]}, "gpu", False),  # a process for each of eight GPUs
        ({"hosts": [4]}, {"hosts": [2]}, "gpu", True),
    ],
)
def test_processes_are_not_taken_for_hosts(then, now, platform, apart):
    target = dataclasses.replace(find_target(DEVICES), platform=platform, shared_host=False)
    assert validity._apart(then, now, target) is apart


def test_another_compiler_is_noted(saved, altered):
    recorded, target = described("v5p:4x4x4")
    (note,) = validity.target_notes({**recorded, "compiler": "libtpu 0.0.1"}, target)
    assert note.startswith("recorded with another compiler: libtpu 0.0.1, here ")
    path = altered(lambda d: d["target"].update(compiler="jaxlib 0.0.1"))
    notes = autoshard.load_plan(path, mlp, DEVICES).evidence.notes
    assert any("another compiler: jaxlib 0.0.1, here jaxlib" in n for n in notes)


def gathers(axes: tuple[str, ...], bytes_: int = 2**20, count: int = 1) -> Collective:
    return Collective(kind="all_gather", group_size=4, mesh_axes=axes, bytes=bytes_, count=count)


def test_a_collective_that_moved_to_another_mesh_axis_differs():
    """The same bytes in groups of the same size, now over hosts instead of inside them."""
    before, after = (
        [gathers(("hosts",)), gathers(("inside",), count=2)],
        [gathers(("inside",)) for _ in range(3)],
    )
    head = "collectives differ from the record: all_gather in groups of 4"
    assert validity.collective_differences(before, after) == [
        f"{head} over hosts: recorded 1.0 MiB a step, now 0 B",
        f"{head} over inside: recorded 2.0 MiB a step, now 3.0 MiB",
    ]
    assert validity.collective_differences(after, after[::-1]) == []


def test_collectives_whose_axes_are_unknown_are_compared_in_sum():
    some, none, other = gathers(("x",)), gathers(()), gathers(("y",))
    assert validity.collective_differences([some, some], [some, none]) == []
    assert validity.collective_differences([none], [none]) == []
    (note,) = validity.collective_differences([some], [none, none])
    assert note.endswith("all_gather in groups of 4: recorded 1.0 MiB a step, now 2.0 MiB")
    # What is equally unknown on both sides hides nothing.
    assert len(validity.collective_differences([some, none], [other, none])) == 2


def test_a_program_whose_collectives_cannot_be_read_is_noted(saved, monkeypatch):
    garbled = "HloModule broken\n\nENTRY %e {\n  ???\n}\n"
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda compiled: garbled)
    notes = autoshard.load_plan(saved, mlp, DEVICES).evidence.notes
    assert any("could not be compared" in n for n in notes)


def test_loading_measures_nothing(saved, tmp_path, monkeypatch):
    """Neither a calibration nor a file in the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("autoshard.rungs.profile.calibration.calibrate", None)
    autoshard.load_plan(saved, mlp, DEVICES)
    assert list(tmp_path.iterdir()) == []


def test_fixed_leaves_knobs_and_a_named_mesh_come_back(quick, tmp_path):
    mesh = jax.sharding.Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))
    plan = quick(
        lambda rate: mlp(rate),
        mesh,
        knobs={"rate": (0.1,)},
        fix={"state['params']['w1']": jax.P("model"), "batch": "data"},
    )
    assert plan.state_shardings["params"]["w1"].spec == jax.P("model")
    assert plan.batch_shardings["x"].spec[0] == "data"  # its features may lie as w1's rows do
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autoshard.load_plan(path, lambda rate: mlp(rate), DEVICES)
    assert loaded.knobs == {"rate": 0.1}
    assert loaded.mesh.shape == plan.mesh.shape
    assert loaded.lower().digest == plan.lower().digest
    assert loaded.candidate == plan.candidate
    loaded.save(path)
    assert read_plan(path).candidate == plan.candidate
    assert read_plan(path).fixed_axes == (("batch", ("data",)),)


def test_a_fixed_axis_that_divides_nothing_at_rest_comes_back(tmp_path):
    """The axis lies in small arrays alone, which are whole at rest; its rule was fixed."""

    def model_fn():
        def loss(params, x):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
            return jnp.mean((jnp.tanh(x @ params["in"]) @ params["small"]) ** 2)

        def step(state, x):
            value, slopes = jax.value_and_grad(loss)(state, x)
            return jax.tree.map(lambda p, g: p - g, state, slopes), {"loss": value}

        return autoshard.Workload(
            step=step,
            init=lambda: {
                "layers": jnp.ones((4, 256, 256)),
                "in": jnp.ones((256, 8)),
                "small": jnp.ones((8, 8)),
            },
            batch=jax.ShapeDtypeStruct((64, 256), jnp.float32),
        )

    target = find_target(DEVICES)
    program = trace(model_fn())
    axes = make_problem(program, target, "free", None).space.axes.axes
    name = next(a.name for a in axes if "state['small'][0]" in a.where)
    subject = make_problem(program, target, "free", {name: "x"})
    found = {b.name: b.candidate.layout for b in baselines(subject.space)}
    layout = found["FSDP, small whole"]
    assert dict(layout.state_rules)[name] == ("x",)
    plan = Plan(subject.analysis, subject.space, target, layout, Evidence())
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autoshard.load_plan(path, model_fn, DEVICES)
    assert loaded.layout == layout and loaded.fixed_axes == plan.fixed_axes
    loaded.save(path)
    data = json.loads(path.read_text())
    assert data["fixed_axes"] == {name: ["x"]}
    del data["fixed_axes"]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="shards nothing"):  # as files from before it was kept
        autoshard.load_plan(path, model_fn, DEVICES)


@pytest.mark.deviceless
def test_loading_for_named_hardware_leaves_no_process_behind(tmp_path):
    needs("cuda")
    path = Path(__file__).parents[1] / "goldens" / "plans-0.1" / "h100-1x8.json"
    made = []
    start = worker_module.WorkerProcess._start

    def started(worker):
        made.append(start(worker))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.WorkerProcess, "_start", started)
        plan = autoshard.load_plan(path, mlp, "h100:1x8")
        assert len(made) == 1
        with pytest.raises(PlanError, match="killed after the time limit"):
            autoshard.load_plan(path, mlp, "h100:1x8", compile_seconds=0.001)
    assert len(made) == 2 and all(child.process.poll() is not None for child in made)
    with pytest.raises(PlanError, match="not here"):
        plan.compiled  # noqa: B018


def test_a_plan_of_0_1_with_large_constants_loads(tmp_path):
    """Its digest is that of the text, constants and all."""
    table = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)

    def model_fn():
        def step(state, batch):
            return {"w": state["w"] + jnp.mean(batch @ table)}, {}

        batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        return autoshard.Workload(step=step, init=lambda: {"w": jnp.ones(8)}, batch=batch)

    target = find_target(DEVICES)
    subject = make_problem(trace(model_fn()), target, "free", None)
    layout = baselines(subject.space)[0].candidate.layout
    plan = Plan(subject.analysis, subject.space, target, layout, Evidence())
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    old = subject.analysis.digest_of_text()
    assert data["program"]["digest"] == subject.analysis.digest != old
    data["program"]["digest"] = old
    path.write_text(json.dumps(data))
    assert autoshard.load_plan(path, model_fn, DEVICES).layout == layout
    table[3, 5] += 1
    assert "other computation" in str(refused(path, model_fn))
