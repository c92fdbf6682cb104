"""Executables that are many for one process: the oldest go, and come again when they are wanted."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import host
from autoshard.rungs import residents
from autoshard.rungs.bench import Bench
from autoshard.rungs.numerics import NumericsReport
from autoshard.rungs.residents import Residents
from tests import lowered


class Mapped:
    """A process whose executables take 30 mappings each, and which may have 100."""

    def __init__(self, platform: str = "cpu"):
        self.loads: list[str] = []
        self.platform = platform
        self.residents = Residents(self._load)

    def _load(self, module):
        self.loads.append(module.name)
        return f"executable of {module.name}"

    def get(self, name: str):
        return self.residents.get(name, types.SimpleNamespace(name=name, platform=self.platform))

    def mappings(self):
        return 10 + 30 * sum(name in self.residents for name in "abcdef"), 100


@pytest.fixture
def mapped(monkeypatch):
    mapped = Mapped()
    monkeypatch.setattr(host, "mappings", mapped.mappings)
    monkeypatch.setattr(host, "available_bytes", lambda: None)
    return mapped


def test_the_one_not_used_for_longest_goes(mapped):
    assert [mapped.get(name) for name in "abca"][-1] == "executable of a"
    assert mapped.loads == ["a", "b", "c"], "three fit"
    mapped.get("d")
    assert [name for name in "abcd" if name in mapped.residents] == ["a", "c", "d"]
    assert mapped.get("b") == "executable of b" and mapped.loads == ["a", "b", "c", "d", "b"]


def test_one_that_is_too_large_alone_is_loaded_alone(mapped, monkeypatch):
    mapped.get("a")
    monkeypatch.setattr(host, "mappings", lambda: (1000, 100))
    assert mapped.get("b") == "executable of b"
    assert "a" not in mapped.residents


def test_there_is_room_until_one_would_go(mapped):
    of = types.SimpleNamespace
    room = [mapped.residents.has_room(of(platform="cpu")) for name in "abcd" if mapped.get(name)]
    assert room == [True, True, False, False]
    assert mapped.residents.has_room(of(platform="cuda"))
    assert "b" in mapped.residents, "who asks drives none out"


def test_where_nothing_tells_all_stay(mapped, monkeypatch):
    monkeypatch.setattr(host, "mappings", lambda: None)
    for name in "abcdef":
        mapped.get(name)
    assert all(name in mapped.residents for name in "abcdef")


def test_where_memory_is_short_one_goes_for_each_that_comes(mapped, monkeypatch):
    monkeypatch.setattr(host, "mappings", lambda: None)
    monkeypatch.setattr(host, "memory_bytes", lambda: 1000)
    left = iter([900, 200, 99, 99])
    monkeypatch.setattr(host, "available_bytes", lambda: next(left))
    for name in "abcd":
        mapped.get(name)
    assert [name for name in "abcd" if name in mapped.residents] == ["c", "d"]


def test_what_accelerators_hold_stays(monkeypatch):
    mapped = Mapped("cuda")
    monkeypatch.setattr(host, "mappings", mapped.mappings)
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    for name in "abcdef":
        mapped.get(name)
    assert all(name in mapped.residents for name in "abcdef")


def test_no_trace_shows_an_executable_being_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(residents, "_is_full", lambda: True)
    bench = Bench()
    assert bench.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    bench.load("one", lowered.train_module(lowered.ONE))
    bench.load("data", lowered.train_module((("data", 8),), spec=P()))
    here = []
    profiler = jax.profiler.trace

    def tracing(*args, **options):
        here.append(bench._entries["one"].digest in bench._residents)
        return profiler(*args, **options)

    monkeypatch.setattr(jax.profiler, "trace", tracing)
    assert bench.trace("one", str(tmp_path), 1) == str(tmp_path)
    assert here == [True]


def test_what_has_gone_goes_on_where_it_was(monkeypatch):
    """With room for one program the bench says what it says with room for all."""
    programs = {
        "whole": lowered.train_module(lowered.ONE),
        "data": lowered.train_module((("data", 8),), spec=P()),
    }

    def states(full):
        monkeypatch.setattr(residents, "_is_full", lambda: full)
        monkeypatch.setattr(residents, "_is_short", lambda: False)
        compiled = []
        bench = Bench()
        make = bench._residents._load
        bench._residents._load = lambda module: compiled.append(module) or make(module)
        assert bench.set_inputs(lowered.init_module(), lowered.make_batches()) is None
        for name, module in programs.items():
            bench.load(name, module)
            assert len(bench.run(name, 2)) == 2
        assert bench.at_hand() == ({"data"} if full else {"whole", "data"})
        # One step more is not recorded, as the program was loaded again.
        assert len(bench.run("whole", 2 - full)) == 2 - full
        held = [np.asarray(a) for a in bench._entries["whole"].state]
        assert bench.trust("whole", programs["whole"]) is None
        report = bench.numerics("data", "whole")
        assert isinstance(report, NumericsReport) and report.passed
        return held, len(compiled)

    (once, few), (again, many) = states(full=False), states(full=True)
    assert (few, many) == (2, 4)
    for one, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_renewed_process_loads_no_more_than_stays(monkeypatch):
    """The second program would drive the first out: it is loaded when it runs."""
    modules = {
        "whole": lowered.train_module(lowered.ONE),
        "data": lowered.train_module((("data", 8),), spec=P()),
    }
    monkeypatch.setattr(residents, "_is_full", lambda: True)
    monkeypatch.setattr(residents, "_is_short", lambda: False)
    bench = Bench()
    assert bench.set_inputs(lowered.init_module(), lowered.make_batches()) is None
    assert [bench.resume(name, module) for name, module in modules.items()] == [None, None]
    assert bench.at_hand() == {"whole"} and bench._entries["whole"].steps == 1
    assert len(bench.run("data", 2)) == 2
    assert bench.at_hand() == {"data"}
    assert bench._entries["data"].steps == 3, "one after loading is not recorded"
