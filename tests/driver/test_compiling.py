"""Rung 2's own pool: what it leaves behind when a search is interrupted."""

import concurrent.futures
import threading
import time

import pytest

from autoshard.driver import compiling
from autoshard.driver.compiling import Compiling
from autoshard.driver.measuring import opened_bench
from autoshard.rungs.bench_client import ChildBench
from autoshard.rungs.worker import WorkerSettings, worker_here
from autoshard.trial import Failure, Kind, Stage
from tests.analysed import target


class Interrupted:
    """As much of a ledger as opening the pool takes."""

    target = target()
    executables = None


def test_after_ctrl_c_no_thread_waits_for_a_compilation(tmp_path):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    pool = Compiling(Interrupted(), None)
    begun = threading.Event()

    def compile_for_long() -> Failure:
        worker = worker_here(settings)
        worker.call(len, "start it", stage=Stage.COMPILE, time_limit_s=60.0)
        begun.set()
        return worker.call(time.sleep, 600.0, stage=Stage.COMPILE, time_limit_s=600.0)

    with pytest.raises(KeyboardInterrupt), pool.opened():
        future = pool._executor.submit(compile_for_long)
        assert begun.wait(60)
        raise KeyboardInterrupt
    failure = future.result(timeout=60)  # of 600 that it would have slept
    assert isinstance(failure, Failure) and failure.kind == Kind.CRASH


@pytest.mark.parametrize("own", [True, False])
def test_what_this_search_compiles_itself_waits_to_be_measured(quick, monkeypatch, own):
    """A user's executor may be another machine, whose programs are not for this one."""
    folders = set()
    compile_ = compiling.compile_in_process

    def noting(request):
        folders.add(request.executables)
        return compile_(request)

    monkeypatch.setattr(compiling, "compile_in_process", noting)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        quick(executor=None if own else executor)
    (folder,) = folders
    assert (folder is not None) == own
    assert folder is None or not folder.exists(), "gone with the search"


def test_the_bench_looks_where_the_compiler_wrote(ledger, tmp_path):
    ledger.executables = tmp_path
    with opened_bench(ledger) as bench:
        assert isinstance(bench, ChildBench)
        assert bench._executables == tmp_path
