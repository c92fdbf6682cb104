"""Promotion: the best by corrected time, diverse, and memory only judged where it is sure."""

import dataclasses
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate, Rung, Trial
from autoshard.target.cost import Correction
from autoshard.tuner.promotion import (
    DEFAULT_LOWER_BOUND,
    corrected_s,
    lower_bound_factor,
    promote,
    surely_too_large,
    worth_trying,
)

LIMIT = 1000


def estimate(time_s: float, peak: int = 100, state: int = 10) -> Estimate:
    return Estimate(
        rung=Rung.PROPAGATE,
        time_s=time_s,
        compute_s=time_s / 2,
        communication_s=time_s / 2,
        peak_memory_bytes=peak,
        state_bytes=state,
        flops=0.0,
        bytes_accessed=0.0,
        op_count=1,
    )


def trial(predicted: Estimate, family: str, shardings: object) -> Trial:
    layout = Layout(mesh=(("x", 8),), activation_rules=((family, ("x",)),))
    return Trial(candidate=Candidate(layout=layout), propagated=predicted, shardings=shardings)


def trials(*times: float, family: str = "", peak: int = 100) -> dict[int, Trial]:
    return {
        i: trial(estimate(t, peak), family or f"family {i}", (family, i))
        for i, t in enumerate(times)
    }


def pick(
    given: dict[int, Trial], count: int, factor: float = 0.5, taken: Sequence[int] = ()
) -> list[int]:
    return promote(given, count, Correction(), LIMIT, factor, taken)


@given(st.lists(st.floats(0.01, 10), max_size=20), st.integers(1, 8))
def test_the_best_of_different_families_go_on(times: list[float], count: int) -> None:
    chosen = pick(trials(*times), count)
    assert chosen == sorted(range(len(times)), key=lambda i: (times[i], i))[:count]


def test_no_family_takes_everything() -> None:
    crowd = trials(*(1.0 + 0.1 * i for i in range(6)), family="fsdp")
    other = {9: trial(estimate(5.0), "tp", "tp")}
    assert pick({**crowd, **other}, 3) == [0, 9, 1]
    assert pick({**crowd, **other}, 4) == [0, 9, 1, 2]
    assert pick(crowd, 3) == [0, 1, 2]  # nothing else there: fill up


def test_one_program_goes_on_once() -> None:
    given = trials(1.0, 2.0)
    again = dataclasses.replace(given[1], shardings=given[0].shardings)
    assert pick({**given, 2: again}, 3) == [0, 1]
    assert pick(given, 3, taken=[0]) == [1]


def test_one_half_differs_by_rung_1_and_the_other_is_the_best() -> None:
    twins = {i: trial(estimate(1.0 + 1e-4 * i), "a", i) for i in range(9)}
    others = {i: trial(estimate(0.1 * i), f"family {i}", i) for i in range(30, 39)}
    assert pick({**twins, **others}, 8) == [0, 30, 31, 32, 1, 2, 3, 4]
    assert pick({**twins, **others}, 8, taken=[0, 1, 2]) == [30, 31, 32, 33, 3, 4, 5, 6]
    assert pick(twins, 3) == [0, 1, 2], "nothing else there: fill up"


def test_what_is_hopeless_is_not_tried_further() -> None:
    assert worth_trying({0: 1.6, 1: 1.2, 2: 1.0, 3: 1.4, 4: 1.0}) == [2, 4, 1, 3]
    assert worth_trying({}) == []


def test_the_correction_decides_the_order() -> None:
    talks = dataclasses.replace(estimate(1.0), compute_s=0.1, communication_s=0.9)
    works = dataclasses.replace(estimate(1.2), compute_s=1.1, communication_s=0.1)
    given = {0: trial(talks, "a", 0), 1: trial(works, "b", 1)}
    costly = Correction(compute=1.0, communication=2.0)
    assert corrected_s(talks, costly) > corrected_s(works, costly)
    assert promote(given, 1, costly, LIMIT, 0.5, []) == [1]
    assert pick(given, 1) == [0]


def test_only_the_sure_is_rejected() -> None:
    assert surely_too_large(estimate(1.0, peak=100, state=LIMIT + 1), LIMIT, 0.5)
    assert surely_too_large(estimate(1.0, peak=3 * LIMIT), LIMIT, 0.5)
    assert not surely_too_large(estimate(1.0, peak=2 * LIMIT), LIMIT, 0.5)
    doubtful = trial(estimate(1.0, peak=int(1.5 * LIMIT)), "a", 0)
    fitting = trial(estimate(2.0), "b", 1)
    assert pick({0: doubtful, 1: fitting}, 2) == [1, 0]  # doubtful ones last, but not lost


def test_the_lower_bound_is_learned_from_rung_two() -> None:
    def pair(said: int, true: int) -> tuple[Estimate, Estimate]:
        return estimate(1.0, peak=said), estimate(1.0, peak=true)

    assert lower_bound_factor([]) == DEFAULT_LOWER_BOUND
    assert lower_bound_factor([pair(100, 90)]) == DEFAULT_LOWER_BOUND
    assert lower_bound_factor([pair(100, 30)]) == 0.3
    many = [pair(100, 80 + i) for i in range(20)]
    assert lower_bound_factor(many) == 0.81
    assert lower_bound_factor([pair(100, 300)] * 20) == 1.0
