"""Threads for jobs that use a worker process each, as many at once as a limit allows."""

import collections
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.rungs.worker.process import close_worker_here, start_none_after, stop_workers


class WorkerPool(concurrent.futures.Executor):
    """Runs jobs in threads; a job finds the worker of its thread by `worker_here`.

    The limit may change. Threads are started while jobs wait and the limit allows more. A thread
    above the limit ends before its next job, and its worker with it.

    Args:
      limit: how many threads there may be; less than 1 counts as 1. Called often, by any thread.
      name: of the threads.
    """

    def __init__(self, limit: Callable[[], int], name: str):
        self._limit = limit
        self._name = name
        self._changed = threading.Condition()
        self._jobs: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]
        self._jobs = collections.deque()
        self._count = self._idle = 0  # threads; those that are about to take a job
        self._threads: list[int] = []
        self._ended = threading.Event()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if self._ended.is_set():
                raise RuntimeError("the pool has ended")
            self._jobs.append((future, functools.partial(fn, *args, **kwargs)))
            self._grow()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Takes back what waits, and stops what the workers are at. Nothing is waited for."""
        del wait, cancel_futures
        with self._changed:
            self._ended.set()
            for future, _ in self._jobs:
                future.cancel()
            self._jobs.clear()
            self._changed.notify_all()
        # After Ctrl-C the interpreter would not end before what the threads wait for.
        stop_workers(self._threads)

    def _grow(self) -> None:
        """Starts a thread for each job that no idle one takes, up to the limit."""
        while len(self._jobs) > self._idle and self._count < max(1, self._limit()):
            self._count += 1
            self._idle += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        start_none_after(self._ended)
        self._threads.append(threading.get_ident())
        while (job := self._next()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # whoever waits gets it
                    future.set_exception(error)
            del job, future, call
            with self._changed:
                self._idle += 1
                self._grow()
                self._changed.notify_all()  # the limit may have changed
        close_worker_here()

    def _next(self) -> tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None:
        """The next job; None where the thread is to end."""
        with self._changed:
            while not self._ended.is_set() and self._count <= max(1, self._limit()):
                if self._jobs:
                    self._idle -= 1
                    return self._jobs.popleft()
                self._changed.wait()
            self._count -= 1
            self._idle -= 1
            return None


@contextlib.contextmanager
def worker_threads(limit: Callable[[], int], name: str) -> Iterator[WorkerPool]:
    """A pool whose workers are stopped at the end of the block; see `WorkerPool`."""
    pool = WorkerPool(limit, name)
    try:
        yield pool
    finally:
        pool.shutdown()
