"""Keeps the compilers' log lines off the user's terminal.

XLA writes its warnings straight to file descriptor 2, past Python. While a program compiles in
this process, the descriptor points to a file. Afterwards XLA's lines go to the log, and all other
lines go to where descriptor 2 pointed before.

Descriptor 2 belongs to the whole process. Blocks that overlap, in several threads, therefore share
one file: the first diverts the descriptor, the last restores it.

XLA may abort the process inside a block. A small shell then prints the file: it waits on a pipe
that only this process holds open, and sees it close.
"""

import contextlib
import importlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("autoshard")
_XLA_LINE = re.compile(
    rb"^(?:[WEIF]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ \S+\.cc:\d+\]"
    rb"|WARNING: All log messages before absl::InitializeLog"
    # Of libtpu where no TPU is there.
    rb"|WARNING: Logging before InitGoogle|Failed to find host bounds for accelerator type"
    rb"|=== Source Location Trace: ===|\S+\.cc:\d+\s*$)"
)
_PLUGINS = logging.getLogger("jax._src.xla_bridge")
"""Where JAX says, with a traceback, that a plugin has no devices here."""
_PRINT_IF_LEFT = 'read -r restored || cat "$0" >&2; rm -f "$0"'
"""A shell script: prints and removes the file $0, unless a line comes on its input first."""

_lock = threading.Lock()
_inside: set[object] = set()
_diverted: "_Diverted | None" = None


def start_jax() -> None:
    """Starts JAX's backends, if they are not started, for a target whose devices are not here.

    Compilers that are plugins write when they load. What they and JAX say of devices that they do
    not find goes to the log: nobody asked for these devices.
    """

    def to_our_log(record: logging.LogRecord) -> bool:
        _log.debug("%s", record.getMessage(), exc_info=record.exc_info)
        return False

    _PLUGINS.addFilter(to_our_log)
    try:
        with quiet():
            importlib.import_module("jax").local_devices()
    finally:
        _PLUGINS.removeFilter(to_our_log)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back what is written to descriptor 2 inside, then sorts it as above.

    Threads may overlap. What is held back appears when the last block ends, or when the process
    dies inside.
    """
    global _diverted
    block, text = object(), b""
    try:
        with _lock:
            if not _inside:
                _diverted = _divert()
            _inside.add(block)
        yield
    finally:
        with _lock:
            _inside.discard(block)
            if not _inside and _diverted is not None:
                text = _diverted.restore()
                _diverted = None
        for line in text.splitlines(keepends=True):
            if _XLA_LINE.match(line):
                _log.debug("%s", line.decode("utf-8", "replace").rstrip())
            else:
                os.write(2, line)


class _Diverted:
    """Descriptor 2 while it points to a file."""

    def __init__(self, original: int, path: Path):
        self._original = original
        self._path = path
        self._watcher: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # without a shell, an abort leaves the file
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _PRINT_IF_LEFT, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=original,
                env={**os.environ, "PATH": os.defpath},  # `cat` and `rm`, whatever the user's PATH
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )

    def restore(self) -> bytes:
        """Points descriptor 2 back to where it pointed, and returns what was held back."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os.dup2(self._original, 2)
        os.close(self._original)
        try:
            text = self._path.read_bytes()
            self._path.unlink(missing_ok=True)
        except OSError:  # somebody cleaned the folder
            text = b""
        if self._watcher is not None:
            with contextlib.suppress(OSError):
                self._watcher.communicate(b"restored\n")
        return text


def _divert() -> _Diverted | None:
    """Points descriptor 2 to a new file.

    Returns:
      None where there is no descriptor 2, a closed stream, or no folder to write to.
    """
    with contextlib.ExitStack() as undo:
        try:
            sys.stderr.flush()
            file, name = tempfile.mkstemp(prefix="autoshard-", suffix=".stderr")
            undo.callback(os.close, file)
            with contextlib.ExitStack() as failed:
                failed.callback(os.unlink, name)
                original = os.dup(2)
                failed.pop_all()
        except (OSError, ValueError, AttributeError):
            return None
        diverted = _Diverted(original, Path(name))
        os.dup2(file, 2)
        return diverted
