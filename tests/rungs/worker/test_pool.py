"""Pools of threads with a worker each: how many there are follows a limit that may change."""

import concurrent.futures
import threading
import time
import types

import pytest

from autoshard.rungs.worker.pool import WorkerPool, worker_threads


class Jobs:
    """Jobs that end when they are let go; how many run at once."""

    def __init__(self, pool: WorkerPool, count: int):
        self.running = 0
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)
        self.futures = [pool.submit(self._run) for _ in range(count)]

    def _run(self) -> None:
        with self._lock:
            self.running += 1
        self._go.acquire()
        with self._lock:
            self.running -= 1

    def let_go(self, count: int) -> None:
        """Ends some of those that run."""
        done = sum(future.done() for future in self.futures)
        self._go.release(count)
        wait_until(lambda: sum(future.done() for future in self.futures) == done + count)


def wait_until(true) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_no_more_jobs_run_than_the_limit_allows_as_it_grows_and_shrinks() -> None:
    limit = types.SimpleNamespace(now=2)
    with worker_threads(lambda: limit.now, "test") as pool:
        jobs = Jobs(pool, 20)
        wait_until(lambda: jobs.running == 2)
        limit.now = 5
        jobs.let_go(1)
        wait_until(lambda: jobs.running == 5)
        limit.now = 1
        jobs.let_go(4)
        wait_until(lambda: jobs.running == 1)
        time.sleep(0.1)
        assert jobs.running == 1 and pool._count == 1, "threads above the limit end"
        limit.now = 0
        jobs.let_go(1)
        wait_until(lambda: jobs.running == 1)
        jobs.let_go(14)
        concurrent.futures.wait(jobs.futures, timeout=20)
        assert all(future.done() for future in jobs.futures)


def test_a_thread_serves_the_next_job_too_and_an_error_is_the_futures() -> None:
    with worker_threads(lambda: 4, "test") as pool:
        first = pool.submit(threading.get_ident).result(20)
        wait_until(lambda: pool._idle == 1)
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "no number").result(20)
        wait_until(lambda: pool._idle == 1)
        assert pool.submit(threading.get_ident).result(20) == first
        assert pool.submit(int, "7", base=8).result(20) == 7


def test_at_the_end_what_waits_is_taken_back_and_all_threads_end() -> None:
    with worker_threads(lambda: 1, "test") as pool:
        jobs = Jobs(pool, 3)
        wait_until(lambda: jobs.running == 1)
    assert [future.cancelled() for future in jobs.futures] == [False, True, True]
    with pytest.raises(RuntimeError, match="the pool has ended"):
        pool.submit(len, "abc")
    jobs.let_go(1)
    wait_until(lambda: pool._count == 0)
