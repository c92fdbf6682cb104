"""The figures of the benchmark, on results made by hand whose answers are known."""

import math
import pathlib

import pytest

from autoshard.target.cost import Correction
from experiments import pages
from experiments.fidelity_parts import leave_out, peers_page, ranks, regret, report, tables
from experiments.fidelity_parts.goals import GOALS
from tests.experiments import fidelity_data as data
from tests.experiments.fidelity_data import program


def test_neither_drift_nor_one_bad_round_changes_the_ratio_of_two_times() -> None:
    made = [program("a", 1.0), program("b", 1.5), program("c", 3.0)]  # the machine slows down
    made[1]["samples_s"][0] *= 10
    seconds = ranks.times(report.tables_of(data.sample(made)))
    assert seconds["b"] / seconds["a"] == pytest.approx(1.5)
    assert seconds["c"] / seconds["a"] == pytest.approx(3.0)


def test_regret_comes_from_the_fresh_pairs_not_from_the_rounds() -> None:
    rounds = [program("a", 1.0, place=0), program("b", 0.9)]
    slower = report.sample_row(data.sample(rounds, ratio=1.04))
    assert slower is not None and slower["regret"] == pytest.approx(0.04)
    assert not slower["top1"]
    assert slower["speed_up_share"] == pytest.approx(1 / 1.04)
    equal = report.sample_row(data.sample(rounds, ratio=1.004))
    assert equal is not None and equal["top1"]  # within the interval
    faster = report.sample_row(data.sample(rounds, ratio=0.9))
    assert faster is not None and (faster["regret"], faster["top1"]) == (0.0, True)


def test_undecided_fresh_pairs_are_no_top_1() -> None:
    found = regret.regret(data.sample([], ratio=0.99, decided=False)["fresh"])
    assert not found["top1"] and not found["decided"]
    second = data.sample([], ratio=0.99, decided=False, rivals=("b", "c"))["fresh"]
    assert [pair["decided"] for pair in second] == [True, False]
    assert not regret.regret(second)["top1"]


def test_regret_is_against_the_rival_that_the_plan_does_worst_against() -> None:
    fresh = data.sample([], ratio=0.8, rivals=("lucky", "c", "d"))["fresh"]
    fresh[2] |= {"ratio": 1.1, "low": 1.09, "high": 1.11}
    found = regret.regret(fresh)
    assert found["regret"] == pytest.approx(0.1) and not found["top1"]
    fresh[1]["failed"] = "it broke"
    assert regret.regret(fresh)["regret"] is None
    assert regret.regret([])["regret"] is None


def test_rivals_are_the_fastest_other_programs() -> None:
    measured = {"a": 2.0, "b": 1.0, "c": 1.5, "d": 1.2, "e": 1.4}
    assert regret.rivals_of("a", measured) == ["b", "d", "e"]
    assert regret.rivals_of("a", {"a": 1.0}) == []
    assert regret.rivals_of("a", {"b": 1.0}) == []  # the plan itself could not be measured


@pytest.mark.parametrize(
    ("places", "strict", "tied"),
    [
        ({"a": 0, "best": 2}, True, True),
        ({"a": 0, "best": 3}, False, False),
        ({"near": 1, "best": 5}, False, True),  # not the best, and no clock can tell
        ({"noisy": 1, "best": 5}, False, False),  # the clock cannot tell anything of it
        ({}, False, False),
    ],
)
def test_best_in_the_top_3(places: dict[str, int], strict: bool, tied: bool) -> None:
    names = ("a", "best", "near", "noisy")
    made = [program(name, 1.5 if name == "a" else 1.0) for name in names]
    for one, uneven in ((made[2], (1.02, 0.99)), (made[3], (1.3, 0.85))):  # slower in the mean
        one["samples_s"] = [s * uneven[i % 2] for i, s in enumerate(one["samples_s"])]
    found = report.tables_of(data.sample(made))
    where = {name: places.get(name) for name in found}
    said = regret.best_in_top(where, ranks.times(found), found, ())
    assert said == {"strict": strict, "tied": tied}


def test_fresh_pairs_say_whether_the_plan_equals_the_best() -> None:
    made = [program("a", 1.1), program("best", 1.0)]
    found = report.tables_of(data.sample(made))
    measured = ranks.times(found)
    for ratio, decided, tied in ((1.001, True, True), (1.05, True, False), (1.001, False, False)):
        fresh = data.sample([], ratio=ratio, decided=decided, rivals=("best",))["fresh"]
        said = regret.best_in_top({"a": 0, "best": None}, measured, found, fresh)
        assert said == {"strict": False, "tied": tied}


def test_a_plan_that_is_fastest_by_luck_is_not_the_best() -> None:
    made = [program("a", 1.0), program("rival", 1.001), program("c", 1.5)]
    found = report.tables_of(data.sample(made))
    measured = ranks.times(found)
    slower = data.sample([], ratio=1.03, rivals=("rival",))["fresh"]
    for place, top in ((None, False), (1, True)):
        places = {"a": 0, "rival": place, "c": 2}
        said = regret.best_in_top(places, measured, found, slower)
        assert said == {"strict": top, "tied": top}, "fresh pairs say that the rival is faster"
    # Rounds say nothing of the plan: here they would call it as fast as the best.
    made = [program("a", 1.0005), program("rival", 1.0)]
    found = report.tables_of(data.sample(made))
    said = regret.best_in_top({"a": 0, "rival": 7}, ranks.times(found), found, slower)
    assert said == {"strict": False, "tied": False}


def test_the_best_is_whom_fresh_pairs_call_faster_whatever_the_rounds_say() -> None:
    """By the rounds "best" is it, and the plan ties with that; but "c" is faster than the plan."""
    made = [program("a", 1.1), program("b", 1.0), program("c", 1.01)]
    found = report.tables_of(data.sample(made))
    measured = ranks.times(found)
    ties = data.sample([], ratio=0.99, rivals=("b",))["fresh"]
    faster = data.sample([], ratio=1.03, rivals=("c",))["fresh"]
    places = {"a": 0, "b": 4, "c": 5}
    said = [regret.best_in_top(places, measured, found, fresh) for fresh in (ties, ties + faster)]
    assert said == [{"strict": False, "tied": True}, {"strict": False, "tied": False}]
    said = [regret.best_in_top({**places, "c": 2}, measured, found, ties + faster)]
    assert said == [{"strict": True, "tied": True}]


def test_rounds_alone_do_not_make_a_plan_the_best() -> None:
    found = report.tables_of(data.sample([program("a", 1.0), program("b", 1.1)]))
    measured = ranks.times(found)
    for decided, top in ((True, True), (False, False)):
        fresh = data.sample([], ratio=0.99, decided=decided, rivals=("b",))["fresh"]
        said = regret.best_in_top({"a": 0, "b": None}, measured, found, fresh)
        assert said == {"strict": top, "tied": top}
    said = regret.best_in_top({"a": 0, "b": None}, measured, found, ())
    assert said == {"strict": False, "tied": False}


def test_a_rung_that_says_nothing_of_a_program_that_ran_has_no_figure() -> None:
    made = [program(x, 1.0 + i / 10) for i, x in enumerate("abcde")]
    assert report.tau_of(data.sample(made), "rung1") and report.observations(
        data.sample(made), "rung1"
    )
    made[2]["rung1"] = {"kind": "crash", "message": "it fell"}
    assert report.tau_of(data.sample(made), "rung1") is None
    assert report.observations(data.sample(made), "rung1") == []
    assert len(report.observations(data.sample(made), "rung2")) == 5


def test_a_whole_space_is_measured_when_all_of_it_that_fits_was() -> None:
    fits = [program("a", 1.0), program("b", 1.0), program("c", 1.0, failure="oom")]
    for more, there in (([], True), ([program("d", 1.0, failure="crash")], False)):
        row = report.sample_row(data.sample([*fits, *more]))
        assert row is not None and report.enough(row) == there


def test_drawn_programs_and_rung_1s_best_that_do_not_run_are_missed() -> None:
    def row(drawn: int, top: int, more: int, failed: str = "") -> dict:
        made = [program(f"d{i}", 1.0, groups=("near best",)) for i in range(drawn)]
        made += [program(f"t{i}", 1.0, groups=("top", "finalists")) for i in range(top)]
        made += [program(f"m{i}", 1.0, groups=("filling",)) for i in range(more)]
        if failed:
            made.append(program("x", 1.0, groups=(failed,), failure="crash"))
        found = report.sample_row({**data.sample([*made, *ALL_GOOD[:2]]), "whole_space": False})
        assert found is not None
        return found

    assert report.enough(row(30, 8, 8)), "two more of rung 1's best are among the four"
    assert not report.enough(row(29, 8, 20, failed="uniform"))
    assert not report.enough(row(35, 7, 20, failed="top"))
    assert not report.enough(row(30, 8, 7))
    few = {**results()["mlp", 8], "sample": data.sample(ALL_GOOD)}
    few["sample"] |= {"whole_space": False}
    table = tables.all_tables(report.summarise({("mlp", 8): few}))[1]
    cell = table.rows[0][2]
    assert cell.red and cell.text == "4 (2 drawn, 2 of rung 1's best)"


def test_layouts_that_are_not_met_are_named() -> None:
    def cell(**changed: object) -> pages.Cell:
        found = {**data.hand(data_parallel=0.9, fsdp=None, tensor_parallel=1.1), **changed}
        table = tables.all_tables(report.summarise({("mlp", 8): {"hand": found}}))[1]
        return table.rows[0][-2]

    said = "- fsdp (undecided); 1.100 tensor parallel"
    assert cell() == pages.Cell(said, red=True)
    assert cell(lacking=["new"]) == pages.Cell(f"{said}; 1 not measured", red=True)
    met = data.hand(data_parallel=0.9, fsdp=1.0)
    assert cell(rows=met["rows"]) == pages.Cell("1.000 fsdp", red=False)
    lacking = report.summarise({("mlp", 8): {"hand": {**met, "lacking": ["new"]}}})
    assert lacking["figures"]["hand_met"] == pytest.approx(2 / 3)
    assert lacking["figures"]["hand_lacking"] == 1 and "hand_met" in missed(lacking)


def test_tau_and_its_ceiling_without_noise_are_one() -> None:
    made = [program(name, 1.0 + i / 10) for i, name in enumerate("abcdef")]
    found = report.tau_of(data.sample(made), "rung2")
    assert found is not None
    assert [found[k] for k in ("tau", "ceiling", "share")] == pytest.approx([1.0] * 3)
    turned = [program(name, 1.0 + i / 10, compute_s=9.0 - i) for i, name in enumerate("abcdef")]
    found = report.tau_of(data.sample(turned), "rung2")
    assert found is not None and found["share"] == pytest.approx(-1.0)


def test_noise_lowers_the_ceiling_of_programs_that_are_close() -> None:
    close = [program(f"p{i}", 1.0 + i / 100, noise=0.05) for i in range(12)]
    wide = [program(f"p{i}", 1.0 + i, noise=0.05) for i in range(12)]
    low = report.tau_of(data.sample(close), "rung1")
    high = report.tau_of(data.sample(wide), "rung1")
    assert low is not None and high is not None
    assert 0.0 < low["ceiling"] < 0.99 < high["ceiling"]
    assert high["share"] == pytest.approx(high["tau"] / high["ceiling"])
    # Noise may not pass for fidelity: a share of next to nothing is none.
    assert low["ceiling"] < ranks.LEAST_CEILING and low["share"] is None


def test_tau_is_over_the_sample_and_rung_1s_best_alone() -> None:
    made = [program(name, 1.0 + i, groups=("top",)) for i, name in enumerate("abc")]
    made += [
        program("x", 9.0, groups=("baselines",), compute_s=0.1),  # would lower tau
        program("y", 1.0, failure="crash"),
        program("d", 4.0, groups=("near best", "finalists")),
    ]
    found = report.tau_of(data.sample(made), "rung1")
    assert found is not None and (found["count"], found["tau"]) == (4, pytest.approx(1.0))
    near = report.tau_of(data.sample(made), "rung1", near=True)
    assert near is None  # only one is within 1.5 times of the fastest
    close = [program(name, 1.0 + i / 10) for i, name in enumerate("abcde")]
    close.append(program("fastest", 0.8, groups=("finalists",)))  # measured, not ranked
    near = report.tau_of(data.sample(close), "rung1", near=True)
    assert near is not None and near["count"] == 3


def planted(case: str, factors: Correction, off: float = 1.0) -> list[leave_out.Observation]:
    """Programs that take exactly what the factors say, times `off`."""
    parts = [(1.0, 0.1), (1.0, 2.0), (0.5, 3.0), (2.0, 0.5)]
    return [
        leave_out.Observation(
            family=case.partition("-")[0],
            case=case,
            name=str(i),
            compute_s=a,
            communication_s=b,
            measured_s=off * (a * factors.compute + b * factors.communication),
        )
        for i, (a, b) in enumerate(parts)
    ]


def test_a_planted_model_of_time_is_found_exactly() -> None:
    truth = Correction(compute=3.0, communication=0.5)
    seen = [*planted("vit", truth), *planted("mlp", truth), *planted("moe", truth)]
    found = leave_out.fit(seen)
    assert (found.activation_rules, found.communication) == pytest.approx((3.0, 0.5))
    assert leave_out.errors(seen) == pytest.approx({"vit": 0.0, "mlp": 0.0, "moe": 0.0}, abs=1e-9)


def test_a_family_is_predicted_by_the_others_alone() -> None:
    truth = Correction(compute=3.0, communication=0.5)
    # Both cases of one family take twice as long: neither may teach the model of the other.
    seen = [*planted("vit-a", truth, 2.0), *planted("vit-b", truth, 2.0), *planted("mlp", truth)]
    found = leave_out.errors(seen)
    assert found["vit-a"] == found["vit-b"] == pytest.approx(0.5)  # half of what was measured
    assert found["mlp"] == pytest.approx(1.0)
    assert leave_out.errors(planted("vit", truth)) == {}  # no other family, no figure


def test_each_case_weighs_the_same_however_many_programs_it_has() -> None:
    few = planted("mlp", Correction())
    many = planted("vit", Correction(compute=2.0, communication=2.0))
    once, often = leave_out.fit(few + many), leave_out.fit(few + many * 5)
    assert once.compute == pytest.approx(often.compute)
    assert once.communication == pytest.approx(often.communication)


ALL_GOOD = [
    program("a", 1.0, groups=("top", "finalists"), place=0),
    program("b", 1.2, groups=("top",), place=1),
    program("c", 1.4),
    program("d", 2.0, groups=("baselines", "uniform"), baseline="data parallel"),
]


def results(**changed: object) -> dict[report.Key, report.Parts]:
    """Two cases of two families that meet every goal, but for what is changed in the second."""
    second: dict[str, object] = {
        "search": data.search(),
        "hand": data.hand(data_parallel=0.6, fsdp=0.8, tensor_parallel=0.9),
        "sample": data.sample(ALL_GOOD, case="vit", family="vit"),
    }
    first = {
        "search": data.search(plan_is="FSDP"),
        "hand": data.hand(data_parallel=0.5, fsdp=1.0),
        "sample": data.sample(ALL_GOOD),
    }
    return {("mlp", 8): first, ("vit", 8): {**second, **changed}}  # type: ignore[dict-item]


def missed(summary: dict) -> set[str]:
    return {goal["name"] for goal in summary["goals"] if not goal["met"]}


def test_what_meets_every_goal_is_nowhere_red() -> None:
    summary = report.summarise(results())
    assert missed(summary) == set()
    assert {goal["name"] for goal in summary["goals"]} == {goal.name for goal in GOALS}
    assert not any(
        cell.red for table in tables.all_tables(summary) for row in table.rows for cell in row
    )
    assert "| x86_64 Abacus | 2026-01-01 |" in pages.as_markdown(tables.all_tables(summary))
    figures = summary["figures"]
    assert figures["data_or_fsdp_median"] == pytest.approx(0.9)  # of 1.0 and 0.8
    assert (figures["plan_is_baseline"], figures["plan_is_data_or_fsdp"]) == (1, 1)
    assert (figures["hand_count"], figures["candidates_median"]) == (5, 600)
    row = summary["rows"][0]["sample"]
    assert (row["speed_up_plan"], row["speed_up_best"]) == pytest.approx((2.0, 2.0))
    factors = summary["factors"]["rung2"]["8"]
    assert factors["mlp"] == pytest.approx(factors["vit"])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"search": {**data.search(), "failed": "boom"}}, {"coverage"}),
        ({"search": data.search(numerics="unchecked")}, {"coverage"}),
        ({"search": data.search(numerics="relative")}, {"coverage"}),
        ({"search": None}, {"coverage"}),
        ({"hand": data.hand(fsdp=1.01)}, {"hand_met"}),
        ({"hand": data.hand(fsdp=None)}, {"hand_met"}),  # undecided
        ({"hand": {**data.hand(), "failed": "no plan"}}, {"hand_met"}),
        ({"hand": None}, {"hand_met"}),
        ({"hand": data.hand()}, set()),  # nobody has written any
        (
            {"sample": data.sample(ALL_GOOD, case="vit", family="vit", ratio=1.03)},
            {"regret_median", "top_1"},  # half of the cases; 3 % is no worst of above 5 %
        ),
        (
            {"sample": data.sample(ALL_GOOD, case="vit", family="vit", ratio=1.08)},
            {"regret_median", "regret_worst", "top_1", "speed_up_share_worst"},
        ),
        (
            {"sample": data.sample(ALL_GOOD, case="vit", family="vit", decided=False)},
            {"top_1", "best_in_top_3"},
        ),
        (
            {
                "sample": {
                    **data.sample(ALL_GOOD, case="vit", family="vit"),
                    "whole_space": False,  # four programs of many
                }
            },
            {"programs_enough"},
        ),
        ({"sample": {"failed": "no plan"}}, {g.name for g in GOALS if g.part == "sample"}),
        ({"sample": None}, {g.name for g in GOALS if g.part == "sample"}),
    ],
)
def test_what_is_missed_is_red_and_counted(changed: dict, expected: set[str]) -> None:
    summary = report.summarise(results(**changed))
    assert missed(summary) == expected
    texts = {goal.text for goal in GOALS if goal.name in expected}
    goals = tables.goals_table(summary)
    assert {row[0].text for row in goals.rows if row[1].red} == texts
    marked = pages.as_markdown([goals]).count("\N{LARGE RED CIRCLE}")
    assert marked == len(expected)


def test_comparisons_of_few_processes_are_counted() -> None:
    assert report.summarise(results())["figures"]["pairs_open"] == 0
    one = data.hand(processes=1, data_parallel=0.6, fsdp=0.99)  # far from 1 one is enough
    assert report.summarise(results(hand=one))["figures"]["pairs_open"] == 1
    fresh = data.sample(ALL_GOOD, case="vit", family="vit")
    fresh["fresh"][0]["processes"] = [0] * 3
    assert report.summarise(results(hand=one, sample=fresh))["figures"]["pairs_open"] == 2


def test_no_figure_but_the_ranks_is_kept_from_a_program_that_failed() -> None:
    broken = [*ALL_GOOD, program("e", 1.0, failure="oom"), program("f", 1.0, failure="crash")]
    row = report.sample_row(data.sample(broken))
    assert row is not None
    assert (row["programs"], row["measured"], row["too_large"], row["failed"]) == (6, 4, 1, 2)
    assert len(report.observations(data.sample(broken), "rung1")) == 4


def test_every_row_of_a_table_has_its_columns() -> None:
    for parts in ({}, {"sample": None, "search": None, "hand": None}):
        for table in tables.all_tables(report.summarise(results(**parts))):
            widths = {len(table.heads), *(len(row) for row in table.rows)}
            assert len(widths) == 1, table.title


def test_tables_go_between_the_markers_of_a_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    made = pages.as_markdown(tables.all_tables(report.summarise(results(search=None))))
    for _ in range(2):
        pages.put_into(page, made)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text and text.count("### Goals") == 1
    page.write_text("no markers")
    with pytest.raises(ValueError, match="without the lines"):
        pages.put_into(page, made)


def test_a_peer_that_the_beam_does_not_beat_by_ten_is_red() -> None:
    def row(candidates: int, beam: int | None) -> dict[str, float | int | None]:
        return {
            "best_s": 1.0,
            "candidates": candidates,
            "beam_candidates": beam,
            "judged": 600 if candidates >= 500 else max(candidates, 30),
        }

    case = {"budget": 600, "beam": row(9, 9), "tpe": row(500, 50), "random": row(90, 9)}
    table = peers_page.peers_table({"cases": {"mlp on x": case}}, 1)
    assert not any(cell.red for line in table.rows for cell in line)
    assert "500, 50 (0.10)" in [cell.text for cell in table.rows[0]]
    assert [table.rows[0][i].text for i in (2, 3, 5)] == [
        "1.00 s, 30 judged",
        "1.00 s",
        "1.00 s, 90 judged",
    ]
    for worse in (row(500, 51), row(600, None)):
        table = peers_page.peers_table({"cases": {"mlp on x": {**case, "tpe": worse}}}, 1)
        assert [cell.red for line in table.rows for cell in line].count(True) == 2
    assert "600, never" in [cell.text for cell in table.rows[0]]


def test_no_peer_is_beaten_where_there_was_nothing_to_find_or_cases_are_left() -> None:
    nothing = {"best_s": 1.0, "candidates": 0, "beam_candidates": 0, "judged": 30}
    some = {"best_s": 1.0, "candidates": 500, "beam_candidates": 5, "judged": 500}
    case = {"budget": 600, "beam": some, "tpe": some, "random": nothing}
    last = peers_page.peers_table({"cases": {"mlp on x": case}}, 1).rows[-1]
    assert [(cell.text, cell.red) for cell in last if cell.text.startswith("met")] == [
        ("met: 1 of 1 with something to find, 1 of 1 run", False),
        ("met: 0 of 0 with something to find, 1 of 1 run", True),
    ]
    last = peers_page.peers_table({"cases": {"mlp on x": case}}, 17).rows[-1]
    assert [cell.red for cell in last].count(True) == 2
    # Neither another target nor another budget makes two of one model.
    for name, budget in (("mlp on y", 600), ("vit on x", 50)):
        both = {"mlp on x": case, name: {**case, "budget": budget}}
        last = peers_page.peers_table({"cases": both}, 2).rows[-1]
        assert "1 of 2 run" in last[4].text and last[4].red


def test_plots_are_drawn_from_the_results(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.fidelity_parts import plots

    found = results(sample=data.sample(ALL_GOOD, case="vit", family="vit", ratio=1.08))
    plots.draw(found, report.summarise(found), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"predicted.png", "regret.png"}
    assert all(math.log2(path.stat().st_size) > 10 for path in tmp_path.iterdir())
