"""Step times of many programs: who runs when, who stays loaded, and fresh pairs."""

from typing import Any

import pytest

from autoshard.errors import WorkerError
from autoshard.records.trial import Failure, Kind, Stage
from experiments.fidelity_parts import timing


class FakeBench:
    """A bench whose programs take a stated time. One breaks when it is run for the n-th time."""

    def __init__(self, seconds: dict[str, float], breaks: dict[str, int]):
        self.seconds, self.breaks = seconds, dict(breaks)
        self.runs: list[str] = []
        self.renewed = 0

    def renew(self) -> None:
        self.renewed += 1

    def load(self, name: str, module: object) -> object:
        return None

    def unload(self, name: str) -> None:
        pass

    def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
        self.runs.append(name)
        if self.runs.count(name) > self.breaks.get(name, 10**9):
            return Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="broke")
        return (self.seconds[name],) * steps


def in_rounds(bench: Any, rounds: int, **more: Any) -> dict[str, Any]:
    return timing.in_rounds(
        bench, dict.fromkeys(bench.seconds), {}, rounds=rounds, seed=0, memory_bytes=1, **more
    )


def test_nobody_leaves_the_rounds_however_slow() -> None:
    bench = FakeBench({"a": 0.1, "b": 10.0, "c": 0.1}, {})
    ran = in_rounds(bench, 12)
    assert all(len(r.samples_s) == 12 and r.failure is None for r in ran.values())
    assert [r.rounds for r in ran.values()] == [tuple(range(12))] * 3
    orders = {tuple(bench.runs[i : i + 3]) for i in range(9, len(bench.runs) - 3, 3)}
    assert len(orders) > 2  # a fresh order in each round
    assert bench.renewed == 2  # a fresh process after five rounds and after ten


def test_programs_are_loaded_once_where_all_that_they_hold_fits() -> None:
    for held, turns in ((4, 1), (6, 3)):
        bench = FakeBench({"a": 0.1, "b": 0.1}, {})
        ran = timing.in_rounds(
            bench,
            dict.fromkeys(bench.seconds),
            {"a": held, "b": held},
            rounds=4,
            seed=0,
            memory_bytes=10,
        )
        assert {len(r.samples_s) for r in ran.values()} == {4 * turns}


def test_each_program_is_tried_by_itself() -> None:
    class Loaded(FakeBench):
        def load(self, name: str, module: object) -> object:
            loaded.append(name)
            return Failure(stage=Stage.PROFILE, kind=Kind.OOM, message="too large")

        def unload(self, name: str) -> None:
            loaded.remove(name)

        def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
            assert loaded == [name]
            return super().run(name, steps)

    loaded: list[str] = []
    told: list[str] = []
    bench: Any = Loaded({"a": 0.1, "b": 0.2}, {})
    too_large = timing.tried(bench, dict.fromkeys("ab"), told.append)  # type: ignore[arg-type]
    assert bench.runs == loaded == [] and {f.kind for f in too_large.values()} == {Kind.OOM}
    loads = FakeBench.load
    bench.load = lambda name, module: loaded.append(name) or loads(bench, name, module)
    bench.breaks = {"a": 0}
    failed = timing.tried(bench, dict.fromkeys("ab"), told.append)  # type: ignore[arg-type]
    assert bench.runs == ["a", "b"] and {n: f.message for n, f in failed.items()} == {"a": "broke"}
    assert told[-1] == "trying b, 1 of 2 done"


def test_a_program_that_breaks_says_so_and_the_others_go_on() -> None:
    ran = in_rounds(FakeBench({"a": 0.1, "b": 0.2, "c": 0.3}, {"b": 0, "c": 4}), 6)
    assert len(ran["a"].samples_s) == 6
    assert ran["b"].failure is not None and ran["b"].samples_s == ()
    assert ran["c"].failure is not None and ran["c"].failure.message == "broke"


def test_rounds_that_end_early_are_no_sample() -> None:
    class Ending(FakeBench):
        def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
            if len(self.runs) == 8:
                raise WorkerError("no process can be started")
            return super().run(name, steps)

    with pytest.raises(timing.MeasuringError, match="after 3 of 6 rounds: no process"):
        in_rounds(Ending({"a": 0.1, "b": 0.2}, {}), 6)


def test_rounds_go_on_where_they_were_stopped() -> None:
    class Interrupted(FakeBench):
        def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
            if len(self.runs) == 3 + 4 * 3 + 1:  # after warm-ups and four rounds
                raise KeyboardInterrupt
            return super().run(name, steps)

    kept: list[Any] = []
    seconds = {"a": 0.1, "b": 0.2, "c": 0.3}
    with pytest.raises(KeyboardInterrupt):
        in_rounds(Interrupted(seconds, {"b": 4}), 6, keep=kept.append)
    # A program that failed shows the rounds that it ran.
    assert [[len(set(r.rounds)) for r in ran.values()] for ran in kept] == [[4, 3, 4]]
    begun = {name: one for name, one in kept[-1].items() if name != "b"}
    told: list[str] = []
    bench: Any = FakeBench({"a": 0.1, "c": 0.3}, {"a": 2})
    ran = in_rounds(bench, 6, begun=begun, keep=kept.append, on_progress=told.append)
    assert told == ["running 2 programs in 2 rounds", "round 5 of 6", "round 6 of 6"]
    assert ran == kept[-1]
    assert ran["a"].rounds == (0, 1, 2, 3, 4) and ran["a"].dropped == 5
    assert ran["c"].rounds == tuple(range(6)) and ran["c"].samples_s == (0.3,) * 6
    none = in_rounds(FakeBench({"c": 0.3}, {"c": 0}), 6, begun={"c": ran["c"]})
    assert none == {"c": ran["c"]}


def test_fresh_pairs_take_the_bench_s_own_times() -> None:
    bench: Any = FakeBench({"first": 0.3, "second": 0.2}, {})
    found = timing.fresh_pair(bench, None, None, limit_s=100.0, seed=0)  # type: ignore[arg-type]
    assert found.decided and found.ratio == pytest.approx(1.5)
    broken: Any = FakeBench({"first": 0.3, "second": 0.2}, {"second": 3})
    with pytest.raises(timing.MeasuringError, match="second"):
        timing.fresh_pair(broken, None, None, limit_s=100.0, seed=0)  # type: ignore[arg-type]
