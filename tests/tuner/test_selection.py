"""Which rows go on: baselines that may fit, then the best; what is too large is not compiled."""

import dataclasses

import pytest

from autoshard.records.layout import Candidate, Layout, rules
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Rung, Stage, Trial
from autoshard.target.cost import Correction
from autoshard.tuner import selection
from autoshard.tuner.budget import Budget


def estimate(time_s=1.0, peak=100, state=10, rung=Rung.PROPAGATE):
    return Estimate(
        rung=rung,
        time_s=time_s,
        compute_s=time_s / 2,
        communication_s=time_s / 2,
        peak_memory_bytes=peak,
        state_bytes=state,
        flops=1,
        bytes_accessed=1,
        op_count=1,
    )


def row(number, baseline="", **changes):
    layout = Layout(mesh=(("x", 8),), activation_rules=rules({f"axis {number}": "x"}))
    fields = {
        "problem": 0,
        "candidate": Candidate(layout=layout),
        "baseline": baseline,
        "shardings": number,
        "propagated": estimate(),
    }
    return Trial(**{**fields, **changes})


def test_of_each_baseline_the_fastest_that_may_fit_goes_on(ledger):
    ledger.trials = [
        row(0, "FSDP", propagated=estimate(3.0)),
        row(1, "FSDP", propagated=estimate(2.0)),
        row(2, "data parallel", propagated=estimate(1.0)),
        row(3, "FSDP", propagated=estimate(0.1, state=2000)),
        row(4, "replicated", propagated=estimate(0.1, peak=9000)),
        row(5, "", propagated=estimate(0.1)),
        row(6, "tensor parallel", propagated=Failure(
            stage=Stage.PROPAGATE, kind=Kind.UNSUPPORTED, message="no")),
    ]  # fmt: skip
    assert selection.baseline_trials(ledger) == [2, 1]
    for i, missing in ((3, 1000), (4, 8000)):
        failure = ledger.trials[i].compiled
        assert failure.kind is Kind.OOM and failure.missing_bytes == missing
        assert "the limit is" in failure.message


def test_a_baseline_that_fits_goes_before_a_faster_one_that_does_not(ledger):
    ledger.trials = [
        row(0, "FSDP", propagated=estimate(1.0, peak=1100)),
        row(1, "FSDP", propagated=estimate(3.0, peak=900)),
        row(2, "data parallel", propagated=estimate(0.5, peak=1150)),  # rung 1 may be wrong
        row(3, "tensor parallel", propagated=estimate(0.1, peak=1500)),
        row(4, "tensor parallel", propagated=estimate(9.0, peak=1400)),
    ]
    assert selection.baseline_trials(ledger) == [1, 2]
    assert all(r.compiled is None for r in ledger.trials), "and what is left out has not failed"


def test_hopeless_baselines_stay_behind_but_for_two_and_what_the_author_wrote(ledger):
    ledger.trials = [
        row(0, "FSDP", propagated=estimate(1.0)),
        row(1, "data parallel", propagated=estimate(1.4)),
        row(2, "tensor parallel", propagated=estimate(1.6)),
        row(3, "data x TP", propagated=estimate(0.1, peak=1100)),  # does not fit
        row(4, "replicated", propagated=estimate(7.0)),
        row(5, "FSDP x TP", propagated=estimate(1.45)),
    ]
    assert selection.hopeful_baselines(ledger) == [0, 1, 5, 3]
    assert selection.baseline_trials(ledger) == [0, 1, 5, 2, 4, 3]
    own = ledger.trials[4].candidate
    written = dataclasses.replace(own, layout=dataclasses.replace(own.layout, as_annotated=True))
    ledger.trials[4].candidate = written
    assert selection.hopeful_baselines(ledger) == [4, 0, 1, 5, 3]
    ledger.trials = ledger.trials[2:4]
    assert selection.hopeful_baselines(ledger) == [0, 1]
    ledger.trials = [row(0, "A", propagated=estimate(9.0)), row(1, "B", propagated=estimate(1.0))]
    assert selection.hopeful_baselines(ledger) == [1, 0]


def test_what_has_gone_on_does_not_go_on_again(ledger):
    ledger.trials = [row(i, propagated=estimate(1.0 + i)) for i in range(5)]
    ledger.trials[1].compiled = estimate(rung=Rung.COMPILE)
    chosen = selection.promoted(ledger, 2, [0])
    assert chosen == [2, 3]


def test_a_baseline_that_rung_1_rejected_goes_on_when_it_is_taught_better(ledger):
    """Untaught it takes peaks of twice the limit for hopeless; here what it says is thrice."""
    ledger.trials = [
        row(0, "replicated", propagated=estimate(peak=2100)),
        row(1, propagated=estimate(2.0, peak=900)),
    ]
    assert selection.baseline_trials(ledger) == [] and ledger.trials[0].compiled is not None
    assert selection.promoted(ledger, 2, []) == [1]
    ledger.trials[1].compiled = estimate(peak=900, rung=Rung.COMPILE)
    assert selection.promoted(ledger, 2, []) == [], "it was right"
    ledger.trials[1].compiled = estimate(peak=300, rung=Rung.COMPILE)
    assert selection.promoted(ledger, 2, []) == [0]


def test_two_baselines_and_what_the_author_wrote_are_measured_however_slow(ledger):
    def compiled(number, time_s, baseline="", peak=100):
        said = estimate(time_s, peak=peak, rung=Rung.COMPILE)
        return row(number, baseline, compiled=said)

    ledger.trials = [
        compiled(0, 1.0),
        compiled(1, 9.0, "replicated"),
        compiled(2, 3.0, "FSDP"),
        compiled(3, 2.0, "data parallel"),
        compiled(4, 1.1),
        compiled(5, 2.0),
        compiled(6, 0.1, "tensor parallel", peak=2000),  # does not fit
        row(7),
    ]
    assert selection.worth_measuring(ledger, range(8)) == [0, 3, 2, 4]
    assert selection.worth_measuring(ledger, [5, 3, 4]) == [3, 4], "beside all that is compiled"
    own = ledger.trials[1].candidate
    written = dataclasses.replace(own, layout=dataclasses.replace(own.layout, as_annotated=True))
    ledger.trials[1].candidate = written
    assert selection.worth_measuring(ledger, range(8)) == [0, 3, 2, 1, 4]
    assert selection.worth_measuring(ledger, [7]) == []
    ledger.trials = [row(0)]
    assert selection.worth_measuring(ledger, [0]) == [], "nothing is compiled"


def test_a_program_is_measured_once_however_many_layouts_come_to_it(ledger):
    said = estimate(1.0, rung=Rung.COMPILE)
    ledger.trials = [
        row(0, compiled=said, digest="a"),
        row(1, compiled=said, digest="a"),
        row(2, "FSDP", compiled=said, digest="b"),
        row(3, compiled=said, digest="b"),
    ]
    assert selection.worth_measuring(ledger, range(4)) == [0, 2]
    ledger.trials[1].profiled = Measurement(samples_s=(1.0,), rounds=(0,))
    assert selection.worth_measuring(ledger, [0, 2, 3]) == [2], "the other of the first is measured"


def test_measurements_correct_the_order(ledger):
    ledger.trials = [row(i, propagated=estimate(1.0)) for i in range(3)]
    selection.learn(ledger)
    assert ledger.correction == Correction()
    for r in ledger.trials:
        r.profiled = Measurement(samples_s=(3.0,), rounds=(0,))
    selection.learn(ledger)
    assert ledger.correction.compute > 1 and ledger.correction.communication > 1


def test_false_rejections_are_those_that_fit_after_all(ledger):
    ledger.trials = [
        row(0, propagated=estimate(peak=2500), compiled=estimate(peak=900, rung=Rung.COMPILE)),
        row(1, propagated=estimate(peak=2500), compiled=estimate(peak=1900, rung=Rung.COMPILE)),
        row(2, propagated=estimate(peak=500), compiled=estimate(peak=400, rung=Rung.COMPILE)),
    ]
    assert selection.false_rejections(ledger) == 1
    assert selection.lower_bound(ledger) == pytest.approx(900 / 2500)


def test_the_smallest_is_tried_last_and_once(ledger):
    assert selection.smallest(ledger) is None
    ledger.trials = [row(0, propagated=estimate(peak=3000)), row(1, propagated=estimate(peak=2000))]
    assert selection.smallest(ledger) == 1
    ledger.trials[1].compiled = Failure(stage=Stage.PROPAGATE, kind=Kind.OOM, message="by rung 1")
    assert selection.smallest(ledger) == 1, "rung 1 may be wrong"
    ledger.trials[1].compiled = Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message="by rung 2")
    assert selection.smallest(ledger) is None


def test_data_parallel_and_one_fsdp_always_go_on_where_four_are_measured(ledger):
    slow = [
        row(0, "FSDP x TP", propagated=estimate(1.0)),
        row(1, "ZeRO-1", propagated=estimate(1.1)),
        row(2, "tensor parallel", propagated=estimate(1.2)),
        row(3, "FSDP, small whole", propagated=estimate(5.0)),
        row(4, "data parallel", propagated=estimate(6.0)),
        row(5, "FSDP", propagated=estimate(7.0)),
        row(6, "replicated", propagated=estimate(8.0)),
    ]
    ledger.trials = slow
    assert selection.hopeful_baselines(ledger) == [0, 4, 3, 1, 2]
    for one in ledger.trials:
        one.compiled = dataclasses.replace(one.propagated, rung=Rung.COMPILE)
    assert selection.worth_measuring(ledger, range(7)) == [0, 4, 3, 1, 2]
    ledger.budget = Budget(profiles=3)
    assert selection.hopeful_baselines(ledger) == [0, 1, 2]
    assert selection.worth_measuring(ledger, range(7)) == [0, 1, 2]
    ledger.budget = Budget()
    slow[4].compiled = estimate(6.0, peak=2000, rung=Rung.COMPILE)
    assert selection.worth_measuring(ledger, range(7)) == [0, 3, 1, 2], "it does not fit"
