import concurrent.futures
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.xla.compilers import compilers_here
from autoshard.compat.xla.executable import compile_module
from autoshard.errors import WorkerError
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.compile.job import (
    CompileRequest,
    CompileResult,
    compile_in_process,
    compile_module_job,
    rematerializations,
    request_for,
)
from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings
from autoshard.target.target import find_target
from tests import lowered

CUBE = (("a", 2), ("b", 2), ("c", 2))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    return WorkerSettings(platform="cpu", device_count=8, folder=str(folder))


@pytest.fixture(scope="module")
def worker(settings):
    worker = WorkerProcess(settings)
    yield worker
    worker.close()


def resharding_module():
    """Asks twice for a reshard that the partitioner can only do by replicating."""
    live = lowered.make_mesh(CUBE)

    def step(state):
        for _ in range(2):
            state = jnp.sin(
                jax.lax.with_sharding_constraint(state, NamedSharding(live, P("a", "b", "c")))
            )
            state = jnp.cos(
                jax.lax.with_sharding_constraint(state, NamedSharding(live, P(("b", "a"))))
            )
        return state, {}

    state = np.zeros((16, 16, 16), np.float32)
    return lowered.lower(step, (state,), (NamedSharding(live, P("a", "b", "c")),), CUBE, 1)


def test_compilers_leave_the_search_its_core(tmp_path):
    request = request_for(lowered.train_module(), find_target(jax.devices()), str(tmp_path), 60.0)
    assert request.settings.nice > 0


def test_the_workers_program_is_the_parents(worker):
    module = lowered.train_module()
    result = compile_module_job(module, 120, worker)
    assert isinstance(result, CompileResult), result
    here = compile_module(module, jax.devices())
    assert result.memory == here.memory
    assert result.hlo_text == here.hlo_text
    assert result.warnings == ()
    assert result.elapsed_s > 0
    assert result.peak_bytes > 64 << 20, "the worker holds at least JAX"


def test_rematerialization_warnings_belong_to_their_compile(worker, capfd):
    result = compile_module_job(resharding_module(), 120, worker)
    assert isinstance(result, CompileResult), result
    assert result.warnings
    assert len(set(result.warnings)) == len(result.warnings)
    assert all(line.startswith("full rematerialization of ") for line in result.warnings)
    tiled = "{devices=[2,2,2]<=[8]}"
    named = "{mesh['a'=2,'b'=2,'c'=2], [{'a'}, {'b'}, {'c'}]}"  # jaxlib 0.12
    assert any(f" from {x} to {{" in line for line in result.warnings for x in (tiled, named))
    after = compile_module_job(lowered.train_module(), 120, worker)
    assert after.warnings == (), "the next compile starts clean"
    assert "rematerialization" not in capfd.readouterr().err


def test_rematerialization_lines_with_and_without_metadata():
    line = (
        "W1121 00:02:50 4996 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. "
        "The compiler cannot go from sharding {devices=[8,1]<=[8]} to {devices=[1,8]<=[8]} "
        "efficiently for HLO operation %copy.3 = f32[8,4,16]{2,1,0} copy(%param), "
        "sharding={devices=[8,1]<=[8]}%s. As the last resort, SPMD will replicate the tensor"
    )
    named = ', metadata={op_name="jit(f)/sin" source_file="m.py" source_line=7}'
    short = (
        "full rematerialization of copy f32[8,4,16] "
        "from {devices=[8,1]<=[8]} to {devices=[1,8]<=[8]}"
    )
    text = "\n".join(
        [line.replace("%s", ""), "W noise", line.replace("%s", ""), line.replace("%s", named)]
    )
    assert rematerializations(text) == (short, f"{short} in jit(f)/sin at m.py:7")
    odd = "E spmd.cc:1] [spmd] Involuntary full rematerialization. Something else."
    assert rematerializations(odd) == ("Involuntary full rematerialization. Something else.",)


def test_what_xla_refuses_is_a_failure_with_its_text(worker):
    module = dataclasses.replace(lowered.train_module(), stablehlo=b"ML\xefRnot really")
    failure = compile_module_job(module, 120, worker)
    assert isinstance(failure, Failure)
    assert failure.stage is Stage.COMPILE
    assert failure.kind is not Kind.TIMEOUT and failure.message


def test_a_compile_beyond_the_limit_is_killed(worker):
    failure = compile_module_job(lowered.train_module(), 1e-3, worker)
    assert isinstance(failure, Failure) and failure.kind is Kind.TIMEOUT


def test_requests_pickle_and_run_on_any_executor(settings):
    request = CompileRequest(module=lowered.train_module(), time_limit_s=120, settings=settings)
    assert pickle.loads(pickle.dumps(request)) == request
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(compile_in_process, request).result()
    assert isinstance(result, CompileResult)


def test_a_machine_with_other_compilers_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    here = compilers_here(None)
    settings = WorkerSettings(platform="cpu", device_count=8, folder=str(tmp_path))
    request = CompileRequest(
        module=lowered.train_module(),
        time_limit_s=120,
        settings=settings,
        compilers="jaxlib 0.0.1",
    )
    with pytest.raises(WorkerError, match=r"compiles with jaxlib .*, the search expects jaxlib 0"):
        compile_in_process(request)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump")
    with pytest.raises(WorkerError, match=r"with --xla_dump_to.* the same XLA_FLAGS"):
        compile_in_process(dataclasses.replace(request, compilers=here))
    monkeypatch.delenv("XLA_FLAGS")
    same = dataclasses.replace(request, compilers=here)
    assert isinstance(compile_in_process(same), CompileResult)
