"""What a search keeps: which rung its seconds went to."""

import dataclasses
import time
import types

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""
    clock = types.SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    return clock


def test_time_belongs_to_one_rung_alone(ledger, clock):
    with ledger.timed("propagate"):
        clock.now_s += 10
        with ledger.timed("compile"):
            clock.now_s += 3
        clock.now_s += 1
    with pytest.raises(KeyboardInterrupt), ledger.timed("compile"):
        clock.now_s += 5
        raise KeyboardInterrupt
    with ledger.timed("profile"):
        clock.now_s += 2
    assert list(ledger.elapsed_s.items()) == [("propagate", 11), ("compile", 8), ("profile", 2)]


def test_shares_of_the_seconds_are_of_what_tracing_leaves(ledger, clock):
    """A calibration of half a minute must not take all of the time of rung 1."""
    ledger.budget = dataclasses.replace(ledger.budget, seconds=100.0)
    ledger.start_s, clock.now_s, ledger.elapsed_s = 0.0, 60.0, {"trace": 60.0}
    assert not ledger.late(0.25) and ledger.ended == "finished"
    clock.now_s = 69.0
    assert not ledger.late(0.25)
    clock.now_s = 71.0
    assert ledger.late(0.25) and not ledger.late(1.0) and ledger.ended == "out of time"
    clock.now_s = 101.0
    assert ledger.late(1.0)
    ledger.elapsed_s, clock.now_s = {"trace": 120.0}, 121.0
    assert ledger.late(0.25), "nothing is left"
