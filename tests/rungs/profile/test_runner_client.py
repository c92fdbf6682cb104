import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.xla.executable import MemoryUse
from autoshard.errors import WorkerError
from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport, ReferenceLost
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.rungs.profile.traces import read_trace
from autoshard.rungs.worker.process import WorkerSettings
from tests import lowered

DATA = (("data", 8),)


@pytest.fixture(scope="module")
def modules():
    return {
        "reference": lowered.train_module(lowered.ONE),
        "fsdp_tp": lowered.train_module(),
        "data": lowered.train_module(DATA, spec=P()),
        "hangs": lowered.stuck_module(DATA),
    }


@pytest.fixture(scope="module")
def child(tmp_path_factory, modules):
    folder = str(tmp_path_factory.mktemp("bench"))
    bench = ChildRunner(
        WorkerSettings(platform="cpu", device_count=8, folder=folder), time_limit_s=120
    )
    assert bench.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    for name in ("fsdp_tp", "data"):
        assert isinstance(bench.load(name, modules[name]), MemoryUse)
    assert bench.trust("reference", modules["reference"]) is None
    yield bench
    bench.close()


def test_the_childs_answers_are_a_benchs(child, tmp_path):
    samples = child.run("data", 3)
    assert len(samples) == 3 and all(s > 0 for s in samples)
    report = child.numerics("fsdp_tp", "reference")
    assert isinstance(report, NumericsReport) and report.passed
    folder = child.trace("data", str(tmp_path), 2)
    assert len(read_trace(folder, 2)) == 8


def test_a_hang_costs_only_the_candidate_that_hangs(child, modules):
    assert isinstance(child.load("hangs", modules["hangs"]), MemoryUse)
    before = child._worker.starts
    child._time_limit_s = 3
    failure = child.run("hangs", 1)
    child._time_limit_s = 120
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.PROFILE, Kind.TIMEOUT)
    assert len(child.run("data", 2)) == 2, "the next call reloads what is still wanted"
    assert child._worker.starts == before + 1
    assert child.numerics("fsdp_tp", "reference").passed, "and trusts its reference again"
    assert child.run("hangs", 1) == failure, "and who hung stays out"
    assert child._worker.starts == before + 1


def test_a_child_that_died_while_idle_is_set_up_again(child):
    child.run("data", 1)
    process = child._worker._child.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert len(child.run("data", 2)) == 2
    assert child.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    process = child._worker._child.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert child.set_inputs(lowered.init_module(), lowered.make_batches()) is None


def test_a_new_child_runs_the_reference_only_to_compare_with_it(child, modules, monkeypatch):
    assert child.trust("reference", modules["reference"]) is None
    asked = []
    call = child._call

    def told(function, *args):
        asked.append(function.__name__)
        return call(function, *args)

    monkeypatch.setattr(child, "_call", told)
    child.renew()
    assert len(child.run("data", 2)) == 2 and "_trust" not in asked
    assert child.numerics("fsdp_tp", "reference").passed
    assert child.numerics("data", "reference").passed
    assert asked.count("_trust") == 1


def test_a_reference_that_does_not_run_again_is_not_the_candidates_failure(
    child, modules, monkeypatch
):
    assert child.trust("reference", modules["reference"]) is None
    late = Failure(stage=Stage.PROFILE, kind=Kind.TIMEOUT, message="too late")
    call = child._call
    monkeypatch.setattr(
        child, "_call", lambda f, *args: late if f.__name__ == "_trust" else call(f, *args)
    )
    child.renew()
    for name in ("fsdp_tp", "data"):
        assert child.numerics(name, "reference") == ReferenceLost(late)
        assert len(child.run(name, 1)) == 1, "it is still there"


def test_inputs_that_a_new_child_does_not_take_are_no_candidates_failure(child, monkeypatch):
    failure = Failure(stage=Stage.PROFILE, kind=Kind.TIMEOUT, message="too late")
    call = child._call
    monkeypatch.setattr(
        child, "_call", lambda f, *args: failure if f.__name__ == "_set_inputs" else call(f, *args)
    )
    child.renew()
    with pytest.raises(WorkerError, match="a new process cannot be set up: too late"):
        child.run("data", 1)
    monkeypatch.undo()
    assert len(child.run("data", 1)) == 1


def test_an_abort_costs_only_the_candidate_at_fault(child, monkeypatch):
    before = child._worker.starts
    call = child._worker.call
    monkeypatch.setattr(child._worker, "call", lambda function, *args, **kw: call(os.abort, **kw))
    failure = child.run("data", 1)
    monkeypatch.undo()
    assert failure.kind == Kind.CRASH and "SIGABRT" in failure.message
    assert child.run("data", 1) == failure
    assert len(child.run("fsdp_tp", 1)) == 1
    assert child._worker.starts == before + 1


def test_a_renewed_child_has_what_the_last_one_had(child, modules):
    child.load("data", modules["data"])
    before = child._worker.starts, child._worker.pid
    child.renew()
    assert len(child.run("data", 1)) == len(child.run("fsdp_tp", 1)) == 1
    assert child._worker.starts == before[0] + 1 and child._worker.pid != before[1]


def test_a_failing_reload_is_told_at_its_next_use(child, modules):
    child.load("data", modules["data"])
    broken = dataclasses.replace(modules["data"], stablehlo=b"ML\xefRnot really")
    child._wanted["data"] = broken
    child._worker.close()
    assert len(child.run("fsdp_tp", 1)) == 1
    failure = child.run("data", 1)
    assert isinstance(failure, Failure) and failure.kind != Kind.TIMEOUT
    assert isinstance(child.load("data", modules["data"]), MemoryUse)
    assert len(child.run("data", 1)) == 1


def test_unloading_forgets(child, modules):
    child.load("data", modules["data"])
    child.unload("data")
    with pytest.raises(KeyError, match=r"'data' is not loaded; loaded: .*fsdp_tp"):
        child.run("data", 1)


def test_state_as_host_values(tmp_path, modules):
    settings = WorkerSettings(platform="cpu", device_count=8, folder=str(tmp_path))
    bench = ChildRunner(settings, time_limit_s=120)
    state = jax.tree.leaves(lowered.init_state())
    assert bench.set_inputs(state, lowered.make_batches()) is None
    assert isinstance(bench.load("data", modules["data"]), MemoryUse)
    bench.close()
    wrong = [np.zeros(3, np.float32), *state[1:]]
    bench.set_inputs(wrong, lowered.make_batches())
    failure = bench.load("data", modules["data"])
    assert failure.kind == Kind.CRASH and "ValueError: state" in failure.message
    bench.close()


def test_a_state_made_with_linear_algebra_is_made_in_a_process_that_lowered_nothing(tmp_path):
    """LAPACK's routines are loaded when jax lowers a call to one, which a worker never does."""
    make = jax.jit(lambda: {"w": jnp.linalg.qr(jax.random.normal(jax.random.key(0), (16, 16)))[0]})
    whole = NamedSharding(lowered.make_mesh(lowered.ONE), P())
    outputs = lowered.array_specs("state", make(), {"w": whole})
    stablehlo = lowered.bytecode(make.lower())
    assert b"lapack_" in stablehlo
    module = Module(
        stablehlo=stablehlo,
        mesh=(),
        platform="cpu",
        inputs=(),
        outputs=outputs,
        state_count=len(outputs),
    )
    settings = WorkerSettings(platform="cpu", device_count=8, folder=str(tmp_path))
    bench = ChildRunner(settings, time_limit_s=120)
    assert bench.set_inputs(module, [()]) is None
    bench.close()
