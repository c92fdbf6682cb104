"""What the two waves of a search compile and measure, with a compiler and a clock that are not."""

import contextlib

import pytest

from autoshard.records.trial import Failure, Kind, Measurement, Rung, Stage
from autoshard.tuner import loop as search
from autoshard.tuner.budget import Budget
from tests.tuner.test_selection import estimate, row

WRONG = Failure(stage=Stage.PROFILE, kind=Kind.NUMERICS, message="something else")


class Compiler:
    """Says what rung 1 said, times `slower` of what is in it."""

    def __init__(self, ledger, slower):
        self.count, self._state, self._slower = 0, ledger, slower
        self.most = ledger.budget.compiles_by(workers=7)  # 20 where the budget leaves it open
        self.at_work = False

    def compile(self, indices, share):
        self.begin(indices, share)
        self.finish()

    def begin(self, indices, share):
        self.at_work = True
        self.count += len(indices)
        for i in indices:
            time_s = self._state.trials[i].propagated.time_s * self._slower.get(i, 1.0)
            self._state.trials[i].compiled = estimate(time_s, rung=Rung.COMPILE)

    def known(self, row):
        return False

    def finish(self):
        self.at_work = False


class Clock:
    """Measures what is predicted, but for what is `broken`, and knows what it was given."""

    def __init__(self, ledger, broken, compiler):
        self.waves, self.ranking, self._state, self._broken = {}, (), ledger, broken
        self._compiler = compiler

    def measure(self, bench, indices, wave, rounds, first_round, share):
        assert not self._compiler.at_work, "compilers would take cores from what is measured"
        self.waves[wave] = list(indices)
        for i in indices:
            seen = Measurement(samples_s=(self._state.estimated_s(i),), rounds=(first_round,))
            self._state.trials[i].profiled = WRONG if i in self._broken else seen
        self.ranking = tuple(self._state.measured())


@pytest.fixture
def climbed(ledger, monkeypatch):
    """Searches rows of these times; the first `baselines` of them are that."""

    def climb(times_s, baselines, slower=None, broken=(), names=None, **budget):
        ledger.budget = Budget(**budget)
        ledger.trials = [
            row(
                i,
                (names or {}).get(i, f"baseline {i}") if i < baselines else "",
                propagated=estimate(t),
            )
            for i, t in enumerate(times_s)
        ]
        monkeypatch.setattr(search, "propagate_all", lambda ledger, a, b, begin: begin())
        monkeypatch.setattr(search, "opened_runner", lambda ledger: contextlib.nullcontext())
        compiler = Compiler(ledger, slower or {})
        clock = Clock(ledger, broken, compiler)
        search._climb(ledger, compiler, clock, None)
        compiled = sum(r.compiled is not None for r in ledger.trials)
        assert compiled == compiler.count <= compiler.most
        assert len(ledger.measured()) <= ledger.budget.profiles
        return clock.waves

    return climb


def test_baselines_take_at_most_half_of_the_compilations(climbed, ledger):
    climbed([1.0 + i / 100 for i in range(14)] + [1.01 + i / 1000 for i in range(30)], 14)
    assert [i for i, r in enumerate(ledger.trials[:14]) if r.compiled] == list(range(10))


def test_nothing_is_measured_and_half_of_the_compilations_is_for_what_is_found(climbed, ledger):
    times = [1.0 + i / 100 for i in range(14)] + [1.01 + i / 1000 for i in range(30)]
    climbed(times, 14, compiles=5, profiles=0)
    assert [i for i, r in enumerate(ledger.trials) if r.compiled] == [0, 1, 2, 14, 15]


def test_hopeless_baselines_leave_their_place_to_the_best(climbed, ledger):
    waves = climbed([2.0 + i / 10 for i in range(10)] + [1 + i / 1000 for i in range(30)], 10)
    assert waves["first"] == [10, 0, 1, 11, 12, 13, 14]
    assert waves["final"] == [10, 11, 12, 15, 16, 17, 18, 19]
    assert ledger.trials[2].compiled and not ledger.trials[2].profiled


@pytest.mark.parametrize("compiles", [3, 4, 20])
def test_four_measurements_are_enough_for_data_parallel_and_fsdp(climbed, ledger, compiles):
    times = [1.0, 1.01, 1.02, 5.0, 6.0, *(0.9 + i / 1000 for i in range(30))]
    names = {3: "data parallel", 4: "FSDP, gathered once"}
    waves = climbed(times, 5, names=names, compiles=compiles, profiles=4)
    assert {3, 4} <= set(waves["first"])
    waves = climbed(times, 5, names=names, compiles=compiles, profiles=3)
    assert not {3, 4} & set(waves["first"])


def test_what_the_compiler_finds_hopeless_is_not_measured_in_either_wave(climbed):
    slower = dict.fromkeys((11, 15, 17), 1.6)
    waves = climbed(
        [2.0 + i / 10 for i in range(10)] + [1 + i / 1000 for i in range(30)], 10, slower
    )
    assert waves["first"] == [10, 0, 1, 12, 13, 14]
    assert waves["final"] == [10, 12, 13, 16, 18, 19]


def test_what_fails_on_the_devices_leaves_nobody_without_hope(climbed):
    slower = {10: 0.5}  # much the fastest by rung 2, for it computes something else
    times = [1.0 + i / 100 for i in range(10)] + [0.99 + i / 1000 for i in range(30)]
    waves = climbed(times, 10, slower, broken={10})
    assert waves["first"] == [10, 0, 1]
    assert waves["final"][:2] == [0, 1] and 10 not in waves["final"]
    assert {11, 12, 13, 14} <= set(waves["final"]), "of the first wave's compilations"


def test_places_that_the_second_wave_leaves_go_to_the_first(climbed):
    times = [1.0 + i / 100 for i in range(10)] + [1.2 + i / 1000 for i in range(30)]
    slower = dict.fromkeys(range(12, 40), 2.0)
    waves = climbed(times, 10, slower, profiles=4)
    assert waves["first"] == [0, 1, 2]
    assert waves["final"] == [0, 1, 2, 3]


def test_near_baselines_are_measured_and_leave_a_quarter(climbed):
    waves = climbed([1.0 + i / 100 for i in range(14)] + [0.99 + i / 1000 for i in range(30)], 14)
    assert waves["first"] == [14, 0, 1, 15, 16, 17, 18, 2, 3, 4, 5, 6]
    assert waves["final"] == [14, 15, 16, 19, 20, 21, 22]


@pytest.mark.parametrize(("profiles", "first"), [(1, [2]), (2, [2, 0]), (3, [2, 0, 1])])
def test_of_few_measurements_the_first_is_of_the_fastest_and_all_are_of_the_first_wave(
    climbed, ledger, profiles, first
):
    waves = climbed([2.0, 2.1] + [1 + i / 1000 for i in range(30)], 2, profiles=profiles)
    assert waves["first"] == first
    assert waves["final"] == first[:3]
    assert sum(r.compiled is not None for r in ledger.trials) <= 2 + profiles
