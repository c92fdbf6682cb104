"""The words and tables of plans: what a person must be able to read off."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.records.layout import Candidate, Constraints, Gather, Layout, rules
from autoshard.records.trial import (
    Collective,
    DeviceProfile,
    Estimate,
    Failure,
    Kind,
    Measurement,
    Rung,
    Stage,
    Trial,
)
from autoshard.records.words import mebibytes, mesh_in_words, seconds, traffic_in_words
from autoshard.report import describe, explain, rules_in_words
from autoshard.report.explain import numerics
from autoshard.tuner.budget import Budget
from autoshard.tuner.journal import Journal
from autoshard.tuner.measuring import Measuring
from autoshard.tuner.state import SearchState


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (2.5, "2.50 s"), (1.0, "1.00 s"), (0.0125, "12.5 ms"), (42e-6, "42 us")],
)
def test_durations(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (3 << 19, "1.5 MiB"),
     (5 << 29, "2.50 GiB")],
)  # fmt: skip
def test_sizes(value, text):
    assert mebibytes(value) == text


MESH = (("x", 4), ("y", 2))


@pytest.mark.parametrize(
    ("compute", "storage", "text"),
    [
        ({}, {}, "everything replicated"),
        ({"batch": "x"}, {}, "batch over x"),
        ({"batch": "x"}, {"embed": "x"}, "batch over x; store embed over x"),
        ({"mlp": ("x", "y")}, {"mlp": ("x", "y")}, "mlp over x+y"),
        ({"mlp": "x"}, {}, "mlp over x; store mlp whole"),
        ({"mlp": "x"}, {"mlp": "y"}, "mlp over x; store mlp over y"),
    ],
)
def test_rules(compute, storage, text):
    layout = Layout(mesh=MESH, activation_rules=rules(compute), state_rules=rules(storage))
    assert rules_in_words(layout) == text
    assert mesh_in_words(layout) == "x=4 y=2"


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        (Gather.PER_USE, "batch over x; store embed over x"),
        (Gather.SMALL_REPLICATED, "batch over x; store embed over x; small arrays as computed"),
        (Gather.PER_STEP, "batch over x; store embed over x; parameters gathered once"),
        (Gather.PARAMS_REPLICATED, "batch over x; store embed over x; parameters as computed"),
    ],
)
def test_what_stays_whole_is_told(whole, text):
    compute, storage = rules({"batch": "x"}), rules({"embed": "x"})
    layout = Layout(mesh=MESH, activation_rules=compute, state_rules=storage, gather=whole)
    assert rules_in_words(layout) == text


def test_other_words():
    assert mesh_in_words(Layout(mesh=())) == "1 device"
    assert rules_in_words(Layout(mesh=MESH, as_annotated=True)) == "the step's own constraints"
    least = Layout(mesh=MESH, constraints=Constraints.MINIMAL)
    assert rules_in_words(least).endswith("constraints: minimal")
    small = Layout(mesh=MESH, activation_rules=rules({"mlp": "x"}), small_replicated=True)
    assert rules_in_words(small).endswith("; small arrays replicated")
    into_loops = Layout(mesh=MESH, activation_rules=rules({"mlp": "x"}), gather_loop_inputs=True)
    assert rules_in_words(into_loops).endswith("; activations whole into loops")
    assert rules_in_words(Layout(mesh=MESH, conflict_losers=("scores",))) == "scores gives way"
    assert traffic_in_words({}) == traffic_in_words({"all_gather": 0}) == "nothing"
    assert traffic_in_words({"all_reduce": 2048, "all_gather": 3 << 20}) == (
        "all-gather 3.0 MiB, all-reduce 2 KiB"
    )


def test_rules_are_short():
    table = rules({"a": "y", "b": "y", "batch": "x", "c": "y", "d": "y", "e": "y", "f": "y"})
    layout = Layout(
        mesh=MESH, activation_rules=table, state_rules=table, conflict_losers=("a", "b")
    )
    assert rules_in_words(layout, {"a": "heads"}) == (
        "batch over x; heads, b, c, d and 2 more over y; heads, b give way"
    )


def estimate(rung=Rung.COMPILE, sent=1 << 20, **changes):
    fields = {
        "rung": rung,
        "time_s": 0.01,
        "compute_s": 0.005,
        "communication_s": 0.005,
        "peak_memory_bytes": 1 << 20,
        "state_bytes": 1 << 19,
        "flops": 1e9,
        "bytes_accessed": 1e6,
        "op_count": 10,
        "collectives": (
            Collective(kind="all_reduce", group_size=8, mesh_axes=("x",), bytes=sent, count=1),
        ),
    }
    return Estimate(**{**fields, **changes})


def measurement(seconds_, **changes):
    fields = {"samples_s": (seconds_,) * 3, "rounds": (0, 1, 2)}
    return Measurement(**{**fields, **changes})


def trial(name, mesh=MESH, activation_rules=None, **changes):
    layout = Layout(mesh=mesh, activation_rules=rules(activation_rules or {name or "found": "x"}))
    fields = {
        "candidate": Candidate(layout=layout),
        "propagated": estimate(Rung.PROPAGATE),
        "baseline": name,
    }
    return Trial(**{**fields, **changes})


def planned(searched, trials, ranking=(0,), **evidence):
    """The fixture's plan with other evidence."""
    summary = searched.plan.summary
    return dataclasses.replace(
        summary,
        layout=trials[0].candidate.layout,
        evidence=dataclasses.replace(
            summary.evidence,
            trials=tuple(trials),
            ranking=tuple(ranking),
            **{"notes": (), **evidence},
        ),
    )


def test_the_table_has_a_row_for_each_finalist_and_each_baseline(searched):
    text = str(searched.plan)
    lines = text.splitlines()
    assert lines[0] == "Plan for 8 fake cpu devices (finished)"
    head = next(i for i, line in enumerate(lines) if re.match("# +layout ", line))
    rows = lines[head + 1 : lines.index("", head + 1)]
    evidence = searched.plan.evidence
    names = [evidence.trials[i].baseline or "found" for i in evidence.ranking]
    assert [re.split("  +", row)[1] for row in rows[: len(names)]] == names
    assert [row.split()[0] for row in rows] == [str(n) for n in range(1, len(rows) + 1)]
    shown = {re.split("  +", row)[1] for row in rows}
    assert {t.baseline for t in evidence.trials if t.baseline} <= shown
    assert "1.00" in rows[0] and not re.search("[mu]s|[KMG]iB", "".join(rows)), "units are above"
    assert re.search("measured [mu]s .*predicted [mu]s +memory [KM]iB +sent [KM]iB", lines[head])
    for wanted in ("Rules:", "The winner", "Numerics: agrees", "Search: ", "Where a device's step"):
        assert wanted in text
    assert f"{len(evidence.trials)} candidates" in text


def test_failures_are_shown_also_of_a_baseline_that_has_siblings(searched):
    crash = Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message="\nsegfault\nat 0x0")
    oom = Failure(stage=Stage.PROPAGATE, kind=Kind.OOM, message="needs 2 MiB")
    trials = [
        trial("FSDP", compiled=estimate()),
        trial("tensor parallel", activation_rules={"a": "x"}),
        trial("tensor parallel", activation_rules={"b": "x"}, compiled=crash),
        trial("tensor parallel", activation_rules={"c": "x"}, compiled=oom),
        trial("", activation_rules={"d": "x"}, compiled=crash),
        trial("replicated", activation_rules={}, propagated=oom),
    ]
    text = describe(planned(searched, trials))
    assert text.count("failed in compile: crash, segfault") == 2
    assert text.count("needs 2 MiB") == 1, "only of the baseline that has nothing better"


def test_what_was_dropped_is_told_once_each_and_cut_off(searched):
    dropped = tuple(f"state['w{i}'][0]: mlp of 7 is not divisible by x=4" for i in range(20))
    trials = [trial("FSDP", compiled=estimate(dropped=dropped))]
    text = describe(planned(searched, trials, notes=("a note",)))
    assert "Note: a note" in text
    line = "  1 mlp of 7 is not divisible by x=4: state['w0'][0], state['w1'][0] and 18 more"
    assert line in text.splitlines()
    apart = tuple(f"state['w'][0]: mlp of {i} is not divisible by x=4" for i in range(20))
    same = [
        trial("FSDP", compiled=estimate(dropped=apart)),
        trial("data parallel", activation_rules={"a": "x"}, compiled=estimate(dropped=apart[:1])),
    ]
    text = describe(planned(searched, same))
    assert text.count("not divisible") == 12 and "and 8 more" in text
    assert "  1-2 mlp of 0 is not" in text and "  1 mlp of 1 is not" in text


def test_what_the_winner_s_prediction_leaves_out_or_assumes_is_told(searched):
    names = ("Not modelled in the winner's prediction:", "Assumed in the winner's prediction:")
    silent = describe(planned(searched, [trial("FSDP", compiled=estimate())]))
    assert not any(name in silent for name in names)
    best = estimate(
        unmodelled=(("custom call a x1", 0.0), ("custom call b x2", 0.125)),
        assumptions=tuple(f"while %{i}: taken as 1" for i in range(15)),
    )
    other = estimate(assumptions=("only another one's",), time_s=0.02)
    trials = [
        trial("FSDP", compiled=best),
        trial("replicated", activation_rules={}, compiled=other),
    ]
    lines = describe(planned(searched, trials, ranking=(0, 1))).splitlines()
    first = lines.index(names[0])
    assert lines[first + 1 : first + 3] == [
        "     custom call b x2: 12.5% of the predicted step",
        "     custom call a x1",
    ]
    then = lines.index(names[1])
    assert lines[then + 1] == "     while %0: taken as 1" and lines[then + 13] == "     and 3 more"
    assert not any("another one's" in line for line in lines)
    # Of a winner that was not compiled, what rung 1 assumed.
    alone = Trial(candidate=trials[0].candidate, propagated=other)
    assert "     only another one's" in describe(planned(searched, [alone])).splitlines()


def test_warnings_of_the_partitioner_are_told_beside_their_layout(searched):
    warned = estimate(warnings=("full rematerialization of dot", "and another"))
    trials = [
        trial("FSDP", compiled=estimate()),
        trial("replicated", activation_rules={}, compiled=warned),
    ]
    lines = describe(planned(searched, trials, ranking=(0, 1))).splitlines()
    first = lines.index("Bad reshards that the partitioner warned of:")
    assert lines[first + 1 : first + 3] == [
        "   2 full rematerialization of dot",
        "   2 and another",
    ]
    quiet = describe(planned(searched, [trial("FSDP", compiled=estimate())]))
    assert "Bad reshards" not in quiet


def test_why_the_winner_wins(searched):
    slower = trial("FSDP", compiled=estimate(sent=4 << 20), profiled=measurement(0.02))
    best = trial("", compiled=estimate(), profiled=measurement(0.01))
    text = explain(planned(searched, [best, slower]))
    assert text == (
        "The winner takes 10.0 ms a step; 2.00 x as fast as FSDP, the best other baseline, in the"
        " same rounds: it sends 1.0 MiB a step instead of 4.0 MiB (all-reduce 1.0 MiB instead of"
        " 4.0 MiB)."
    )
    alike = trial("FSDP", compiled=estimate(), profiled=measurement(0.01))
    assert "as long as FSDP" in explain(planned(searched, [best, alike]))
    better = trial("FSDP", compiled=estimate(), profiled=measurement(0.008))
    assert "1.25 x as long as FSDP" in explain(planned(searched, [best, better]))


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        ({"flops": 5e8}, "each device computes 0.50 of the operations"),
        ({"bytes_accessed": 5e5}, "it moves 488 KiB through memory a step instead of 977 KiB"),
        ({"collectives": ()}, "it sends 0 B a step instead of 1.0 MiB"),
        ({"communication_s": 1e-4}, "communication takes 100 us instead of"),
        ({}, "alike, and the measurement decides"),
    ],
)
def test_the_reason_is_the_largest_difference(searched, mine, reason):
    best = trial("", compiled=estimate(**mine), profiled=measurement(0.01))
    rival = trial("FSDP", compiled=estimate(), profiled=measurement(0.02))
    assert reason in explain(planned(searched, [best, rival]))


def test_what_does_not_fit_is_no_rival(searched):
    best = trial("FSDP", compiled=estimate(time_s=0.02))
    limit = searched.plan.evidence.memory_limit_bytes
    large = estimate(time_s=0.01, peak_memory_bytes=limit + 1)
    rivals = [
        trial("replicated", activation_rules={"r": "x"}, compiled=large),
        trial("data parallel", activation_rules={"c": "x"}, compiled=estimate(time_s=0.03)),
    ]
    assert "a step, data parallel 30.0 ms" in explain(planned(searched, [best, *rivals]))
    assert "compared with no baseline" in explain(planned(searched, [best, rivals[0]]))


def test_without_measurements_the_prediction_speaks(searched):
    best = trial("FSDP", compiled=estimate(time_s=0.01))
    rival = trial("replicated", activation_rules={"r": "x"}, compiled=estimate(time_s=0.03))
    text = explain(planned(searched, [best, rival]))
    assert text.startswith(
        "The winner (it is the baseline 'FSDP') is predicted to take 10.0 ms a step, replicated"
        " 30.0 ms: "
    )
    assert text.endswith("alike.")
    lean = trial("FSDP", compiled=estimate(time_s=0.02))
    with_constraints = lean.candidate.with_constraints(Constraints.ALL)
    reworded = dataclasses.replace(best, candidate=with_constraints)
    told = explain(planned(searched, [reworded, lean, rival]))
    assert "replicated 30.0 ms" in told, "the same layout in other words is no rival"
    assert "was compared with no baseline" in explain(planned(searched, [best]))
    crashed = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="the worker died")
    lines = [dataclasses.replace(best, profiled=None), trial("FSDP", profiled=crashed)]
    assert "was not measured, and is the first by prediction: 1 others were run and failed" in (
        explain(planned(searched, lines))
    )
    single = trial("replicated", mesh=(), activation_rules={"r": ()}, compiled=estimate())
    assert explain(planned(searched, [single])) == "There is one device: nothing is sharded."


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "exact",
            "Numerics: agrees with the unsharded step after 2 steps (largest error 7e-3, allowed"
            " 3e-2, at state['w']).",
        ),
        (
            "relative",
            "agrees with another layout that fits after 2 steps (largest error 7e-3, at",
        ),
        ("unchecked", "Numerics: unchecked; plan.check() compares with the unsharded step."),
    ],
)
def test_the_state_of_the_numerics_check(searched, kind, words):
    checked = measurement(
        0.01,
        numerics=kind,
        numerics_error=None if kind == "unchecked" else 7e-3,
        numerics_allowed=3e-2 if kind == "exact" else None,
        numerics_where="state['w']",
        devices=(DeviceProfile(device="0", compute_s=1e-3, communication_s=2e-3, idle_s=3e-3),),
    )
    plan = planned(searched, [trial("FSDP", compiled=estimate(), profiled=checked)])
    assert words in numerics(plan)
    assert "compute 1.0 ms, communication 2.0 ms, idle 3.0 ms" in describe(plan)


def test_what_failed_as_it_ran_is_not_counted_as_measured(searched) -> None:
    ran = trial("FSDP", compiled=estimate(), profiled=measurement(0.01))
    died = trial(
        "ZeRO-1",
        compiled=estimate(),
        profiled=Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="it died"),
    )
    assert ", 1 measured, 1 failed as they ran;" in describe(planned(searched, [ran, died]))
    assert ", 1 measured;" in describe(planned(searched, [ran]))


def test_what_rung_1_rejects_is_not_counted_as_compiled(searched) -> None:
    first = trial("", compiled=estimate())
    rejected = trial(
        "replicated", compiled=Failure(stage=Stage.PROPAGATE, kind=Kind.OOM, message="")
    )
    refused = trial("FSDP", compiled=Failure(stage=Stage.COMPILE, kind=Kind.OOM, message=""))
    before, after = (
        int(re.search(r"(\d+) compiled", describe(planned(searched, shown))).group(1))
        for shown in ([first], [first, rejected, refused])
    )
    assert after == before + 1


def table(text):
    """The cells of the rows below the head, by column."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if re.match("# +layout ", line))
    columns = re.split("  +", lines[head])
    rows = [re.split("  +", line) for line in lines[head + 1 : lines.index("", head + 1)]]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_what_only_rung_1_said_is_marked(searched):
    trials = [
        trial("FSDP", compiled=estimate()),
        trial(
            "replicated",
            activation_rules={"r": "x"},
            propagated=estimate(Rung.PROPAGATE, time_s=0.02),
        ),
    ]
    text = describe(planned(searched, trials))
    first, second = table(text)
    assert (first["predicted ms"], first["memory MiB"]) == ("10.0", "1.00")
    assert (second["predicted ms"], second["memory MiB"]) == ("~20.0", "~1.00")
    assert second["sent MiB a step"] == "~all-reduce 1.00"
    assert text.count("~ is an estimate of rung 1 alone") == 1
    assert "~" not in describe(planned(searched, trials[:1]))


def test_the_memory_limit_has_one_line_and_what_is_above_it_a_mark(searched):
    large = estimate(peak_memory_bytes=3 << 20)
    trials = [
        trial("FSDP", compiled=estimate()),
        trial("replicated", activation_rules={"r": "x"}, compiled=large),
    ]
    text = describe(planned(searched, trials, memory_limit_bytes=2 << 20))
    assert text.splitlines()[1] == "Memory limit: 2.00 MiB a device (! is above it)"
    assert [row["memory MiB"] for row in table(text)] == ["1.00", "3.00 !"]
    text = describe(planned(searched, trials, memory_limit_bytes=3 << 20))
    assert text.splitlines()[1] == "Memory limit: 3.00 MiB a device" and "!" not in text


def test_a_table_has_one_unit_for_all_sizes_and_one_for_all_times(searched):
    small = estimate(time_s=4e-4, peak_memory_bytes=1 << 19, sent=300)
    trials = [
        trial("FSDP", compiled=estimate(time_s=2.0, peak_memory_bytes=5 << 30)),
        trial("ZeRO-1", activation_rules={"z": "x"}, compiled=small),
    ]
    rows = table(describe(planned(searched, trials, memory_limit_bytes=8 << 30)))
    assert [row["predicted s"] for row in rows] == ["2.00", "<0.001"]
    assert [row["memory GiB"] for row in rows] == ["5.00", "<0.001"]


def test_nothing_measured_has_no_columns_for_it(searched):
    (row,) = table(describe(planned(searched, [trial("FSDP", compiled=estimate())])))
    assert list(row) == [
        *("#", "layout", "mesh"),
        *("predicted ms", "memory MiB", "sent MiB a step"),
    ]


@given(
    times=st.lists(
        st.tuples(st.floats(0.5, 2), st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=6
    )
)
def test_the_times_of_a_table_never_contradict_its_order(searched, times):
    """Rows run in other rounds than others, and the machine gets slower from round to round."""
    found = [
        measurement(1, samples_s=tuple(t * 1.3**r for r in rounds), rounds=tuple(rounds))
        for t, first, count in times
        for rounds in [range(first, first + count)]
    ]
    rows = [
        Trial(
            problem=0,
            candidate=trial(f"baseline {i}").candidate,
            baseline=f"baseline {i}",
            shardings=i,
            propagated=estimate(Rung.PROPAGATE),
            compiled=estimate(),
            profiled=one,
        )
        for i, one in enumerate(found)
    ]
    ledger = SearchState(
        problems=[],
        target=searched.plan.target,
        cost=None,
        budget=Budget(),
        journal=Journal(),
        callbacks=(),
        seed=0,
        limit_bytes=1000,
        folder=None,
        trials=rows,
    )
    measuring = Measuring(ledger, str)
    measuring._rank([len(found) - 1])
    assert measuring.ranking[0] == len(found) - 1, "the race says who is the fastest"
    trials = rows
    cells = table(describe(planned(searched, trials, ranking=measuring.ranking)))
    assert [row["layout"] for row in cells] == [f"baseline {i}" for i in measuring.ranking]
    unit = next(column for column in cells[0] if column.startswith("measured"))
    shown = [float(row[unit].split(" ")[0].replace(",", "")) for row in cells]
    ratios = [float(row["x best"]) for row in cells]
    assert shown == sorted(shown) and ratios == sorted(ratios) and ratios[0] == 1


def test_a_layout_has_one_row_whatever_constraints_put_it_into_the_program(searched):
    lean = trial("FSDP", compiled=estimate(time_s=0.02))
    with_constraints = dataclasses.replace(
        lean,
        candidate=lean.candidate.with_constraints(Constraints.ALL),
        compiled=estimate(time_s=0.01),
    )
    text = describe(planned(searched, [lean, with_constraints], ranking=(1, 0)))
    (row,) = table(text)
    assert row["predicted ms"] == "10.0" and "constraints: all" in text


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ("finished", None),
        ("interrupted", "The search was interrupted: this is the best so far."),
        ("out of time", "The time limit ended the search: this is the best so far."),
        (
            "cut short: compiling, measuring",
            "These parts had spent their share of the time limit: this is the best so far.",
        ),
    ],
)
def test_how_a_search_ended(searched, ended, words):
    lines = describe(
        planned(searched, [trial("FSDP", compiled=estimate())], ended=ended)
    ).splitlines()
    assert lines[0] == f"Plan for 8 fake cpu devices ({ended})"
    assert lines[1] == words or (words is None and lines[1].startswith("Memory limit"))


def test_the_table_names_axes_by_what_they_are(searched):
    axis = next(a for a in searched.plan.axes.axes if a.label != a.name)
    text = describe(planned(searched, [trial("FSDP", activation_rules={axis.name: "x"})]))
    assert f"1 FSDP: {axis.label} over x" in text and axis.name not in text
