import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import jax
import pytest

from autoshard.errors import WorkerError
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.worker import deadlock as standstill
from autoshard.rungs.worker import process as worker_module
from autoshard.rungs.worker.pool import worker_threads
from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings, worker_here


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=8, folder=str(folder)))
    yield worker
    worker.close()


def call(worker, function, *args, time_limit_s=60.0):
    return worker.call(function, *args, stage=Stage.COMPILE, time_limit_s=time_limit_s)


def test_the_child_has_the_devices_it_was_given(worker):
    assert call(worker, jax.device_count) == 8
    assert call(worker, jax.default_backend) == "cpu"
    assert worker.pid != os.getpid()


@pytest.mark.parametrize("limit_s", [float("inf"), 1e9])
def test_a_limit_that_is_none_is_no_limit(worker, limit_s):
    assert call(worker, len, b"x" * 30_000_000, time_limit_s=limit_s) == 30_000_000


def test_large_arguments_and_results(worker):
    assert call(worker, len, b"x" * 30_000_000) == 30_000_000
    assert len(call(worker, bytes, 30_000_000)) == 30_000_000


def test_garbage_on_stdout_and_stderr_is_harmless_and_stays_in_the_folder(worker, capfd):
    assert call(worker, os.write, 1, b"garbage on stdout\n") == 18
    assert call(worker, print, "more garbage") is None
    assert call(worker, os.write, 2, b"garbage on stderr\n") == 18
    assert call(worker, len, "abc") == 3
    assert capfd.readouterr() == ("", "")
    logs = [path.read_text() for path in pathlib.Path(worker.settings.folder).iterdir()]
    assert any("garbage on stdout\n" in text for text in logs)


def test_a_worker_without_a_folder_has_its_own_until_it_closes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=1, folder=None))
    for _ in range(2):
        assert call(worker, os.write, 2, b"what went wrong\n") == 16
        assert len(list(tmp_path.iterdir())) == 1
        failure = call(worker, os.abort)
        assert "its last output:\nwhat went wrong" in failure.message
        assert not list(tmp_path.iterdir())
    call(worker, len, "start it")
    worker.close()
    assert not list(tmp_path.iterdir())


def test_a_crash_is_told_in_its_first_line_by_the_check_that_failed_first(worker):
    log = (
        b"E1125 21:35:21.494646    2118 rendezvous.cc:41] All thread stack traces\n"
        b"F1125 21:35:21.494273    2119 rendezvous.cc:161] [id=1] Termination timeout of 40 s\n"
        b"F1125 21:35:21.494295    2112 rendezvous.cc:161] [id=0] Termination timeout of 40 s\n"
    )
    assert call(worker, os.write, 2, log + b"    @     0x7fd085040634  frame\n" * 500) > 0
    first, *_ = call(worker, os.abort).message.splitlines()
    assert "SIGABRT: rendezvous.cc:161] [id=1] Termination timeout of 40 s; its last out" in first


STUCK = b"E1125 rendezvous.cc:122] This thread has been waiting for 20 seconds and may be stuck.\n"


def warn_and(function, *args):
    """What XLA does where a collective takes long."""
    os.write(2, STUCK)
    return function(*args)


def burn(seconds):
    """Computes; of the process's own time, as another's work may delay it."""
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass
    return "done"


@pytest.mark.slow
def test_a_child_that_waits_for_ever_is_not_waited_for(worker, monkeypatch):
    monkeypatch.setattr(standstill, "QUIET_S", 2.0)
    call(worker, os.write, 2, STUCK)
    assert call(worker, time.sleep, 4.5) is None, "XLA warned in an earlier call"
    assert call(worker, warn_and, burn, 4.5) == "done", "XLA was wrong"
    failure = call(worker, warn_and, time.sleep, 60.0, time_limit_s=50.0)
    assert isinstance(failure, Failure) and failure.kind is Kind.CRASH
    assert "its collectives wait for each other" in failure.message
    assert "PJRT_NPROC=" in failure.message.splitlines()[0], "what can be done"
    assert "may be stuck" in failure.message.splitlines()[-1]
    assert call(worker, len, "abc") == 3


def test_a_warning_is_heard_that_came_before_the_answer_was_waited_for(worker, monkeypatch):
    monkeypatch.setattr(standstill, "QUIET_S", 2.0)
    call(worker, len, "start it")
    receive = worker_module._Child.receive

    def receive_late(child, deadline):  # as where another process had the core
        time.sleep(1.0)
        return receive(child, deadline)

    monkeypatch.setattr(worker_module._Child, "receive", receive_late)
    failure = call(worker, warn_and, time.sleep, 60.0, time_limit_s=30.0)
    assert isinstance(failure, Failure) and failure.kind is Kind.CRASH


def test_a_hang_is_killed_at_the_limit(worker):
    call(worker, len, "start it")
    pid, starts = worker.pid, worker.starts
    failure = call(worker, time.sleep, 3600, time_limit_s=0.5)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.COMPILE, Kind.TIMEOUT)
    assert "0.5 s" in failure.message
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert call(worker, len, "abc") == 3, "the next call starts another"
    assert worker.starts == starts + 1


def test_a_child_that_died_since_its_last_call_says_nothing_of_the_next(worker):
    call(worker, len, "start it")
    starts, child = worker.starts, worker._child.process
    os.kill(worker.pid, signal.SIGKILL)
    child.wait(60)
    assert worker.pid is None
    assert call(worker, len, "abc") == 3 and worker.starts == starts + 1


def is_gone(pid: int) -> bool:
    """Whether a process has ended, if nobody has asked for its exit status yet."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def end_quietly(worker):
    """Its child ends between two calls, and somebody looks."""
    call(worker, len, "start it")
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    while worker.pid is not None:
        time.sleep(0.01)
    assert call(worker, len, "abc") == 3


def end_in_a_call(worker):
    assert call(worker, os._exit, 3).kind is Kind.CRASH


def end_stopped(worker):
    call(worker, len, "start it")
    os.kill(worker.pid, signal.SIGKILL)
    worker.stop()
    worker.close()
    worker.stop()


@pytest.mark.parametrize("end", [end_quietly, end_in_a_call, end_stopped])
def test_no_process_group_is_killed_by_an_id_that_may_be_anothers(worker, monkeypatch, end):
    """A process's id is free for others once it is reaped."""
    killpg, reaped = os.killpg, []

    def watched(group, number):
        if not pathlib.Path(f"/proc/{group}").exists():
            reaped.append(group)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", watched)
    end(worker)
    worker.close()
    assert reaped == []


def test_a_module_beside_the_package_does_not_hide_one_of_the_standard_library(
    tmp_path, monkeypatch
):
    """Backports lie in site-packages, where the package may lie too."""
    (tmp_path / "autoshard").symlink_to(worker_module.autoshard.__path__[0])
    (tmp_path / "colorsys.py").write_text("raise ImportError('not of the standard library')")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setattr(worker_module.autoshard, "__path__", [str(tmp_path / "autoshard")])
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=1, folder=None))
    code = "(__import__('colorsys').__file__, __import__('beside').__file__,"
    code += " __import__('autoshard').__file__, __import__('os').environ['PYTHONPATH'])"
    standard, beside, package, path = call(worker, eval, code)
    assert standard.startswith(os.path.dirname(os.__file__))
    assert (beside, package) == (
        str(tmp_path / "beside.py"),
        str(tmp_path / "autoshard" / "__init__.py"),
    )
    assert path == "/of/the/user", "its children see what the user set"


def test_two_threads_at_one_moment_have_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    workers = [WorkerProcess(settings) for _ in range(2)]
    for i, worker in enumerate(workers):
        call(worker, os.write, 1, b"%d" % i)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0", "1"]


def test_children_of_the_child_are_killed_with_it(worker, tmp_path):
    said = tmp_path / "pid"
    script = (
        "import pathlib, subprocess; sleeper = subprocess.Popen(['sleep', '3600']);"
        f"pathlib.Path({str(said)!r}).write_text(str(sleeper.pid))"
    )
    code = f"__import__('subprocess').check_output([{sys.executable!r}, '-c', {script!r}])"
    # check_output waits for the grandchild, which holds the pipe: the call hangs.
    failure = call(worker, eval, code, time_limit_s=4)
    assert failure.kind == Kind.TIMEOUT
    pid = int(said.read_text())
    for _ in range(100):
        if is_gone(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it sleeps on")


def test_an_abort_is_a_crash_with_the_last_words(worker):
    call(worker, os.write, 2, b"F0000 check failed: x > 0\n")
    failure = call(worker, os.abort)
    assert failure.kind == Kind.CRASH
    assert "SIGABRT" in failure.message
    assert failure.message.endswith("F0000 check failed: x > 0")
    assert call(worker, len, "abc") == 3


def test_a_kill_from_outside_says_out_of_memory(worker):
    failure = call(worker, signal.raise_signal, signal.SIGKILL)
    assert failure.kind == Kind.CRASH
    assert "SIGKILL (often the kernel, out of memory)" in failure.message


def test_exit_is_a_crash(worker):
    failure = call(worker, os._exit, 3)
    assert failure.kind == Kind.CRASH
    assert "exited with status 3" in failure.message


def test_an_exception_costs_no_process(worker):
    call(worker, len, "start it")
    starts = worker.starts
    failure = call(worker, int, "no number")
    assert failure.kind == Kind.CRASH
    assert failure.message.startswith("ValueError: invalid literal")
    assert worker.starts == starts


def test_what_cannot_be_pickled_back_is_a_failure(worker):
    failure = call(worker, open, os.devnull)
    assert failure.kind == Kind.CRASH and "TypeError" in failure.message
    assert call(worker, len, "abc") == 3


def test_ctrl_c_leaves_no_stale_answer(worker, monkeypatch):
    call(worker, len, "start it")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(worker._child), "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(worker, len, "abc")
    monkeypatch.undo()
    assert worker.pid is None
    assert call(worker, len, "abcd") == 4


def test_the_child_ends_with_its_owner(tmp_path):
    owner = WorkerProcess(WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path)))
    call(owner, len, "start it")
    pid = owner.pid
    del owner
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == [], "an empty log is not kept"


def test_after_the_end_of_its_threads_no_worker_is_started(tmp_path, monkeypatch):
    """Who ends them may find no child to stop: it is just being started."""
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    started, begin, ended = threading.Event(), worker_module._Child, threading.Event()

    def slowly(*args):
        child = begin(*args)
        started.set()
        assert ended.wait(60)
        return child

    monkeypatch.setattr(worker_module, "_Child", slowly)
    said = []

    def job():
        worker = worker_here(settings)
        for _ in range(2):
            with pytest.raises(WorkerError, match="its threads have ended"):
                call(worker, len, "abc")
            said.append(worker.pid)

    with worker_threads(lambda: 1, "test") as pool:
        future = pool.submit(job)
        assert started.wait(60)
    ended.set()
    future.result(60)
    assert said == [None, None]


def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    broken = WorkerProcess(WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path)))
    with pytest.raises(WorkerError, match="no worker process could be started with /bin/false"):
        call(broken, len, "abc")


def test_a_worker_for_which_there_is_no_process_is_an_error_and_leaves_no_pipe(
    tmp_path, monkeypatch
):
    def full(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path)))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(WorkerError, match=r"no worker process could be.*temporarily unavailable"):
        call(worker, len, "abc")
    assert os.listdir("/proc/self/fd") == before and worker.pid is None


def test_the_parents_platform_and_device_count_do_not_count_in_the_child(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=2, folder=str(tmp_path)))
    assert call(worker, jax.device_count) == 2


@pytest.mark.parametrize("nice", [0, 3])
def test_a_worker_stands_back_as_far_as_it_is_told(tmp_path, nice):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path), nice=nice)
    most = 19  # where the tests stand back themselves
    assert call(WorkerProcess(settings), os.nice, 0) == min(os.nice(0) + nice, most)


def test_each_thread_of_an_executor_keeps_one_worker(tmp_path):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))

    def pid():
        worker = worker_here(settings)
        return call(worker, os.getpid)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(pid).result() for _ in range(2))
    assert first == second != pid()
    worker_here(settings).close()


def test_a_worker_that_was_started_with_other_options_is_not_gone_on_with(tmp_path, monkeypatch):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    pids = []
    for options in ("", "", "--xla_cpu_enable_fast_math=false"):
        monkeypatch.setenv("XLA_FLAGS", options)
        pids.append(call(worker_here(settings), os.getpid))
    assert call(worker_here(settings), os.getenv, "XLA_FLAGS") == options
    assert pids[0] == pids[1] != pids[2]
    worker_here(settings).close()
