"""Paired timing on a clock that the steps themselves advance."""

import numpy as np
import pytest

from experiments.pairs import compare, ratio_interval


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self, noise: float):
        self.now_s = 0.0
        self.noise = noise
        self.rng = np.random.default_rng(0)

    def step(self, seconds: float):
        def run() -> None:
            self.now_s += seconds * np.exp(self.noise * self.rng.standard_normal())

        return run


def test_a_steady_machine_decides_early():
    clock = Clock(noise=0.01)
    found = compare(clock.step(0.1), clock.step(0.2), limit_s=100.0, clock=lambda: clock.now_s)
    assert found.decided
    assert len(found.first_s) == len(found.second_s) == 20
    assert found.low < 0.5 < found.high
    assert (found.high - found.low) / 2 <= 0.02 * found.ratio


def test_a_noisy_machine_needs_more_pairs():
    clock = Clock(noise=0.1)
    found = compare(clock.step(0.1), clock.step(0.1), limit_s=1e6, clock=lambda: clock.now_s)
    assert found.decided
    assert len(found.first_s) > 50


@pytest.mark.parametrize(("seconds", "many"), [(0.1005, True), (0.098, False), (0.13, False)])
def test_beside_an_edge_the_ratio_is_known_better(seconds, many):
    clock = Clock(noise=0.03)
    found = compare(
        clock.step(seconds), clock.step(0.1), limit_s=1e6, edge=1.005, clock=lambda: clock.now_s
    )
    clear = not found.low <= 1.005 <= found.high
    assert found.decided and (clear or (found.high - found.low) / 2 <= 0.005 * found.ratio)
    assert (len(found.first_s) > 100) == many
    again = compare(clock.step(1), clock.step(1), limit_s=10, edge=1.005, clock=lambda: clock.now_s)
    assert again.decided and (again.high - again.low) / 2 > 0.005, "time is up, and 2 % reached"


def test_out_of_time_is_undecided():
    clock = Clock(noise=1.0)
    found = compare(clock.step(0.1), clock.step(0.1), limit_s=10.0, clock=lambda: clock.now_s)
    assert not found.decided
    assert sum(found.first_s) + sum(found.second_s) >= 9.0


def test_the_interval_covers_the_truth_19_times_in_20():
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        drift = np.exp(0.5 * rng.standard_normal(60))  # hits both steps of a pair
        first, second = drift * np.exp(0.05 * rng.standard_normal((2, 60)))
        _, low, high = ratio_interval(list(first), list(second), resamples=500)
        covered += low <= 1.0 <= high
    assert 180 <= covered <= 199
