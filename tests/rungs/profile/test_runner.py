import dataclasses
import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.xla.executable import Executable, MemoryUse
from autoshard.records.numerics import NumericsReport
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.profile import runner as bench_file
from autoshard.rungs.profile.runner import LocalRunner, runs_ahead
from tests import lowered

DATA = (("data", 8),)


@pytest.fixture(scope="module")
def bench():
    """One bench with the unsharded reference, an FSDP x TP and a data-parallel program."""
    bench = LocalRunner()
    assert bench.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    programs = {
        "reference": lowered.train_module(lowered.ONE),
        "fsdp_tp": lowered.train_module(),
        "data": lowered.train_module(DATA, spec=P()),
    }
    for name, module in programs.items():
        assert isinstance(bench.load(name, module), MemoryUse)
    assert bench.trust("reference", programs["reference"]) is None
    return bench


def scaled_grad(params, x, y):
    loss, grads = jax.value_and_grad(lowered.attention_loss)(params, x, y)
    return loss, jax.tree.map(lambda g: 8 * g, grads)


def per_device_grad(sync):
    """The gradient by shard_map, each device on its part of the batch; `sync` joins the parts."""

    def grad(params, x, y):
        def local(params, x, y):
            loss, grads = jax.value_and_grad(lowered.attention_loss)(params, x, y)
            return jax.lax.pmean(loss, "data"), sync(grads)

        return jax.shard_map(
            local,
            mesh=lowered.make_mesh(DATA),
            in_specs=(P(), P("data"), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )(params, x, y)

    return grad


def all_reduced(grads):
    return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), grads)


def one_all_reduce_dropped(grads):
    return {**all_reduced(grads), "w2": grads["w2"]}


def one_shard_permuted(grads):
    whole = all_reduced(grads)
    swap = [(i, i) for i in range(2, 8)] + [(0, 1), (1, 0)]
    rows = jnp.split(whole["q"], 8)
    mine = jnp.stack(rows)[jax.lax.axis_index("data")]
    return {
        **whole,
        "q": jax.lax.all_gather(jax.lax.ppermute(mine, "data", swap), "data", tiled=True),
    }


def data_parallel(grad):
    return lowered.train_module(DATA, step=lowered.make_step(grad), spec=P())


@pytest.mark.parametrize("name", ["fsdp_tp", "data", "reference"])
def test_correct_programs_pass(bench, name):
    report = bench.numerics(name, "reference")
    assert isinstance(report, NumericsReport), report
    assert report.passed, report.failure()
    assert report.failure() is None
    assert report.steps == 2
    count = len(jax.tree.leaves(lowered.init_state()))
    assert (len(report.state), len(report.metrics)) == (count, 2)
    assert 0 < report.worst.error < 1e-4 or name == "reference"
    assert bench._entries[name].state is None, "it starts again"


def test_the_key_bias_is_known_as_noise(bench):
    """Its gradient is zero but for rounding; adamw makes full-sized steps of it."""
    noisy = bench.numerics("fsdp_tp", "reference").noisy
    moments = [path for path in noisy if "opt" in path]
    assert moments == ["state['opt'][0].mu['bk']", "state['opt'][0].nu['bk']"]
    assert "state['params']['bk']" in noisy
    assert len(noisy) < 6


def test_a_correct_shard_map_program_passes(bench):
    bench.load("manual", data_parallel(per_device_grad(all_reduced)))
    report = bench.numerics("manual", "reference")
    assert report.passed, report.failure()


@pytest.mark.parametrize(
    ("module", "culprit"),
    [
        (lambda: lowered.train_module(step=lowered.make_step(scaled_grad)), "mu['w1']"),
        (lambda: data_parallel(per_device_grad(one_all_reduce_dropped)), "mu['w2']"),
        (lambda: data_parallel(per_device_grad(one_shard_permuted)), "mu['q']"),
    ],
    ids=["gradient scaled by 8", "all-reduce dropped", "shard permuted"],
)
def test_mutants_are_caught(bench, module, culprit):
    bench.load("mutant", module())
    report = bench.numerics("mutant", "reference")
    assert not report.passed
    assert any(culprit in leaf.path and leaf.error > 0.1 for leaf in report.state)
    failure = report.failure(elapsed_s=1.0)
    assert (failure.stage, failure.kind) == (Stage.PROFILE, Kind.NUMERICS)
    assert report.worst.path in failure.message


def test_copies_that_drift_apart_are_seen(bench):
    """Device 0 computes the right thing; only another device's copy is wrong."""

    def spoiled(grads):
        whole = all_reduced(grads)
        wrong = jnp.where(jax.lax.axis_index("data") == 5, 1.01, 1.0)
        return {**whole, "w1": whole["w1"] * wrong}

    bench.load("mutant", data_parallel(per_device_grad(spoiled)))
    report = bench.numerics("mutant", "reference")
    (leaf,) = [leaf for leaf in report.state if "mu['w1']" in leaf.path]
    assert leaf.copies == 2 and not leaf.passed
    assert "2 different copies" in report.failure().message


def test_keys_and_flags_must_be_equal(bench):
    def step(state, x, y):
        new, metrics = lowered.make_step()(state, x, y)
        return {
            **new,
            "key": new["key"].at[1].add(jnp.uint32(1)),
            "flag": ~x.any() & new["flag"],
        }, metrics

    bench.load("mutant", lowered.train_module(step=step))
    wrong = {
        leaf.path: leaf.error
        for leaf in bench.numerics("mutant", "reference").leaves
        if not leaf.passed
    }
    assert wrong == {"state['key']": 0.5, "state['flag']": 1.0}


def test_bf16_compute_is_held_to_bf16_tolerance(bench):
    step = lowered.make_step(dtype=jnp.bfloat16)
    bench.load("half", lowered.train_module(step=step))
    assert not bench.numerics("half", "reference").passed, "f32 is held to f32's"
    bench.trust("half reference", lowered.train_module(lowered.ONE, step=step))
    report = bench.numerics("half", "half reference")
    assert report.passed, report.failure()
    assert {leaf.tolerance for leaf in report.state} == {0, 3e-2}
    with pytest.raises(KeyError, match="'reference' is not the reference, which is 'half ref"):
        bench.numerics("half", "reference")
    bench.trust("reference", lowered.train_module(lowered.ONE))


def test_a_reference_that_cannot_run_is_none_and_leaves_nothing_behind(bench, monkeypatch):
    whole = lowered.train_module(lowered.ONE)
    run = Executable.run

    def full(executable, arrays):
        if executable.module.digest == whole.digest:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return run(executable, arrays)

    monkeypatch.setattr(Executable, "run", full)
    failure = bench.trust("reference", whole)
    assert failure.kind is Kind.OOM
    assert bench._entries["reference"].state is None
    monkeypatch.undo()
    assert bench.trust("reference", whole) is None
    assert bench._entries["reference"].state is None


def test_not_finite_is_a_failure(bench):
    def step(state, x, y):
        new, metrics = lowered.make_step()(state, x, y)
        return new, {"loss": metrics["loss"] / (1.0 - new["flag"])}  # inf at the second step

    bench.load("mutant", lowered.train_module(step=step))
    failure = bench.numerics("mutant", "reference")
    assert isinstance(failure, Failure) and failure.kind is Kind.NUMERICS
    assert failure.message == "metrics['loss'] at step 2: 1 of 1 values are not finite"


def test_run_chains_the_state_and_cycles_through_the_batches(bench):
    """Three runs of one step end where one run of three does, from the state that is set."""
    bench.unload("data")
    samples = [bench.run("data", 1) for _ in range(3)]
    assert all(len(s) == 1 and s[0] > 0 for s in samples)
    thrice = [np.asarray(a) for a in bench._entries["data"].state]
    bench.unload("data")
    assert len(bench.run("data", 3)) == 3
    once = [np.asarray(a) for a in bench._entries["data"].state]
    for a, b in zip(once, thrice, strict=True):
        np.testing.assert_array_equal(a, b)
    state = lowered.init_state()
    step = jax.jit(lowered.make_step())
    for i in range(3):
        state, _ = step(state, *lowered.make_batches()[i % 2])
    for path, a, b in zip(
        [spec.path for spec in lowered.train_module().inputs],
        once,
        jax.tree.leaves(state),
        strict=False,
    ):
        if "bk" not in path:
            np.testing.assert_allclose(a, np.asarray(b), rtol=2e-3, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("cpu", ["call", "wait", "call", "wait"]),
        ("cuda", ["call", "call", "wait", "call", "wait", "call", "wait", "wait"]),
    ],
)
def test_on_accelerators_a_step_is_called_before_the_last_one_has_ended(
    bench, monkeypatch, platform, expected
):
    """There a run takes two steps more: one that fills the queue, and one behind the last."""
    done: list[str] = []
    run, wait = Executable.run, jax.block_until_ready
    bench.load("data", lowered.train_module(DATA, spec=P()))
    bench.unload("data")
    bench.run("data", 1)
    monkeypatch.setattr(bench_file, "runs_ahead", lambda _: runs_ahead(platform))
    monkeypatch.setattr(Executable, "run", lambda *args: done.append("call") or run(*args))
    monkeypatch.setattr(jax, "block_until_ready", lambda what: done.append("wait") or wait(what))
    samples = bench.run("data", 2)
    assert done == expected
    assert len(samples) == 2 and min(samples) > 0
    assert bench._entries["data"].steps == 1 + expected.count("call")


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("returns_after_s", [0.0, 0.75, 1.0])
def test_steps_whose_call_returns_late_take_as_long_as_they_take(
    bench, monkeypatch, steps, returns_after_s
):
    """A program that waits for the host holds up its caller: here steps of a second do."""
    now = free_from = 0.0
    ends: dict[int, float] = {}
    state_count = lowered.train_module().state_count

    def run(executable, arrays):
        nonlocal now, free_from
        begin = max(now, free_from)
        free_from = begin + 1.0
        now = max(now, begin + returns_after_s if returns_after_s else now)
        outputs = [object() for _ in executable.module.outputs]
        ends.update({id(one): free_from for one in outputs})
        kept.extend(outputs)
        return outputs

    def wait(what):
        nonlocal now
        now = max(now, *(ends.get(id(one), 0.0) for one in jax.tree.leaves(what)))
        return what

    kept: list[object] = []
    bench.load("data", lowered.train_module(DATA, spec=P()))
    bench.unload("data")
    monkeypatch.setattr(bench_file, "runs_ahead", lambda _: True)
    bench._place(bench._entries["data"])
    monkeypatch.setattr(Executable, "run", run)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    monkeypatch.setattr(bench_file.time, "perf_counter", lambda: now)
    samples = bench.run("data", steps)
    assert samples == pytest.approx([1.0] * steps) and state_count
    bench.unload("data")


def test_without_metrics_each_step_is_waited_for(monkeypatch):
    """The next step takes the state: nothing is left to tell when the last one ended."""
    monkeypatch.setattr(bench_file, "runs_ahead", lambda _: True)
    silent = LocalRunner()
    assert silent.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    step = lowered.make_step()
    module = lowered.train_module(step=lambda state, x, y: (step(state, x, y)[0], {}))
    assert len(module.outputs) == module.state_count
    assert isinstance(silent.load("silent", module), MemoryUse)
    assert len(silent.run("silent", 2)) == 2
    assert silent._entries["silent"].steps == 2


def test_a_trace_on_accelerators_is_of_as_many_steps_as_asked(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_file, "runs_ahead", lambda _: True)
    bench.load("data", lowered.train_module(DATA, spec=P()))
    before = bench._entries["data"].steps
    assert bench.trace("data", str(tmp_path), 2) == str(tmp_path)
    assert bench._entries["data"].steps == before + 2


def test_a_program_runs_on_the_devices_where_its_mesh_has_them():
    asked = []

    def placed(mesh):
        asked.append(mesh)
        return jax.devices()[::-1][: math.prod(n for _, n in mesh)]

    turned = LocalRunner(placed)
    assert turned.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    module = lowered.train_module(DATA, spec=P("data"))
    assert isinstance(turned.load("data", module), MemoryUse)
    assert len(turned.run("data", 1)) == 1
    assert asked[-1] == module.mesh
    _, ((batch, *_), *_) = turned._place(turned._entries["data"])
    where = {shard.index[0].start or 0: shard.device for shard in batch.addressable_shards}
    assert [where[start] for start in sorted(where)] == jax.devices()[::-1]


def test_every_program_starts_from_the_same_values(bench):
    fresh = LocalRunner()
    fresh.set_inputs(jax.tree.leaves(lowered.init_state()), lowered.make_batches())
    fresh.load("a", lowered.train_module())
    fresh.load("b", lowered.train_module(DATA, spec=P()))
    made = jax.tree.leaves(lowered.init_state())
    for name in "ab":
        for array, value in zip(fresh._entries[name].state, made, strict=True):
            np.testing.assert_array_equal(np.asarray(array), value)
    fresh.run("a", 2)
    again = LocalRunner()
    again.set_inputs(lowered.init_module(), lowered.make_batches())
    for a, b in zip(again._initial, made, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_loading_again_starts_again_and_compiles_once(bench, monkeypatch):
    module = lowered.train_module(DATA, spec=P())
    bench.load("data", module)
    bench.run("data", 2)
    bench.unload("data")
    monkeypatch.setattr(LocalRunner, "_compile", None)
    assert isinstance(bench.load("data", module), MemoryUse)
    assert int(bench._entries["data"].state[2]) == 0, "the optimizer's count"


def test_a_process_keeps_few_executables_and_all_of_what_is_loaded(monkeypatch):
    monkeypatch.setattr(bench_file, "_MOST_EXECUTABLES", 2)
    compiled = []
    make = bench_file.compile_module
    monkeypatch.setattr(bench_file, "compile_module", lambda m, d: compiled.append(m) or make(m, d))
    programs = {
        name: lowered.train_module(mesh, spec=P())
        for name, mesh in (("eight", DATA), ("four", (("data", 4),)), ("two", (("data", 2),)))
    }
    bench = LocalRunner()
    assert bench.set_inputs(jax.tree.leaves(lowered.init_state()), lowered.make_batches()) is None
    for name, module in programs.items():  # all three are loaded: none goes
        assert isinstance(bench.load(name, module), MemoryUse)
    assert len(bench.run("eight", 1)) == 1 and len(compiled) == 3
    for name in programs:
        bench.unload(name)
    whole = lowered.train_module(lowered.ONE)
    assert isinstance(bench.load("whole", whole), MemoryUse)  # the oldest two go
    assert isinstance(bench.load("two", programs["two"]), MemoryUse) and len(compiled) == 4
    assert len(bench.run("eight", 2)) == 2 and compiled[4:] == [programs["eight"]]


def test_what_blows_up_is_told_also_where_there_is_nothing_to_compare_with(bench):
    one = lowered.train_module(lowered.ONE)
    bench.load("one", one)
    bench.run("one", 1)
    assert bench.finite("one") is None
    assert bench._entries["one"].state is None, "it starts again"
    grad = jax.value_and_grad(lowered.attention_loss)

    def root(params, x, y):
        loss, grads = grad(params, x, y)
        return jnp.sqrt(-loss), grads

    bench.load("root", lowered.train_module(lowered.ONE, lowered.make_step(root)))
    failure = bench.finite("root")
    assert isinstance(failure, Failure) and failure.kind is Kind.NUMERICS
    assert "metrics['loss'] at step 1: 1 of 1 values are not finite" in failure.message
    assert "reference" not in failure.message


def test_a_profiler_of_the_users_own_costs_the_trace_alone(bench, tmp_path):
    bench.load("one", lowered.train_module(lowered.ONE))
    with jax.profiler.trace(str(tmp_path / "theirs")):
        failure = bench.trace("one", str(tmp_path / "ours"), 1)
    assert isinstance(failure, Failure) and "RuntimeError" in failure.message
    bench.load("one", lowered.train_module(lowered.ONE))
    assert bench.trace("one", str(tmp_path / "ours"), 1) == str(tmp_path / "ours")


def test_the_host_holds_one_replica_at_a_time(monkeypatch):
    """On accelerators each shard that is read is a copy."""
    monkeypatch.setattr(bench_file, "_read", lambda shard: np.array(shard.data))
    whole = NamedSharding(lowered.make_mesh(DATA), P())
    array = jax.device_put(np.ones((1000, 1000), np.float32), whole)
    tracemalloc.start()
    try:
        (copy,) = bench_file._copies(array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert copy.nbytes < peak < 2.5 * copy.nbytes


def test_what_is_read_of_a_shard_is_not_kept_by_jax():
    """On CPU devices an array is read in place: its cache is asked for here."""
    array = jax.device_put(np.ones((8, 4)), NamedSharding(lowered.make_mesh(DATA), P("data")))
    (first, *_) = array.addressable_shards
    read = bench_file._alone(first)
    assert read is not first.data
    np.testing.assert_array_equal(read, first.data)


def test_a_host_with_little_memory_compares_fewer_leaves(bench, monkeypatch):
    one = lowered.train_module(lowered.ONE)
    assert bench.numerics("data", "reference").unchecked == ()
    needed = bench._executable(bench._entries["reference"]).memory.peak_bytes
    monkeypatch.setattr(bench_file.host, "available_bytes", lambda: needed + 20_000)
    assert bench.trust("reference", one) is None
    report = bench.numerics("data", "reference")
    assert report.passed and report.unchecked and report.state
    monkeypatch.undo()
    assert bench.trust("reference", one) is None
    assert bench.numerics("data", "reference").unchecked == ()


def test_failures_are_values(bench):
    broken = dataclasses.replace(lowered.train_module(), stablehlo=b"ML\xefRnot really")
    failure = bench.load("broken", broken)
    assert isinstance(failure, Failure) and failure.stage is Stage.PROFILE
    with pytest.raises(KeyError):
        bench.run("broken", 1)


def test_callbacks_into_python_are_unsupported(bench):
    def chatty(state):
        jax.debug.print("{}", state)
        return state, {}

    sharding = NamedSharding(lowered.make_mesh(lowered.ONE), P())
    module = lowered.lower(chatty, (np.float32(1),), (sharding,), lowered.ONE, 1)
    failure = bench.load("chatty", module)
    assert failure.kind is Kind.UNSUPPORTED and "jax.debug.print" in failure.message


def test_loading_before_the_inputs_are_set_is_a_mistake():
    with pytest.raises(RuntimeError, match="set_inputs"):
        LocalRunner().load("data", lowered.train_module(DATA, spec=P()))
    with pytest.raises(ValueError, match="got no batch"):
        LocalRunner().set_inputs([], [])
