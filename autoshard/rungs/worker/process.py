"""A worker process that can be killed: compiling and measuring happen where a crash costs nothing.

The child is a fresh interpreter that runs `autoshard.rungs.worker_main`, not a fork and not
`multiprocessing`: the user's `__main__` is never imported again, so notebooks and closures work.
Requests and answers are length-prefixed pickles over two pipes of their own; whatever is printed,
by Python or by XLA, goes to a file. A request is a module-level function and its arguments.
"""

import contextlib
import dataclasses
import os
import pickle
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import autoshard
from autoshard.compat.xla import deviceless
from autoshard.compat.xla.compilers import compiler_options
from autoshard.compat.xla.threads import more_threads
from autoshard.errors import WorkerError
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.worker.deadlock import QUIET_S, Standstill

T = TypeVar("T")

log_path: str | None = None
"""In a worker the file behind its stdout and stderr; None in every other process."""

LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
_TAIL_LINES = 12
_TAIL_BYTES = 1 << 20  # a stack trace for each of a mesh's threads may follow what killed it
# absl's log line of a failed check: severity, date, time, thread, file:line] message.
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ (\S+\] .*)$", re.MULTILINE)
_FATAL_WIDTH = 240
_BEGIN = """
import importlib.util, pathlib, runpy, sys
package = pathlib.Path(sys.argv.pop(1))
spec = importlib.util.spec_from_file_location("autoshard", package / "__init__.py")
sys.modules["autoshard"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.path.append(str(package.parent))
runpy.run_module("autoshard.rungs.worker.child", run_name="__main__", alter_sys=True)
"""
"""A child's program: runs `worker_main` of this very package, whichever one its Python would find.

The folder that holds the package comes last on the path. It may be site-packages, whose modules
must not hide those of the standard library.
"""
_LOOK = getattr(os, "WEXITED", 0) | os.WNOHANG | getattr(os, "WNOWAIT", 0)
_ENDS_S = 10.0  # how long a child may take to end after it closed its pipe
_WATCHED_S = 1.0  # how often a child that has not answered is looked at


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How to start a worker.

    Attributes:
      platform: the only platform its JAX may open: "cpu", "cuda", "rocm" or "tpu".
      deviceless: it compiles for hardware that is not here; its platform is "cpu".
      device_count: how many CPU devices it makes; ignored elsewhere.
      folder: where its output goes, one file per process; made when missing. None for a temporary
        one of each process's own, which goes with it: where this is read by another machine.
      start_limit_s: how long starting (importing JAX) may take, seconds.
      nice: how far it stands back behind other processes for a core; see os.nice.
    """

    platform: str
    device_count: int
    folder: str | None
    start_limit_s: float = 300.0
    deviceless: bool = False
    nice: int = 0


class WorkerProcess:
    """One child process, started at the first call and again after each death.

    Not for two threads at once: calls wait for each other. The child ends when this object is
    garbage collected, when `close` is called, and when this process is gone.

    Attributes:
      starts: how many processes were started; whoever keeps state in the child compares it.

    Args:
      ended: once it is set no child is started any more.
    """

    def __init__(self, settings: WorkerSettings, ended: threading.Event | None = None):
        self.settings = settings
        self.starts = 0
        self._ended = ended or threading.Event()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none, or none that lives."""
        child = self._child
        return child.process.pid if child and not child.has_ended() else None

    def call(
        self, function: Callable[..., T], *args: object, stage: Stage, time_limit_s: float
    ) -> T | Failure:
        """Runs `function(*args)` in the child.

        Args:
          function: importable by name in the child; arguments and result are pickled.
          stage: stage of the failures returned.
          time_limit_s: after that the child's whole process group is killed. Starting the child
            does not count.

        Returns:
          What the function returned, or a Failure: TIMEOUT when killed at the limit, CRASH when the
          process died, stood still (`standstill`) or the function raised; the message ends with
          what was last written to stderr or with the traceback.

        Raises:
          WorkerError: the child cannot be started at all, or is not to be any more.
        """
        with self._lock:
            if self.pid is None:  # one that died since its last call says nothing of this one
                self._kill()
            child = self._child or self._start()
            begin = time.monotonic()
            try:
                child.send(pickle.dumps((function, args), protocol=5), begin + time_limit_s)
                answer = child.receive(begin + time_limit_s)
            except TimeoutError:
                message = f"killed after the time limit of {time_limit_s:g} s{child.tail()}"
                return self._died(stage, Kind.TIMEOUT, message, begin)
            except _StandsStill:
                message = (
                    "its collectives wait for each other: XLA said that they may be stuck, and in"
                    f" {QUIET_S:g} s nothing was computed;"
                    f" {more_threads(self.settings.device_count)}{child.tail()}"
                )
                return self._died(stage, Kind.CRASH, message, begin)
            except (EOFError, BrokenPipeError):
                message = f"the worker process {child.epitaph()}{child.tail()}"
                return self._died(stage, Kind.CRASH, message, begin)
            except BaseException:  # Ctrl-C between request and answer: the pipe is out of step
                self._kill()
                raise
        returned, value = pickle.loads(answer)
        if returned:
            return value
        return Failure(
            stage=stage, kind=Kind.CRASH, message=value, elapsed_s=time.monotonic() - begin
        )

    def close(self) -> None:
        """Ends the child, if there is one. The next call starts another."""
        with self._lock:
            self._kill()

    def stop(self) -> None:
        """Kills the child under a call that goes on in another thread: it returns a failure."""
        child = self._child
        if child is not None:
            child.kill_group()

    def _start(self) -> "_Child":
        try:
            child = _Child(self.settings)
        except OSError as error:  # no memory, no process, no room for its output
            raise WorkerError(self._unstarted(error)) from error
        self._child = child
        self._finalizer = weakref.finalize(self, child.kill)
        self.starts += 1
        if self._ended.is_set():  # who set it may have found no child to stop
            self._kill()
            raise WorkerError("no worker process is started any more: its threads have ended")
        try:
            child.receive(time.monotonic() + self.settings.start_limit_s)
        except (TimeoutError, EOFError, BrokenPipeError, _StandsStill) as error:
            tail = child.tail()
            self._kill()
            raise WorkerError(f"{self._unstarted(error)}{tail}") from error
        except BaseException:
            self._kill()
            raise
        return child

    def _unstarted(self, error: Exception) -> str:
        return (
            f"no worker process could be started with {sys.executable}"
            f" (platform {self.settings.platform}): {error!r}"
        )

    def _died(self, stage: Stage, kind: Kind, message: str, begin: float) -> Failure:
        self._kill()
        elapsed_s = time.monotonic() - begin
        return Failure(stage=stage, kind=kind, message=message, elapsed_s=elapsed_s)

    def _kill(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


class _StandsStill(Exception):
    """The child computes nothing and will not answer."""


class _Child:
    """The process, its two pipes and its output file."""

    def __init__(self, settings: WorkerSettings):
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if settings.folder is None:
            self._own = tempfile.TemporaryDirectory(prefix="autoshard-", ignore_cleanup_errors=True)
            folder = Path(self._own.name)
        else:
            folder = Path(settings.folder)
            folder.mkdir(parents=True, exist_ok=True)
        pipes = [*os.pipe(), *os.pipe()]
        request_read, self._request_write, self._answer_read, answer_write = pipes
        self._group = threading.Lock()
        log_file, name = tempfile.mkstemp(".stderr", f"worker-{os.getpid()}-", folder)
        self.log = Path(name)
        command = [sys.executable, "-P", "-c", _BEGIN, str(Path(autoshard.__path__[0]))]
        command += [str(request_read), str(answer_write), str(os.getpid())]
        command += [settings.platform, str(settings.device_count), str(self.log)]
        command += [str(settings.nice)]
        try:
            with open(log_file, "wb") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(request_read, answer_write),
                    start_new_session=True,  # a process group of its own: kill all, no Ctrl-C
                    env=_environment(settings),
                )
        except OSError:
            for pipe in pipes:
                os.close(pipe)
            raise
        self._watch = Standstill(self.process.pid, self.log)
        os.close(request_read)
        os.close(answer_write)
        for fd in (self._request_write, self._answer_read):
            os.set_blocking(fd, False)

    def send(self, payload: bytes, deadline: float) -> None:
        self._watch = Standstill(self.process.pid, self.log)  # before: it may warn at once
        view = memoryview(LENGTH.pack(len(payload)) + payload)
        while view:
            _wait(self._request_write, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._request_write, view[:_CHUNK_BYTES]) :]

    def receive(self, deadline: float) -> bytes:
        (length,) = LENGTH.unpack(self._receive(LENGTH.size, deadline))
        return self._receive(length, deadline)

    def _receive(self, length: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            while not _ready(self._answer_read, select.POLLIN, deadline, _WATCHED_S):
                if self._watch.seen(time.monotonic()):
                    raise _StandsStill
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._answer_read, min(_CHUNK_BYTES, length - len(parts)))
                if not part:
                    raise EOFError("the worker closed its pipe")
                parts += part
        return bytes(parts)

    def has_ended(self) -> bool:
        """Whether the process has ended. It is not reaped: until then nobody else has its id."""
        if self.process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):  # macOS
            return self.process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.process.pid, _LOOK) is not None
        except ChildProcessError:  # somebody else reaped it
            return True

    def kill_group(self) -> None:
        """Kills the process and its children, unless it is reaped and its id may be another's."""
        with self._group:
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def epitaph(self) -> str:
        """How the process ended, and the first failed check that XLA logged, if one did."""
        deadline = time.monotonic() + _ENDS_S
        while not self.has_ended():
            if time.monotonic() > deadline:
                return "closed its pipe"
            time.sleep(0.01)
        self._reap()
        code = self.process.returncode
        if code >= 0:
            return f"exited with status {code}"
        hint = " (often the kernel, out of memory)" if code == -signal.SIGKILL else ""
        fatal = _FATAL.search(self._output())
        check = f": {textwrap.shorten(fatal[1], _FATAL_WIDTH, placeholder=' ...')}" if fatal else ""
        return f"died of {signal.Signals(-code).name}{hint}{check}"

    def tail(self) -> str:
        """The last lines of its output, led by where the rest is if that stays; "" if none."""
        lines = self._output().splitlines()[-_TAIL_LINES:]
        where = "" if self._own else f", from {self.log}"
        return "\n".join([f"; its last output{where}:", *lines]) if lines else ""

    def _output(self) -> str:
        """The end of what it wrote, "" where nothing is left of it."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def kill(self) -> None:
        """Kills the whole process group and frees the pipes; once."""
        self._reap()
        os.close(self._request_write)
        os.close(self._answer_read)
        with contextlib.suppress(FileNotFoundError):  # whoever owns the folder may have removed it
            if self.log.stat().st_size == 0:
                self.log.unlink()
        if self._own:
            self._own.cleanup()

    def _reap(self) -> None:
        """Kills the process group, then frees the process's id."""
        self.kill_group()
        with self._group:
            self.process.wait()


def _wait(fd: int, event: int, deadline: float) -> None:
    """Waits until `fd` is ready, or raises TimeoutError."""
    while not _ready(fd, event, deadline, _WATCHED_S):
        pass


def _ready(fd: int, event: int, deadline: float, longest_s: float) -> bool:
    """Waits so long at most; whether `fd` is ready. Raises TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return bool(poll.poll(min(left, longest_s) * 1000))


def _environment(settings: WorkerSettings) -> dict[str, str]:
    """This process's environment, with the platform named."""
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = settings.platform
    if settings.deviceless:
        env = deviceless.environment(env)
    env["TF_CPP_MIN_LOG_LEVEL"] = "1"  # warnings are read back: the user may not silence them
    return env


_here = threading.local()
_of_threads: "weakref.WeakValueDictionary[int, WorkerProcess]" = weakref.WeakValueDictionary()


def worker_here(settings: WorkerSettings) -> WorkerProcess:
    """The worker of the calling thread, kept for its next call with the same settings and options.

    So a job submitted to any `concurrent.futures.Executor` finds a warm worker, one for each
    thread or process of the executor.
    """
    worker = getattr(_here, "worker", None)
    options = compiler_options("tpu")  # of all compilers: the child has what it was started with
    if worker is None or worker.settings != settings or _here.options != options:
        if worker is not None:
            worker.close()
        worker = WorkerProcess(settings, getattr(_here, "ended", None))
        _here.worker = _of_threads[threading.get_ident()] = worker
        _here.options = options
    return worker


def start_none_after(ended: threading.Event) -> None:
    """Once `ended` is set, no worker of the calling thread is started any more."""
    _here.ended = ended


def close_worker_here() -> None:
    """Ends the worker of the calling thread, if it has one: nothing else is asked of it."""
    worker = getattr(_here, "worker", None)
    if worker is not None:
        worker.close()
        del _here.worker


def stop_workers(threads: Iterable[int]) -> None:
    """Stops what the workers of some threads of this process are at.

    Args:
      threads: as `threading.get_ident` numbers them.
    """
    for thread in threads:
        worker = _of_threads.get(thread)
        if worker is not None:
            worker.stop()
