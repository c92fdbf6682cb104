"""What is said of two measurements is what a race ranks them by."""

import pytest

from autoshard.records.trial import LONGEST_MESSAGE, Failure, Kind, Measurement, Stage, paired_ratio
from autoshard.rungs.profile.race import RaceSettings, race

FIRST = [1.0, 1.0, 1.0]
SECOND = [0.9, 0.9, 2.0]  # faster in most rounds, slower in the mean


def test_a_long_message_of_a_failure_keeps_its_head_and_its_tail() -> None:
    """XLA may print a whole program: a journal would grow by megabytes a candidate."""
    text = "INTERNAL: what failed" + "x" * 10**6 + "where it failed"
    message = Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message=text).message
    assert len(message) <= LONGEST_MESSAGE
    assert message.startswith("INTERNAL: what failed") and message.endswith("where it failed")
    left_out = len(text) - LONGEST_MESSAGE * 5 // 8 - LONGEST_MESSAGE // 4
    assert f"\n[... {left_out} characters left out ...]\n" in message
    again = Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message=message)
    assert again.message == message, "as a journal reads it"
    longest = "y" * LONGEST_MESSAGE
    assert Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message=longest).message == longest


def test_the_ratio_to_the_winner_is_what_the_race_ranks_by():
    # A step runs unrecorded when a program is loaded.
    times = {"first": iter([1.0, *FIRST]), "second": iter([1.0, *SECOND])}
    result = race(
        list(times),
        lambda name, steps: [next(times[name])] * steps,
        seed=0,
        settings=RaceSettings(max_rounds=3),
    )
    winner, other = (
        Measurement(samples_s=one.samples_s, rounds=one.rounds)
        for name in result.ranking
        for one in result.contestants
        if one.name == name
    )
    assert result.ranking == ("first", "second")
    ratio = paired_ratio(winner, other)
    assert ratio == pytest.approx((0.9 * 0.9 * 2.0) ** (1 / 3)) and ratio > 1


def test_the_ratio_is_of_common_rounds_and_one_bad_round_in_five_does_not_count():
    one = Measurement(samples_s=(1.0, 1.0, 1.0, 1.0, 1.0, 9.0), rounds=(0, 1, 2, 3, 4, 5))
    two = Measurement(samples_s=(2.0, 2.0, 2.0, 2.0, 80.0), rounds=(4, 3, 2, 1, 0))
    assert paired_ratio(one, two) == pytest.approx(2.0)
    assert paired_ratio(one, Measurement(samples_s=(1.0,), rounds=(7,))) is None
