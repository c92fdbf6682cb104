"""The page of pods: what stands there is what the results say, and what is missed is red."""

import json
import pathlib

from experiments import pages, pod_page

ROOT = pathlib.Path(__file__).parents[2]


def test_the_page_is_of_the_results() -> None:
    made = pages.as_markdown(pod_page.all_tables(ROOT / "results"))
    assert made in (ROOT / "docs" / "pods.md").read_text(encoding="utf-8"), (
        "python -m experiments.pod_page"
    )


def test_what_is_missed_is_red(tmp_path: pathlib.Path) -> None:
    source = ROOT / "results" / "plan_pod" / "mixtral-v5e-16x16.json"
    figures = json.loads(source.read_text(encoding="utf-8"))
    folder = tmp_path / "plan_pod"
    folder.mkdir()
    counts = []
    for verdict in ("met", "missed"):
        figures["by_hand"][1]["verdict"] = verdict
        (folder / "one.json").write_text(json.dumps(figures), encoding="utf-8")
        plans, rows, *_ = pod_page.all_tables(tmp_path)
        counts.append([cell.text for row in (*plans.rows, *rows.rows) for cell in row if cell.red])
    met = [row["verdict"] for row in figures["by_hand"]].count("met")
    assert counts == [[], [f"{met}, 0, 1", "missed"]]
