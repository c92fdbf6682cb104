"""The page of pods: what stands there is what the results say, and what is missed is red."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from experiments import pages, pod_page

ROOT = pathlib.Path(__file__).parents[2]


def test_the_page_is_of_the_results() -> None:
    made = pages.as_markdown(pod_page.all_tables(ROOT / "results"))
    assert made in (ROOT / "docs" / "pods.md").read_text(encoding="utf-8"), (
        "python -m experiments.pod_page"
    )


@pytest.fixture
def red(tmp_path: pathlib.Path) -> Callable[[dict[str, Any]], list[str]]:
    """What is red in the tables of one plan."""
    folder = tmp_path / "plan_pod"
    folder.mkdir()

    def red(figures: dict[str, Any]) -> list[str]:
        (folder / "one.json").write_text(json.dumps(figures), encoding="utf-8")
        plans, rows, *_ = pod_page.all_tables(tmp_path)
        return [cell.text for row in (*plans.rows, *rows.rows) for cell in row if cell.red]

    return red


def recorded(name: str) -> dict[str, Any]:
    path = ROOT / "results" / "plan_pod" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_what_is_missed_is_red(red: Callable[[dict[str, Any]], list[str]]) -> None:
    figures = recorded("mixtral-v5e-16x16")
    assert red(figures) == []
    figures["by_hand"][1]["verdict"] = "missed"
    met = [row["verdict"] for row in figures["by_hand"]].count("met")
    assert red(figures) == [f"{met}, 0, 1", "missed"]


def test_a_search_that_takes_longer_than_its_goal_is_red(
    red: Callable[[dict[str, Any]], list[str]],
) -> None:
    figures = recorded("llama3-8b-h100-8x8") | {"by_hand": []}
    seconds = figures["elapsed_s"]
    figures["elapsed_s"] = {**seconds, "with_imports": 59.0}
    assert red(figures) == []
    assert "goal" in red({**figures, "resumed": True})[0]  # its time says nothing
    assert red({**figures, "compiles": 11}) == [f"{figures['candidates']}, 11"]
    figures["elapsed_s"] = {**seconds, "with_imports": 61.0}
    (late,) = red(figures)
    assert "= 61 s (goal: in all 60)" in late


def test_another_size_is_not_taken_for_the_full_model(tmp_path: pathlib.Path) -> None:
    small = {"overrides": {"batch_size": 8, "layers": 4}}
    for folder in ("plan_pod", "rung_agreement"):
        (tmp_path / folder).mkdir()
        path = ROOT / "results" / folder / "llama3-8b-h100-8x8.json"
        figures = json.loads(path.read_text(encoding="utf-8")) | small
        (tmp_path / folder / "one.json").write_text(json.dumps(figures), encoding="utf-8")
    plans, by_hand, agreement = pod_page.all_tables(tmp_path)
    name = "llama3-8b on h100:8x8, batch of 8, 4 layers"
    assert plans.rows[0][0].text == name and by_hand.title == f"By hand: {name}"
    assert "goal" not in plans.rows[0][7].text, "the goals are for the full model"
    compared = [(row[0].text, row[1].text) for row in agreement.rows]
    assert compared[0][0] == name
    assert ("llama3-8b on h100:8x8", "not run") in compared


def test_layouts_without_a_time_are_told() -> None:
    path = ROOT / "results" / "rung_agreement" / "llama3-8b-h100-8x8.json"
    figures = json.loads(path.read_text(encoding="utf-8"))
    ((_, compared, *_), *_) = pod_page.agreement([{**figures, "without_time": 3}]).rows
    assert compared.text == f"{figures['compared']}, and 3 without a time"


def test_what_was_not_compared_says_so(tmp_path: pathlib.Path) -> None:
    table = pod_page.agreement([])
    assert [row[0].text for row in table.rows] == [f"{m} on {t}" for m, t in pod_page.PAIRS]
    assert all(row[1].red for row in table.rows)


def test_the_time_since_the_start_holds_what_came_before_main() -> None:
    code = (
        "import time; time.sleep(0.3); from experiments.since_start import since_start_s;"
        "print(since_start_s())"
    )
    said = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True))
    assert 0.3 <= said < 3600, "seconds, and from its own start on"
