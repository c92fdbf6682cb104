"""Paired timing on a clock that the steps themselves advance."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pairs import (
    Comparison,
    compare,
    in_processes,
    is_open,
    of_process,
    of_processes,
    parts_of,
    ratio_interval,
    stepper,
)


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


def process(ratio: float, spread: float = 0.01, count: int = 20) -> Comparison:
    """A process of pairs of about this ratio."""
    first = [ratio * (1 + spread * (-1) ** i) for i in range(count)]
    return of_process(first, [1.0] * count)


def test_the_interval_of_several_processes_is_students() -> None:
    parts = [process(r) for r in (0.97, 1.01, 1.0, 1.02)]
    found = of_processes(parts)
    logs = np.log([0.97, 1.01, 1.0, 1.02])
    half = 3.182 * logs.std(ddof=1) / 2  # t of 3 degrees of freedom, 97.5 %
    assert np.log(found.ratio) == pytest.approx(logs.mean(), abs=1e-3)
    assert np.log(found.high) - np.log(found.low) == pytest.approx(2 * half, rel=0.05)
    assert not found.decided
    assert found.processes == (20,) * 4
    ratios = [p.ratio for p in parts_of(dataclasses.asdict(found))]
    assert ratios == [p.ratio for p in parts]
    assert of_processes(parts[:1]) == parts[0]


def test_processes_that_agree_by_luck_are_no_surer_than_their_pairs() -> None:
    parts = [process(1.0, spread=0.1)] * 4
    found = of_processes(parts)
    widths = np.log(found.high / found.low), np.log(parts[0].high / parts[0].low)
    assert widths[0] == pytest.approx(widths[1] / 2)


@pytest.mark.parametrize(
    ("ratios", "spread", "asked"),
    [
        ((0.9,), 0.01, 1),  # far from 1
        ((1.2,), 0.01, 1),
        ((0.5,) * 8, 0.1, 7),  # far, but the pairs of fewer leave the interval too wide
        ((1.0,) * 8, 0.01, 4),
        ((0.98, 1.02) * 4, 0.01, 7),  # until the interval is narrow
        ((0.95, 1.05) * 12, 0.01, 24),  # or nobody asks any more
    ],
)
def test_processes_are_asked_where_they_could_decide(
    ratios: tuple[float, ...], spread: float, asked: int
) -> None:
    limits: list[float] = []

    def ask(number: int, limit_s: float) -> Comparison:
        assert number == len(limits)
        limits.append(limit_s)
        return process(ratios[number], spread)

    found = in_processes(ask, 8.0)
    assert len(found.processes) == asked
    assert limits == [8.0] + [2.0] * (asked - 1)


def test_a_comparison_goes_on_from_what_processes_said_before() -> None:
    asked: list[int] = []

    def ask(number: int, limit_s: float) -> Comparison:
        assert limit_s == 2.0, "only the first process has all the time"
        asked.append(number)
        return process(1.0)

    begun = of_processes([process(1.01), process(0.99)])
    found = in_processes(ask, 8.0, parts_of(dataclasses.asdict(begun)))
    assert asked == [2, 3] and found.first_s[:40] == begun.first_s


def test_what_fewer_processes_said_than_are_asked_today_is_open() -> None:
    one = dataclasses.asdict(process(1.0))
    assert is_open(one) and not is_open(dataclasses.asdict(process(0.5)))
    assert not is_open(dataclasses.asdict(of_processes([process(1.0)] * 4)))
    assert is_open({"rival": "b", "failed": "it died"})
    del one["processes"]  # as before they were counted
    assert is_open(one)
    assert [len(part.first_s) for part in parts_of(one)] == [20]


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
