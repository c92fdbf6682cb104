"""What a worker compiled is measured as it is; what cannot be read is compiled again."""

import errno
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.xla.executable import MemoryUse, compile_module
from autoshard.rungs.compile.job import CompileResult, compile_module_job, request_for
from autoshard.rungs.compile.store import keep, kept
from autoshard.rungs.profile import runner as bench_module
from autoshard.rungs.profile.runner import LocalRunner
from autoshard.rungs.profile.runner_client import ChildRunner
from autoshard.rungs.worker.process import WorkerSettings
from autoshard.target.target import find_target
from tests import lowered

DATA = (("data", 8),)


def factor_module():
    """A step that calls LAPACK, whose routines are not loaded where nothing is lowered."""

    def step(state):
        return jnp.linalg.qr(state @ state.T + jnp.eye(16))[0], {}

    whole = NamedSharding(lowered.make_mesh(lowered.ONE), P())
    return lowered.lower(step, (np.eye(16, dtype=np.float32),), (whole,), lowered.ONE, 1)


def started(executables, module):
    """A bench with the module loaded, and what loading it gave."""
    bench = LocalRunner(executables=executables)
    bench.set_inputs(jax.tree.leaves(lowered.init_state()), lowered.make_batches())
    return bench, bench.load("it", module)


def test_nothing_is_kept_for_a_search_that_has_ended(tmp_path):
    module = lowered.train_module()
    keep(compile_module(module, jax.devices()), tmp_path / "gone" / "executables")
    assert not (tmp_path / "gone").exists()


def test_a_bench_runs_what_a_worker_compiled(compiler, tmp_path, monkeypatch):
    module = lowered.train_module()
    result = compile_module_job(module, 120, compiler, executables=tmp_path / "new")
    assert isinstance(result, CompileResult)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [module.digest]
    executable = kept(module, jax.devices(), tmp_path / "new")
    assert executable is not None and executable.memory == result.memory

    compiled, _ = started(None, module)
    monkeypatch.setattr(bench_module, "compile_module", lambda *args: pytest.fail("compiled"))
    loaded, memory = started(tmp_path / "new", module)
    assert isinstance(memory, MemoryUse)
    for bench in (compiled, loaded):
        assert len(bench.run("it", 3)) == 3
    for a, b in zip(compiled._entries["it"].state, loaded._entries["it"].state, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_routines_of_lapack_are_there_where_nothing_was_lowered(compiler, tmp_path):
    module = factor_module()
    compile_module_job(module, 120, compiler, executables=tmp_path)
    bench = ChildRunner(
        WorkerSettings(platform="cpu", device_count=8, folder=str(tmp_path)),
        time_limit_s=120,
        executables=tmp_path,
    )
    try:
        assert bench.set_inputs([np.eye(16, dtype=np.float32)], [()]) is None
        assert isinstance(bench.load("it", module), MemoryUse)
        assert len(bench.run("it", 2)) == 2
    finally:
        bench.close()


def test_the_child_measures_what_lies_in_the_folder(tmp_path):
    """Seen by putting another program there under the name of the first."""
    here, other = lowered.train_module(DATA, spec=P()), lowered.train_module(DATA, doubled(), P())
    keep(compile_module(other, jax.devices()), tmp_path)
    (tmp_path / other.digest).rename(tmp_path / here.digest)
    settings = WorkerSettings(platform="cpu", device_count=8, folder=str(tmp_path))
    for folder, passed in ((tmp_path, False), (tmp_path / "empty", True)):
        bench = ChildRunner(settings, time_limit_s=120, executables=folder)
        try:
            bench.set_inputs(lowered.init_module(), lowered.make_batches())
            bench.trust("whole", lowered.train_module(lowered.ONE))
            bench.load("it", here)
            assert bench.numerics("it", "whole").passed == passed
        finally:
            bench.close()


def doubled():
    """A train step whose gradients are wrong."""
    grad = jax.value_and_grad(lowered.attention_loss)

    def twice(params, x, y):
        loss, grads = grad(params, x, y)
        return 2 * loss, grads

    return lowered.make_step(twice)


@pytest.mark.parametrize("broken", [b"", b"no program", None])
def test_what_cannot_be_read_is_compiled(tmp_path, broken):
    module = lowered.train_module(DATA, spec=P())
    if broken is not None:
        (tmp_path / module.digest).write_bytes(broken)
    assert kept(module, jax.devices(), tmp_path) is None
    _, memory = started(tmp_path, module)
    assert isinstance(memory, MemoryUse)


def test_what_a_bench_compiles_the_next_one_finds(tmp_path, monkeypatch):
    module = lowered.train_module(DATA, spec=P())
    started(tmp_path, module)
    monkeypatch.setattr(bench_module, "compile_module", lambda *args: pytest.fail("compiled"))
    bench, memory = started(tmp_path, module)
    assert isinstance(memory, MemoryUse) and len(bench.run("it", 1)) == 1


def test_a_folder_that_cannot_be_made_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    keep(compile_module(lowered.train_module(DATA, spec=P()), jax.devices()), tmp_path / "file")


def test_only_programs_of_this_machine_are_kept(tmp_path):
    module, target = lowered.train_module(), find_target(jax.devices())
    assert request_for(module, target, "", 1.0, tmp_path).executables == tmp_path
    assert request_for(module, target, "", 1.0).executables is None


def test_what_does_not_fit_onto_the_disk_is_not_left_there(compiler, tmp_path, monkeypatch):
    write = Path.write_bytes

    def half(path, data):
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    module = lowered.train_module(lowered.ONE)
    executable = compile_module(module, jax.devices()[:1])
    monkeypatch.setattr(Path, "write_bytes", half)
    keep(executable, tmp_path)
    assert list(tmp_path.iterdir()) == []
