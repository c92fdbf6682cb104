"""The line that a search shows while it runs."""

import contextlib
import os
import select
import subprocess
import sys

import pytest

import autoshard
from autoshard.records.trial import Stage
from autoshard.report.progress import Progress, shown_progress
from autoshard.tuner.budget import Event

COMPILING = Event(stage=Stage.COMPILE, done=3, total=12, text="lowering", best_s=0.002)


def read(descriptor: int) -> str:
    """What a terminal has been sent by now."""
    found = b""
    while select.select([descriptor], [], [], 0)[0]:
        try:
            found += os.read(descriptor, 1 << 16)
        except OSError:  # Linux says so when nobody writes to it any more
            break
    return found.decode()


@contextlib.contextmanager
def a_terminal():
    """Standard error is a terminal; the descriptor reads what it shows."""
    shows, side = os.openpty()
    with open(side, "w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
        yield shows
    os.close(shows)


def test_it_says_what_runs_how_far_it_is_and_the_best_so_far():
    progress = Progress()
    assert progress.text(5.0) == "autoshard 0:05  reading the step: starting"
    progress(COMPILING)
    assert progress.text(65.9) == (
        "autoshard 1:05  rung 2 of 3, compiling 3/12, best so far 2.0 ms: lowering"
    )


def test_a_terminal_shows_one_line_that_goes_when_the_search_ends():
    with a_terminal() as terminal:
        with shown_progress(None) as progress:
            assert "starting" in read(terminal), "at once"
            progress(COMPILING)
            assert "best so far 2.0 ms: lowering" in read(terminal)
        rest = read(terminal)
        assert rest.startswith("\r") and not rest.strip(), "the line is cleared"


def test_the_clock_runs_while_nothing_happens(monkeypatch):
    with a_terminal() as terminal:
        monkeypatch.setattr("autoshard.report.progress._REFRESH_S", 0.01)
        with shown_progress(None):
            read(terminal)
            assert select.select([terminal], [], [], 10)[0]


def test_a_long_line_is_cut(monkeypatch):
    with a_terminal() as terminal:
        monkeypatch.setenv("COLUMNS", "40")
        with shown_progress(None) as progress:
            read(terminal)
            progress(COMPILING)
            said = read(terminal)
        assert "rung 2 of 3" in said and "best" not in said


@pytest.mark.parametrize("asked", [None, False])
def test_a_pipe_is_silent(capfd, asked):
    with shown_progress(asked) as progress:
        progress(COMPILING)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_is_silent_where_no_progress_is_asked_for():
    with a_terminal() as terminal:
        with shown_progress(False) as progress:
            progress(COMPILING)
        assert read(terminal) == ""


def test_a_pipe_that_asks_for_progress_gets_whole_lines(capfd):
    with shown_progress(True) as progress:
        progress(COMPILING)
        progress(COMPILING)
    lines = capfd.readouterr().err.split("\n")
    assert [line.partition("  ")[2] for line in lines] == [
        "reading the step: starting",
        "rung 2 of 3, compiling 3/12, best so far 2.0 ms: lowering",
        "",
    ]


def test_the_line_is_not_caught_where_compilers_are_kept_quiet():
    """And what is held back comes out whole, after it."""
    script = """
import os
from autoshard.compat.xla.stderr_capture import quiet
from autoshard.records.trial import Stage
from autoshard.report.progress import shown_progress
from autoshard.tuner.budget import Event
with shown_progress(None) as progress:
    with quiet():
        os.write(2, b"from a library\\n")
        progress(Event(stage=Stage.COMPILE, done=1, total=2, text="inside"))
"""
    shows, side = os.openpty()
    subprocess.run([sys.executable, "-c", script], stderr=side, check=True)
    said = read(shows)
    os.close(side)
    os.close(shows)
    assert 0 < said.index("inside") < said.index("from a library")


def test_a_search_shows_something_before_it_calls_the_model(monkeypatch):
    monkeypatch.setattr("autoshard.target.target.require_compiler", str)  # nothing is compiled
    with a_terminal() as terminal:
        said = []

        def model_fn():
            said.append(read(terminal))
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            autoshard.search(model_fn, "v5e:2x4")
        assert "tracing the step" in said[0]
        read(terminal)
        with pytest.raises(RuntimeError, match="enough"):
            autoshard.search(model_fn, "v5e:2x4", progress=False)
        assert "autoshard" not in said[1]
