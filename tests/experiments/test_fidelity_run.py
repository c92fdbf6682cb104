"""How the benchmark runs: what is there is not made again, and a tiny case goes through it all."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard
from autoshard.records.trial import Failure, Kind, Measurement, Stage
from autoshard.rungs.profile.calibration_files import calibrated, cost_model
from autoshard.target.cost import MODEL_REVISION, Constants
from autoshard.target.target import Target
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.journal import Journal
from experiments import pairs
from experiments.fidelity_parts import (
    measuring,
    opening,
    predicting,
    reopening,
    report,
    running,
    sampling,
    searching,
    store,
    timing,
)
from experiments.fidelity_parts.store import Store, Task
from tests.analysed import CONSTANTS
from tests.experiments.tiny_case import TinyCase


def none(case: str, devices: int) -> list[str]:
    """Nobody writes a layout for the tiny case."""
    return []


def missing(kept: Store, retry: bool) -> list[Task]:
    return list(store.missing(kept, ["tiny"], [8], ["sample"], retry, none))


ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_what_tries_the_machinery_neither_counts_nor_comes_onto_the_page(
    tmp_path: pathlib.Path,
) -> None:
    page = tmp_path / "docs" / "fidelity.md"
    page.parent.mkdir()
    page.write_text("as it is")
    for flag, folder in (
        ("--short", "shrunk-short"),
        ("--scale=small", "small"),
        ("--rounds=2", "shrunk-2-rounds"),
        ("--seed=1", "shrunk-seed-1"),
        ("--out=runs/fidelity-elsewhere/results", "elsewhere"),
    ):
        subprocess.run(
            [sys.executable, "-m", "experiments.fidelity", "--part=report", flag],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        assert (tmp_path / f"runs/fidelity-{folder}/results/summary.json").exists()
    assert page.read_text() == "as it is" and not (tmp_path / "results").exists()


@pytest.mark.parametrize("part", ["search", "predict"])
def test_the_command_fails_where_a_part_left_no_result(part, tmp_path: pathlib.Path) -> None:
    code = (
        "import sys\n"
        "from absl import app\n"
        "from experiments import fidelity\n"
        "from experiments.fidelity_parts import running\n"
        "running.in_process = lambda *args: 'its process ended with code -9'\n"
        "running.predict_again = lambda *args, **kwargs: ['lost']\n"
        "app.run(fidelity.main, sys.argv)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"--part={part}", "--case=mlp", "--devices=4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "1 parts left no result" in done.stdout


def test_what_is_whole_is_not_run_again_and_what_is_torn_is(kept: Store) -> None:
    started: list[Task] = []

    def start(task: Task) -> str:
        started.append(task)
        store.write(kept.result(task), {"failed": "boom" if task.part == "sample" else ""})
        return ""

    def run(retry: bool = False) -> list[tuple[str, str, int]]:
        started.clear()
        tasks = store.missing(kept, ["a", "b"], [4, 8], ["search", "sample"], retry, none)
        lost = running.run_each(kept, tasks, start=start, tell=lambda text: None)
        assert lost == []
        return [(t.case, t.part, t.devices) for t in started]

    first = run()
    assert first[:3] == [("a", "search", 4), ("a", "sample", 4), ("a", "search", 8)]
    assert len(first) == 8 and first[4][0] == "b"
    assert run() == []
    torn = kept.result(Task(part="search", case="b", devices=4))
    torn.write_text(torn.read_text()[:-5])
    assert run() == [("b", "search", 4)]
    assert run(retry=True) == [(case, "sample", n) for case in "ab" for n in (4, 8)]


def test_a_part_that_ends_badly_does_not_stop_the_others(kept: Store) -> None:
    told: list[str] = []

    def start(task: Task) -> str:
        if task.devices == 4:
            return "its process ended with code -9"
        store.write(kept.result(task), {"failed": ""})
        return ""

    tasks = store.missing(kept, ["a"], [4, 8], ["search"], False, none)
    lost = running.run_each(kept, tasks, start=start, tell=told.append)
    assert [task.devices for task in lost] == [4]
    assert any("code -9" in text for text in told)


def test_results_are_written_whole_and_lists_of_numbers_on_one_line(kept: Store) -> None:
    path = kept.results / "x.json"
    data = {"samples_s": [0.5, 1e-7, 3], "names": ["a", "b"], "none": [], "deep": [[1, 2], [3]]}
    store.write(path, data)
    assert store.read(path) == data
    assert '"samples_s": [0.5, 1e-07, 3]' in path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        store.write(path, {"time_s": float("nan")})
    assert store.read(path) == data  # the old file stands
    assert [p.name for p in kept.results.iterdir()] == ["x.json"]


def test_a_result_names_no_folder_above_the_working_directory(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept.results.parent)
    path, log = kept.results / "x.json", kept.runs / "workers" / "a.stderr"
    store.write(path, {"message": f"died; its last output, from {log}:"})
    relative = str(pathlib.Path("runs") / "workers" / "a.stderr")
    assert store.read(path) == {"message": f"died; its last output, from {relative}:"}


def test_a_plan_that_is_kept_names_no_traces(searched: Any) -> None:
    def traces(plan: Any) -> list[str]:
        profiled = [plan.evidence.trials[i].profiled for i in plan.evidence.ranking]
        return [p.trace for p in profiled if isinstance(p, Measurement)]

    assert any(traces(searched.plan))
    kept = searching.slim(searched.plan)
    assert traces(kept) and not any(traces(kept))
    assert kept.candidate == searched.plan.candidate


@pytest.fixture
def never_compile(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compiles nothing; rows get their own estimate of rung 1 as the compiler's.

    And a program of their own.
    """
    compiled: list[int] = []

    def compile(self: Any, indices: list[int], share: float) -> None:
        for i in indices:
            row = self._state.rows[i]
            row.compiled, row.digest = row.propagated, str(i)
            compiled.append(i)

    monkeypatch.setattr(sampling.Compiling, "compile", compile)
    return compiled


def chosen(
    kept: Store,
    calibration: pathlib.Path,
    seed: int,
    size: sampling.Size,
    try_out: Callable[[Any, Sequence[int]], None] = lambda ledger, rows: None,
) -> tuple[list[tuple[str, ...]], sampling.Sample, Any]:
    task = Task(part="sample", case="tiny", devices=8)
    ledger = sampling.open_ledger(
        task,
        TinyCase(),
        kept,
        Journal(),
        cost_model(sampling.target_of(task), calibration),
        seed=seed,
        budget=autoshard.Budget(candidates=40),
    )
    subject = ledger.subjects[0]
    plan = subject.space.sample(random.Random(5))
    assert plan is not None
    sample = sampling.choose(ledger, [plan], size, functools.partial(try_out, ledger))
    return [tuple(one.groups) for one in sample.programs], sample, ledger


def test_the_sample_holds_what_it_should_each_program_once(
    kept: Store, calibration: pathlib.Path, never_compile: list[int]
) -> None:
    size = sampling.Size(fitting=12, top=3, total=24, at_once=4)
    groups, sample, ledger = chosen(kept, calibration, 0, size)
    programs = [ledger.rows[one.row].program for one in sample.programs]
    assert len(set(programs)) == len(programs) >= 24
    assert sorted(never_compile) == sorted(one.row for one in sample.programs)
    drawn = [g for g in groups if set(g) & set(sampling.DRAWN)]
    assert len(drawn) == 12
    top = [ledger.rows[one.row] for one in sample.programs if "top" in one.groups]
    searched = [row for row in ledger.rows[: ledger.budget.candidates] if row.propagated]
    quicker = {row.program for row in searched if row.propagated.time_s < top[-1].propagated.time_s}
    assert len(top) == 3 and quicker <= {row.program for row in top}
    assert sum("finalists" in g for g in groups) == 1
    assert ledger.rows[sample.finalists[0]].compiled is not None
    names = {ledger.rows[one.row].baseline for one in sample.programs if "baselines" in one.groups}
    assert {"replicated", "data parallel", "FSDP"} <= names
    again, other, _ = chosen(kept, calibration, 0, size)
    assert again == groups and [one.row for one in other.programs] == [
        one.row for one in sample.programs
    ]


def test_what_does_not_run_stays_in_the_sample_and_others_are_measured_in_its_place(
    kept: Store, calibration: pathlib.Path, never_compile: list[int]
) -> None:
    size = sampling.Size(fitting=12, top=3, total=24, at_once=4)
    _, all_run, _ = chosen(kept, calibration, 0, size)
    died = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="it died")
    tried: list[int] = []

    def try_out(ledger: Any, rows: Sequence[int]) -> None:
        assert all(ledger.rows[i].compiled for i in rows) and not set(rows) & set(tried)
        for i in rows:
            tried.append(i)
            if len(tried) % 2:
                ledger.rows[i].profiled = died

    groups, sample, ledger = chosen(kept, calibration, 0, size, try_out)
    assert sorted(tried) == sorted(one.row for one in sample.programs)
    ran = [ledger.rows[one.row].profiled is None for one in sample.programs]
    assert sum(ran) == 24 < len(ran)
    for some, least in (({"top"}, 3), (set(sampling.DRAWN), 12)):
        runs = [ok for ok, own in zip(ran, groups, strict=True) if some & set(own)]
        assert sum(runs) == least < len(runs)
    assert {one.row for one in all_run.programs if "top" in one.groups} < {
        one.row for one in sample.programs if "top" in one.groups
    }


def test_layouts_that_come_to_one_program_are_one(
    kept: Store, calibration: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every third row is the program of the one before it, and none is another's."""

    def compile(self: Any, indices: list[int], share: float) -> None:
        for i in indices:
            row = self._state.rows[i]
            row.compiled, row.digest = row.propagated, str(i - (i % 3 == 2))

    monkeypatch.setattr(sampling.Compiling, "compile", compile)
    tried: list[int] = []

    def try_out(ledger: Any, rows: Sequence[int]) -> None:
        tried.extend(rows)

    size = sampling.Size(fitting=12, top=6, total=30, at_once=4)
    groups, sample, ledger = chosen(kept, calibration, 0, size, try_out)
    rows = [ledger.rows[one.row] for one in sample.programs]
    assert len({row.digest for row in rows}) == len(rows) >= 30
    assert any(row.compiled and row not in rows for row in ledger.rows), "there were some"
    assert len({ledger.rows[i].digest for i in tried}) == len(tried)
    assert sum("finalists" in own for own in groups) == 1
    assert sample.finalists[0] in [one.row for one in sample.programs]


def test_a_name_of_a_baseline_stays_with_its_program() -> None:
    died = Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message="it died")
    rows = [
        SimpleNamespace(program=i, baseline=name, digest="a", compiled=None, profiled=None)
        for i, name in enumerate(["", "FSDP", "data parallel"])
    ]
    ledger: Any = SimpleNamespace(rows=rows, fitting=lambda indices: list(indices))
    picks = sampling._Picks(ledger)
    picks.add("top", [0])
    picks.settle()
    assert picks.untried() == [0]
    rows[0].profiled = died
    picks.add("baselines", [1, 2])
    picks.settle()
    (one,) = picks.chosen
    assert one == sampling.Chosen(row=1, groups=["top", "baselines"])
    assert rows[1].profiled is died and picks.untried() == [] and picks.running() == 0
    assert picks.standing([0, 1, 2]) == [1, 1, 1]


def test_a_small_space_is_taken_whole(
    kept: Store,
    calibration: pathlib.Path,
    never_compile: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling._Picks, "whole_space", lambda self, most: True)
    _, sample, ledger = chosen(kept, calibration, 0, sampling.Size(fitting=2, top=1, total=3))
    assert sample.whole
    assert {ledger.rows[one.row].program for one in sample.programs} == {
        row.program for row in ledger.rows
    }


@pytest.mark.parametrize(
    ("layouts", "programs", "most", "whole"),
    [(50, 3, 3, True), (50, 4, 3, False), (51, 3, 3, False), (1, 1, 48, True)],
)
def test_a_space_is_small_that_was_judged_whole_and_has_few_programs(
    layouts: int, programs: int, most: int, whole: bool
) -> None:
    """Of fifty candidates that the budget allows: two layouts may be one program."""
    rows = [types.SimpleNamespace(program=i % programs) for i in range(2 * programs)]
    space = types.SimpleNamespace(size=lambda: layouts)
    ledger = types.SimpleNamespace(
        subjects=[types.SimpleNamespace(space=space)],
        budget=autoshard.Budget(candidates=50),
        rows=rows,
    )
    picks: Any = types.SimpleNamespace(_state=ledger)
    assert sampling._Picks.whole_space(picks, most) is whole


def names_of(found: dict[str, Any]) -> list[str]:
    return [program["name"] for program in found["programs"]]


def _untimed(programs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of the programs but how long rung 1 took to say what it says."""
    return [
        {**program, "rung1": {k: v for k, v in program["rung1"].items() if k != "elapsed_s"}}
        for program in programs
    ]


@pytest.mark.slow
def test_a_case_goes_through_search_sample_and_report(
    kept: Store, calibration: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = autoshard.Budget(candidates=16, compiles=3, profiles=2, rounds=2)
    kept.runs.mkdir()
    kept.calibration.symlink_to(calibration)
    case = TinyCase()
    options: dict[str, Any] = {"scale": "small", "seed": 0, "budget": budget}
    task = Task(part="search", case="tiny", devices=8)
    searching.run(task, case, kept, **options)
    found = store.read(kept.result(task))
    assert found is not None and found["failed"] == "" and found["numerics"] == "exact"
    assert found["candidates"] >= 12 and not found["resumed"] and found["elapsed_s"]["all"] > 0
    assert json.loads(kept.plan(task).read_text())["candidate"] == found["plan"]
    assert not (kept.run_folder(task) / "search.jsonl").exists(), "it would answer the next search"

    task = Task(part="sample", case="tiny", devices=8)
    settings = opening.Settings(
        rounds=2, pair_limit_s=0.01, size=sampling.Size(fitting=2, top=1, total=6, at_once=2)
    )
    monkeypatch.setattr(pairs, "_NEAR", 1e9)
    monkeypatch.setattr(pairs, "_PROCESSES", (2, 2))
    searched_with = calibrated(sampling.target_of(task), calibration)
    slow_today = dataclasses.replace(
        searched_with, contract_flops_per_s=searched_with.contract_flops_per_s / 3
    )
    drawn: list[int] = []

    def calibrate(target: Target, draws: int) -> Constants:
        drawn.append(draws)
        return slow_today

    monkeypatch.setattr(opening, "calibrate", calibrate)
    raced, asked_on_rounds = timing.race, itertools.count()

    def raced_once(*of: Any, should_stop: Callable[[], bool], **more: Any) -> Any:
        def stop() -> bool:
            if next(asked_on_rounds) == 1:
                raise KeyboardInterrupt
            return should_stop()

        return raced(*of, should_stop=stop, **more)

    # Who stops it amid its rounds keeps those that are over, and their predictions.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(timing, "race", raced_once)
        measuring.run(task, case, kept, settings=settings, **options)
    assert missing(kept, retry=False) == [task] and drawn == [settings.draws]
    first = store.read(kept.run_folder(task) / "rounds.json")
    assert first is not None
    first["model_revision"] = MODEL_REVISION - 1  # its predictions stay; its programs are the same
    store.write(kept.run_folder(task) / "rounds.json", first)
    executables = kept.run_folder(task) / "executables"
    assert len(list(executables.iterdir())) >= len(first["programs"])
    (executables / first["programs"][0]["module"]).unlink()
    compiled: list[list[int]] = []
    compile_ = Compiling.compile

    def noted(self: Compiling, indices: list[int], share: float) -> None:
        compiled.append(indices)
        compile_(self, indices, share)

    monkeypatch.setattr(Compiling, "compile", noted)
    monkeypatch.setattr(sampling, "choose", None)
    monkeypatch.setattr(opening, "calibrate", None)
    paired, asked = measuring._paired, list[object]()

    def stopped(*of: Any) -> dict[str, Any]:
        asked.append(of)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return paired(*of)

    # Who stops it amid its pairs keeps its rounds, and the pairs that were done.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(measuring, "_paired", stopped)
        measuring.run(task, case, kept, settings=settings, **options)
    assert compiled == [[0]], "the others were there"
    left = store.read(kept.result(task))
    assert left is not None and [pair["failed"][:22] for pair in left["fresh"]] == [
        *("", "the sample was stopped", "the sample was stopped")
    ]
    assert missing(kept, retry=False) == [] and missing(kept, retry=True) == [task]
    assert [one["rounds_before"] for one in left["resumed"]] == [1]
    for before, after in zip(first["programs"], left["programs"], strict=True):
        assert set(before["rounds"]) == {0} and set(after["rounds"]) == {0, 1}
        assert after["samples_s"][: len(before["samples_s"])] == before["samples_s"]
        assert all(after[name] == before[name] for name in ("candidate", "rung1", "rung2"))
    assert not (kept.run_folder(task) / "rounds.json").exists()
    assert executables.exists()
    measuring.run(task, case, kept, settings=settings, **options)
    assert compiled[1:] == [[]] and not executables.exists()
    found = store.read(kept.result(task))
    assert found is not None and found["failed"] == ""
    assert found["programs"] == left["programs"] and found["fresh"][0] == left["fresh"][0]
    plan = next(p for p in found["programs"] if p["name"] == found["plan"])
    assert plan["place"] == 0 and "finalists" in plan["groups"]
    assert len(found["programs"]) >= 6
    assert all(set(p["rounds"]) == {0, 1} and not p["failure"] for p in found["programs"])
    assert len({pair["rival"] for pair in found["fresh"]} - {found["plan"]}) == 3
    assert all(not pair["failed"] and len(pair["first_s"]) >= 40 for pair in found["fresh"])
    assert all(len(pair["processes"]) == 2 for pair in found["fresh"])
    assert found["planned"] == plan["candidate"] and found["model_revision"] == MODEL_REVISION - 1
    # It is priced by the machine of its own hour, not by that of the search.
    assert drawn == [settings.draws] and Constants.from_json(found["constants"]) == slow_today

    # A pair that wants another process gets it; nothing else is measured again.
    monkeypatch.setattr(pairs, "_PROCESSES", (3, 3))
    monkeypatch.setattr(opening, "calibrate", None)
    asked_on = json.loads(kept.result(task).read_text())
    asked_on["fresh"][1] = {"rival": asked_on["fresh"][1]["rival"], "failed": "it died"}
    store.write(kept.result(task), asked_on)
    assert missing(kept, retry=False) == []
    assert missing(kept, retry=True) == [task]
    measuring.run(task, case, kept, settings=settings, **options)
    more = store.read(kept.result(task))
    assert more is not None and {k: v for k, v in more.items() if k != "fresh"} == {
        k: v for k, v in found.items() if k != "fresh"
    }
    for number, (before, after) in enumerate(zip(found["fresh"], more["fresh"], strict=True)):
        assert before["rival"] == after["rival"] and len(after["processes"]) == 3
        kept_on = after["first_s"][: len(before["first_s"])] == before["first_s"]
        assert kept_on == (number != 1)
    assert missing(kept, retry=True) == []
    other = TinyCase(width=128)
    kept.result(task).unlink()
    with pytest.raises(autoshard.PlanError, match=r"another model.*\n.*recorded"):
        monkeypatch.setattr(opening, "calibrate", calibrate)
        measuring.run(task, other, kept, settings=settings, **options)
    store.write(kept.result(task), found)

    results = report.load(kept, ["tiny", "absent"], [8], none)
    summary = report.summarise(results)
    row = summary["rows"][0]
    assert row["search"]["covered"] and row["sample"]["measured"] == len(found["programs"])
    assert row["sample"]["regret"] is not None
    assert row["hand"] is None and summary["rows"][1]["search"] is None
    store.write(kept.results / "summary.json", summary)  # has no NaN

    # Another model of cost gives other predictions of the same programs; their times stay.
    path = kept.result(task)
    stale = json.loads(path.read_text())
    for program in stale["programs"]:
        program["rung1"] = program["rung2"] = {"time_s": 1.0}
    store.write(path, stale)
    task = dataclasses.replace(task, part="predict")
    predicting.run(task, case, kept, **options)
    anew = store.read(path)
    assert anew is not None and anew["predicted"]["model_revision"] == MODEL_REVISION
    for before, after in zip(found["programs"], anew["programs"], strict=True):
        assert {k: v for k, v in after.items() if k[:4] != "rung"} == {
            k: v for k, v in before.items() if k[:4] != "rung"
        }
        for rung in ("rung1", "rung2"):
            assert after[rung]["time_s"] == pytest.approx(before[rung]["time_s"])
            assert after[rung]["peak_memory_bytes"] == before[rung]["peak_memory_bytes"]

    # Rung 1 alone compiles nothing; what rung 2 said stays, with the revision that said it.
    older = {**anew, "predicted": {**anew["predicted"], "model_revision": 7}}
    wrong = [{**program, "rung1": {"time_s": 1.0}} for program in anew["programs"]]
    store.write(path, {**older, "programs": wrong})
    with monkeypatch.context() as patch:
        patch.setattr(predicting, "Compiling", None)
        predicting.run(task, case, kept, compiles=False, **options)
        predicting.run(task, case, kept, compiles=False, **options)
    alone = store.read(path)
    assert alone is not None and _untimed(alone["programs"]) == _untimed(anew["programs"])
    assert alone["predicted"]["model_revision"] == MODEL_REVISION
    assert alone["predicted"]["rung2"]["model_revision"] == 7

    # The constants are the sample's, and this machine's where it has none: those are kept apart.
    constants = {**anew["constants"], "contract_flops_per_s": 1.0}
    del constants["folds_sums"]
    store.write(path, {**anew, "constants": constants})
    predicting.run(task, case, kept, **options)
    lacking = store.read(path)
    assert lacking is not None
    assert lacking["constants"] == constants and "borrowed" not in anew
    others = {"folds_sums": anew["constants"]["folds_sums"]}
    assert lacking["borrowed"] == {
        "machines": {"folds_sums": store.machine()},
        "constants": others,
    }
    for before, after in zip(anew["programs"], lacking["programs"], strict=True):
        for rung in ("rung1", "rung2"):
            assert after[rung]["time_s"] > 1000 * before[rung]["time_s"]

    # What was borrowed once is borrowed from no other machine the next time.
    with monkeypatch.context() as patch:
        patch.setattr(reopening, "machine", lambda: "another")
        patch.setattr(reopening, "calibrated", None)
        predicting.run(task, case, kept, **options)
    once_more = store.read(path)
    assert once_more is not None
    for name in ("constants", "constants_digest", "borrowed"):
        assert once_more[name] == lacking[name]
    lacking = once_more

    # Times are of programs as one compiler makes them.
    of_another = {**lacking, "versions": {**lacking["versions"], "jaxlib": "0.0.1"}}
    store.write(path, of_another)
    with pytest.raises(reopening.OtherProgramsError, match=r"as jaxlib 0\.0\.1 .*sample\.json"):
        predicting.run(task, case, kept, **options)
    assert store.read(path) == of_another
    store.write(path, lacking)

    # Nor is one without a prediction left out of the figures unseen.
    failed = Failure(stage=Stage.COMPILE, kind=Kind.CRASH, message="it died")
    with monkeypatch.context() as patch:
        patch.setattr(
            predicting.Compiling,
            "compile",
            lambda self, rows, share: [
                setattr(self._state.rows[i], "compiled", failed) for i in rows
            ],
        )
        with pytest.raises(predicting.UnpricedError, match=r"were measured and got no.*it died"):
            predicting.run(task, case, kept, **options)
    assert store.read(path) == lacking

    # A program that was never measured gets no prediction beside another one's time.
    anew["programs"][0]["module"] = "0" * 64
    store.write(path, anew)
    with pytest.raises(reopening.OtherProgramsError, match=r"1 of .* delete .*sample\.json"):
        predicting.run(task, case, kept, **options)
    assert store.read(path) == anew


def test_constants_that_a_sample_lacks_are_this_machines_and_others_are_left_out() -> None:
    here = dataclasses.replace(CONSTANTS, fresh_s_per_byte=2e-10)
    then = {**CONSTANTS.to_json(), "launch_s": 5e-6, "array_s": 1e-6}
    del then["fresh_s_per_byte"]
    sample: dict[str, Any] = {"constants": json.loads(json.dumps(then)), **store.seen_on()}
    used = reopening.completed(reopening._own(sample), here)
    assert used == dataclasses.replace(here, launch_s=5e-6)
    told = reopening.borrowed(sample, used)
    assert told["constants"] == {"fresh_s_per_byte": 2e-10}
    assert told["machines"] == {"fresh_s_per_byte": store.machine()}
    again = {**sample, "borrowed": told, "machine": "another"}
    assert reopening._own(again) == reopening._own(sample), "also elsewhere, from then on"


def test_a_sample_of_which_no_program_is_left_is_not_gone_on_with() -> None:
    now = dict.fromkeys(("scale", "seed", "rounds", "draws", "size"), 0)
    left = [{"failure": {"kind": "crash"}, "rounds": [0]}, {"failure": None, "rounds": []}]
    kept = {**now, "planned": {"layout": {}}, "programs": left, **store.seen_on()}
    nobody: Any = None
    assert opening.Opening.stopped(nobody, kept, {**now, "planned": {"layout": {}}}) is None


def test_predictions_are_made_anew_where_there_is_a_sample(kept: Store) -> None:
    store.write(kept.result(Task(part="sample", case="b", devices=8)), {"failed": ""})
    told: list[str] = []
    started: list[Task] = []

    def start(task: Task) -> str:
        started.append(task)
        return "its process ended with code 1"

    lost = running.predict_again(kept, ["a", "b"], [4, 8], start=start, tell=told.append)
    assert lost == started == [Task(part="predict", case="b", devices=8)]
    assert any("code 1" in text for text in told)


def test_a_process_that_fails_costs_its_own_pairs_alone(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "opened_runner", lambda *_: contextlib.nullcontext())
    asked: list[int] = []

    def fresh_pair(bench: object, *_: object, limit_s: float, seed: int) -> pairs.Comparison:
        asked.append(seed)
        if seed == 3:
            raise measuring.timing.MeasuringError("it died")
        return pairs.of_process([1.0, 1.01] * 10, [1.0] * 20)

    monkeypatch.setattr(measuring.timing, "fresh_pair", fresh_pair)

    def paired(begun: Any = (), seed: int = 0) -> dict[str, Any]:
        asked.clear()
        where: Any = SimpleNamespace(seed=seed)
        program: Any = None
        said.clear()
        return measuring._paired(where, program, program, opening.Settings(), begun, said.append)

    said: list[dict[str, Any]] = []
    some = paired()
    # Who stops it amid the processes of one pair keeps what these said, and is asked on.
    assert [one["processes"] for one in said] == [(20,), (20, 20)]
    assert all("stopped" in one["why"] and pairs.is_open(one) for one in said)
    assert pairs.parts_of(said[-1]) == pairs.parts_of(some)
    assert asked == [1, 2, 3] and some["why"] == "it died" and not some["failed"]
    assert some["processes"] == (20, 20) and not some["decided"] and pairs.is_open(some)
    # It is asked on where the sample was taken, and there alone.
    result = {"part": "sample", "failed": "", "fresh": [some], **store.seen_on()}
    assert store.is_unsettled(result)
    assert not store.is_unsettled({**result, "machine": "another"})
    assert not store.is_unsettled({**result, "versions": {"jaxlib": "0.0.1"}})
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PJRT_NPROC", "3")
        assert not store.is_unsettled(result) and store.seen_on()["threads"] == 3
    more = paired([*pairs.parts_of(some), pairs.of_process([1.0] * 20, [1.0] * 20)])
    assert asked == [4] and more["decided"] and len(more["processes"]) == 4
    assert not pairs.is_open(more)
    assert paired(seed=2) == {"failed": "it died"} and asked == [3]


def test_half_a_search_is_no_result(kept: Store, calibration: pathlib.Path) -> None:
    kept.runs.mkdir()
    kept.calibration.symlink_to(calibration)
    task = Task(part="search", case="tiny", devices=8)

    interrupted: list[autoshard.Event] = []

    def interrupt(event: autoshard.Event) -> None:
        if event.stage is Stage.PROFILE and not interrupted:
            interrupted.append(event)
            raise KeyboardInterrupt  # once: the search then ends with the best so far

    budget = autoshard.Budget(candidates=16, compiles=1, profiles=1, rounds=1)
    with pytest.raises(KeyboardInterrupt):
        searching.run(
            task, TinyCase(), kept, scale="small", seed=0, budget=budget, callbacks=(interrupt,)
        )
    assert store.read(kept.result(task)) is None
    assert not kept.plan(task).exists()
    assert (kept.run_folder(task) / "search.jsonl").exists()


def test_a_search_that_fails_is_a_result(kept: Store) -> None:
    class Broken(TinyCase):
        def workload(self) -> autoshard.Workload:
            raise RuntimeError("no such model")

    task = Task(part="search", case="tiny", devices=8)
    options: dict[str, Any] = {"scale": "small", "seed": 0, "budget": autoshard.Budget()}
    searching.run(task, Broken(), kept, **options)
    found = store.read(kept.result(task))
    assert found is not None and found["failed"] == "RuntimeError: no such model"
    sample = dataclasses.replace(task, part="sample")
    measuring.run(sample, Broken(), kept, settings=opening.Settings(), **options)
    said = store.read(kept.result(sample))
    assert said is not None and "no plan" in said["failed"]
    row = report.summarise(report.load(kept, ["tiny"], [8], none))["rows"][0]
    assert not row["search"]["covered"] and not row["sample"]["top1"]
