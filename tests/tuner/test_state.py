"""What a search keeps: which rung its seconds went to."""

import dataclasses
import time
import types

import pytest

from autoshard.compat.shardy import stablehlo
from autoshard.errors import LoweringError
from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Rung, Stage, Trial
from autoshard.space.baselines import baselines
from autoshard.target.cost import CostModel
from autoshard.tuner import state as state_file
from tests import analysed
from tests.analysed import CONSTANTS


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
    assert not ledger.late(0.25)
    clock.now_s = 69.0
    assert not ledger.late(0.25)
    clock.now_s = 71.0
    assert ledger.late(0.25) and not ledger.late(1.0)
    clock.now_s = 101.0
    assert ledger.late(1.0)
    ledger.elapsed_s, clock.now_s = {"trace": 120.0}, 121.0
    assert ledger.late(0.25), "nothing is left"


def test_only_a_search_whose_whole_time_is_up_is_out_of_time(ledger, clock):
    ledger.budget = dataclasses.replace(ledger.budget, seconds=100.0)
    ledger.start_s, clock.now_s = 0.0, 30.0
    assert ledger.late(0.25) and ledger.how_it_ended() == "finished", "a question changes nothing"
    assert not ledger.stops("compiling", 0.45) and ledger.how_it_ended() == "finished"
    assert ledger.stops("judging layouts", 0.25)
    assert ledger.how_it_ended() == "cut short: judging layouts"
    clock.now_s = 80.0
    assert ledger.stops("measuring", 0.7) and ledger.stops("measuring", 0.7)
    assert ledger.how_it_ended() == "cut short: judging layouts, measuring"
    clock.now_s = 101.0
    assert ledger.how_it_ended() == "out of time"
    ledger.interrupted = True
    assert ledger.how_it_ended() == "interrupted"


@pytest.mark.parametrize(
    "changed",
    ["rung", "program", "candidate", "constants", "leaves", "versions", "code", "more"],
)
def test_a_key_is_another_where_what_an_answer_depends_on_is(ledger, monkeypatch, changed):
    def subject(program: str = "a", leaves: tuple = ()):
        return types.SimpleNamespace(
            analysis_for=lambda layout: types.SimpleNamespace(digest=program),
            space=types.SimpleNamespace(fixed_leaves=leaves),
        )

    candidate = Candidate(layout=Layout(mesh=(("x", 8),)), knobs=())
    ledger.cost = CostModel(CONSTANTS)
    before = ledger.key("compile", subject(), candidate, seed=0)
    assert before == ledger.key("compile", subject(), candidate, seed=0)
    asked = {"rung": "compile", "problem": subject(), "candidate": candidate, "seed": 0}
    match changed:
        case "rung":
            asked["rung"] = "propagate"
        case "program":
            asked["problem"] = subject(program="b")
        case "candidate":
            asked["candidate"] = Candidate(layout=Layout(mesh=(("x", 4),)), knobs=())
        case "constants":
            ledger.cost = CostModel(dataclasses.replace(CONSTANTS, launch_s=1.0))
        case "leaves":
            asked["problem"] = subject(leaves=(("['w']", (("x",),)),))
        case "versions":
            monkeypatch.setattr(state_file, "versions", lambda: {"jax": "0.0"})
        case "code":
            monkeypatch.setattr(state_file, "code_digest", lambda rung: "other")
        case "more":
            asked["seed"] = 1
    assert ledger.key(**asked) != before


def test_what_jax_cannot_lower_is_a_failure_and_a_bug_is_none(ledger, monkeypatch):
    of = analysed.subject("scanned_mlp")
    ledger.problems, candidate = [of], baselines(of.space)[0].candidate
    row = Trial(problem=0, candidate=candidate, baseline="", shardings=0, propagated=None)

    def cannot(traced, platform):
        try:
            raise NotImplementedError("no rule for this platform")
        except NotImplementedError as error:
            raise LoweringError("cannot") from error

    with monkeypatch.context() as patched:
        patched.setattr(stablehlo, "lower", cannot)
        failure = ledger.module_of(row)
    assert isinstance(failure, Failure) and failure.kind is Kind.UNSUPPORTED
    assert failure.message == "NotImplementedError: no rule for this platform"

    def bug(analysis, specs):
        raise TypeError("a bug")

    monkeypatch.setattr(state_file, "minimal_constraints", bug)
    with pytest.raises(TypeError, match="a bug"):
        ledger.module_of(row)


def test_of_rows_that_came_to_one_program_one_stands_for_it(ledger):
    candidate = Candidate(layout=Layout(mesh=()))
    measured = Measurement(samples_s=(1.0,), rounds=(0,))
    failed = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="it died")
    for digest, baseline, profiled, subject in (
        ("a", "", None, 0),
        ("a", "FSDP", None, 0),  # stands: it has a name
        ("b", "", measured, 0),
        ("b", "FSDP", None, 0),  # stands
        ("b", "ZeRO-1", None, 0),  # and so does this: people look for both
        ("", "", None, 0),  # nobody knows of what comes to no program yet
        ("", "", None, 0),
        ("a", "", None, 1),  # of other knobs
        ("c", "", None, 0),
        ("c", "", failed, 0),  # stands: it is measured
    ):
        ledger.trials.append(
            Trial(
                problem=subject,
                candidate=candidate,
                baseline=baseline,
                shardings=len(ledger.trials),
                propagated=failed,
                profiled=profiled,
                digest=digest,
            )
        )
    assert ledger.representatives(range(10)) == [1, 3, 4, 5, 6, 7, 9]
    assert ledger.representatives([2, 1, 0]) == [2, 1]


def test_the_best_that_is_told_of_fits(ledger):
    told = []
    ledger.callbacks, ledger.limit_bytes = (told.append,), 100
    candidate = Candidate(layout=Layout(mesh=()))
    for time_s, peak in ((1.0, 200), (3.0, 90), (2.0, 100)):
        judged = Estimate(
            rung=Rung.PROPAGATE,
            time_s=time_s,
            compute_s=time_s,
            communication_s=0.0,
            peak_memory_bytes=peak,
            state_bytes=0,
            flops=0.0,
            bytes_accessed=0.0,
            op_count=0,
            collectives=(),
        )
        ledger.trials.append(
            Trial(problem=0, candidate=candidate, baseline="", shardings=0, propagated=judged)
        )
        ledger.tell(Stage.PROPAGATE, 1, 3, "")
    assert [event.best_s for event in told] == [None, 3.0, 2.0]
