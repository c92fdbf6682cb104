"""Rung 2's own pool: what it leaves behind when a search is interrupted."""

import threading
import time

import pytest

from autoshard.driver.compiling import Compiling
from autoshard.rungs.worker import WorkerSettings, worker_here
from autoshard.trial import Failure, Kind, Stage
from tests.analysed import target


class Interrupted:
    """As much of a ledger as opening the pool takes."""

    target = target()


def test_after_ctrl_c_no_thread_waits_for_a_compilation(tmp_path):
    settings = WorkerSettings(platform="cpu", device_count=1, folder=str(tmp_path))
    compiling = Compiling(Interrupted(), None)
    begun = threading.Event()

    def compile_for_long() -> Failure:
        worker = worker_here(settings)
        worker.call(len, "start it", stage=Stage.COMPILE, time_limit_s=60.0)
        begun.set()
        return worker.call(time.sleep, 600.0, stage=Stage.COMPILE, time_limit_s=600.0)

    with pytest.raises(KeyboardInterrupt), compiling.opened():
        future = compiling._executor.submit(compile_for_long)
        assert begun.wait(60)
        raise KeyboardInterrupt
    failure = future.result(timeout=60)  # of 600 that it would have slept
    assert isinstance(failure, Failure) and failure.kind == Kind.CRASH
