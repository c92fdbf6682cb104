"""What a search keeps: which rung its seconds went to."""

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
