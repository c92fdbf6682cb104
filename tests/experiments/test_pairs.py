"""Paired timing on a clock that the steps themselves advance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pairs import compare, ratio_interval, stepper


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


def test_nothing_is_compiled_once_the_clock_runs() -> None:
    traced = []

    @jax.jit
    def step(state: Any, batch: jax.Array) -> Any:
        traced.append(None)
        _, newer = state
        return (newer, newer * 0.5 + batch), {}

    weak = jax.jit(lambda: 1.0)()
    run = stepper(step, (weak, weak), jnp.float32(2.0))
    assert len(traced) == 3  # both weak, one of them, none
    run()
    run()
    assert len(traced) == 3


def test_a_state_that_never_stays_is_refused() -> None:
    with pytest.raises(ValueError, match="still change after 10 steps"):
        stepper(lambda state, batch: (jnp.append(state, batch), {}), jnp.ones(2), 1.0)
