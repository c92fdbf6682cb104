"""One line on the terminal while a search runs: what it does, and the best step time so far."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from autoshard.records.trial import Stage
from autoshard.records.words import seconds
from autoshard.tuner.budget import Event

_REFRESH_S = 0.5
_STAGES = {
    Stage.TRACE: "reading the step",
    Stage.PROPAGATE: "rung 1 of 3, layouts",
    Stage.COMPILE: "rung 2 of 3, compiling",
    Stage.PROFILE: "rung 3 of 3, measuring",
}


@contextlib.contextmanager
def shown_progress(asked: bool | None) -> Iterator["Progress"]:
    """Progress on standard error, for as long as the block runs.

    Args:
      asked: None to show it on a terminal alone. True writes one line for each step of the search
        where standard error is no terminal. False shows nothing.
    """
    progress = Progress()
    with contextlib.ExitStack() as stack:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if terminal and asked is not False:
            progress.line = stack.enter_context(_terminal_line())
            stack.enter_context(_ticking(progress))
        elif asked:
            progress.line = _Log(sys.stderr)
        progress.show()
        yield progress


class Line(Protocol):
    """A line that is written anew."""

    def write(self, text: str) -> None: ...


class Progress:
    """A callback of a search.

    Attributes:
      line: where it is shown; None for nowhere.
    """

    def __init__(self) -> None:
        self.line: Line | None = None
        self._start_s = time.monotonic()
        self._event = Event(stage=Stage.TRACE, done=0, total=0, text="starting")
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        self._event = event
        self.show()

    def show(self) -> None:
        if self.line is None:
            return
        with self._lock:
            self.line.write(self.text(time.monotonic() - self._start_s))

    def text(self, elapsed_s: float) -> str:
        """The line, such as `autoshard 1:05  rung 2 of 3, compiling 3/12: lowering`."""
        event, minutes = self._event, int(elapsed_s) // 60
        done = f" {event.done}/{event.total}" if event.total else ""
        best = "" if event.best_s is None else f", best so far {seconds(event.best_s)}"
        clock = f"{minutes}:{int(elapsed_s) % 60:02}"
        return f"autoshard {clock}  {_STAGES[event.stage]}{done}{best}: {event.text}"


@contextlib.contextmanager
def _ticking(progress: Progress) -> Iterator[None]:
    """Shows it again and again: the clock runs while nothing happens."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_REFRESH_S):
            progress.show()

    thread = threading.Thread(target=tick, name="autoshard-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _terminal_line() -> Iterator[Line]:
    """A line on a copy of descriptor 2: what diverts the descriptor does not catch the line."""
    try:
        stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a terminal without a descriptor
        yield _Returning(sys.stderr)
        return
    with stream:
        line = _Returning(stream)
        try:
            yield line
        finally:
            line.write("")


class _Returning:
    """Overwrites its line, and leaves the cursor at its beginning for what others print."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"\r{text[:width].ljust(width)}\r")
            self._stream.flush()


class _Log:
    """One line of a file for each step of the search, without the running numbers."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = ""

    def write(self, text: str) -> None:
        step = text.partition("  ")[2]
        if step != self._last:
            self._last = step
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text + "\n")
                self._stream.flush()
