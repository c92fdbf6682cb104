"""Which processes stand still, on pretended logs and states; a real one: test_worker."""

import pytest

from autoshard.rungs.worker import deadlock as standstill
from autoshard.rungs.worker.deadlock import QUIET_S, Standstill

STUCK = "This thread has been waiting for 20 seconds and may be stuck.\n"
UNSTUCK = "This thread is unstuck waiting for `x`. Warning above was a false-positive.\n"


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A process of which a test says the log, the threads' states and the processor time."""
    log = tmp_path / "log"
    log.write_text("an earlier call: " + STUCK)
    watch = Standstill(1, log)
    process = {"watch": watch, "log": log, "states": "SS", "used": 7.0, "now": 100.0}
    monkeypatch.setattr(standstill, "_processor_s", lambda pid: process["used"])
    monkeypatch.setattr(standstill, "_all_asleep", lambda pid: set(process["states"]) <= {"S"})
    return process


def looks(process, seconds, used_a_second=0.0):
    """Whether it was seen to stand still, looked at each second for so long."""
    found = []
    for _ in range(seconds):
        process["now"] += 1.0
        process["used"] += used_a_second
        found.append(process["watch"].seen(process["now"]))
    return any(found)


def say(process, text):
    with process["log"].open("a") as file:
        file.write(text)


def test_who_was_warned_of_and_sleeps_stands_still(watched):
    assert not looks(watched, 60), "nothing was said in this call"
    say(watched, STUCK)
    assert not looks(watched, int(QUIET_S)) and looks(watched, 2)


def test_words_may_come_in_parts(watched):
    say(watched, STUCK[:-8])
    looks(watched, 1)
    say(watched, STUCK[-8:])
    assert looks(watched, 8)


@pytest.mark.parametrize("state", ["SR", "SD", "TT"])
def test_who_runs_or_waits_for_a_disk_or_was_stopped_does_not(watched, state):
    say(watched, STUCK)
    watched["states"] = state
    assert not looks(watched, 30)
    watched["states"] = "SS"
    assert not looks(watched, int(QUIET_S)) and looks(watched, 2)


def test_who_computes_does_not(watched):
    say(watched, STUCK)
    assert not looks(watched, 60, used_a_second=0.1)


def test_who_goes_on_does_not(watched):
    say(watched, STUCK + UNSTUCK)
    assert not looks(watched, 60)
    say(watched, STUCK)
    assert looks(watched, 8), "but may again"


def test_a_watcher_that_slept_begins_again(watched):
    say(watched, STUCK)
    looks(watched, 2)
    watched["now"] += 3600.0
    assert not looks(watched, int(QUIET_S)) and looks(watched, 2)
