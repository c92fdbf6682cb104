"""Write what `plan_pod` and `rung_agreement` found into docs/pods.md.

Question: for every model and target, how does the plan compare with each layout that people write
  by hand, what did the search cost, and how well does rung 1 agree with rung 2?
Command: python -m experiments.pod_page
Cost: none; it reads results/plan_pod, results/rung_agreement and results/search_growth.
Expected: the tables of docs/pods.md anew; what misses a goal is red.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from autoshard.records.words import mebibytes, seconds
from experiments.pages import Cell, Table, as_markdown, put_into

PAIRS = tuple(
    (model, target)
    for model in ("llama3-8b", "mixtral")
    for target in ("h100:8x8", "v5e:16x16", "v5p:4x4x4")
)
"""What every table should be over."""

SECONDS: dict[tuple[str, str, bool], dict[str, float]] = {
    ("llama3-8b", "h100:8x8", True): {"with_imports": 60.0},
    ("llama3-8b", "h100:8x8", False): {"with_imports": 180.0},
    ("llama3-8b", "v5p:4x4x4", True): {"propagate": 20.0, "with_imports": 360.0},
}
"""(model, target, layers scanned) -> goals for the search on 2 cores: rung 1, and in all."""

COMPILES = 10
"""The most real compilations that a search may take."""

_RESULTS = flags.DEFINE_string("results", "results", "Folder of the results.")
_PAGE = flags.DEFINE_string("page", "docs/pods.md", "The page.")


def main(argv: list[str]) -> None:
    del argv
    results = pathlib.Path(_RESULTS.value)
    put_into(pathlib.Path(_PAGE.value), as_markdown(all_tables(results)))


def all_tables(results: pathlib.Path) -> list[Table]:
    """Every table, of what stands in the folder of the results."""
    plans = _read(results / "plan_pod")
    shown = [by_hand(p) for p in plans if "by_hand" in p]
    grown = [(part, results / "search_growth" / f"{part}.json") for part in ("devices", "layers")]
    return [
        summary(plans),
        *shown,
        agreement(_read(results / "rung_agreement")),
        *(growth(part, json.loads(path.read_text())) for part, path in grown if path.exists()),
    ]


def _read(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _name(figures: Mapping[str, Any]) -> str:
    kind = "" if figures.get("scanned", True) else ", layers unrolled"
    others = "".join(f", {_SIZES[name].format(n)}" for name, n in _overrides(figures).items())
    return f"{figures['model']} on {figures['target']}{kind}{others}"


_SIZES = {"batch_size": "batch of {}", "layers": "{} layers"}


def _overrides(figures: Mapping[str, Any]) -> Mapping[str, int]:
    """Where a run is not of the full size; results without a word on it are."""
    found: Mapping[str, int] = figures.get("overrides", {})
    return found


def _plan_is(figures: Mapping[str, Any]) -> str:
    """The baseline a plan is, and its constraints where that is not the usual one."""
    words = figures["layout"].get("constraints")
    return (figures["baseline"] or "none of them") + (f" (constraints: {words})" if words else "")


def _compared(figures: Mapping[str, Any]) -> str:
    """Layouts with a time by both rungs; and those of rung 1's best with none by rung 2."""
    lacking = figures.get("without_time", 0)
    return str(figures["compared"]) + (f", and {lacking} without a time" if lacking else "")


_PARTS = {"propagate": "rung 1", "with_imports": "in all"}


def summary(plans: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each model and target; "over FSDP" is hand FSDP's step over the plan's."""
    rows: list[tuple[Cell, ...]] = []
    for p in plans:
        rows_by_hand = p.get("by_hand", [])
        verdicts = [row["verdict"] for row in rows_by_hand]
        fsdp: Mapping[str, Any] = next((row for row in rows_by_hand if row["name"] == "fsdp"), {})
        missed = verdicts.count("missed")
        counts = f"{verdicts.count('met')}, {verdicts.count('equal')}, {missed}"
        spent = p["elapsed_s"]
        full = not _overrides(p)
        goals = SECONDS.get((p["model"], p["target"], p["scanned"]), {}) if full else {}
        late = p.get("resumed", False) or any(spent[k] > limit for k, limit in goals.items())
        said = ", ".join(f"{_PARTS[k]} {limit:g}" for k, limit in goals.items())
        rows.append(
            (
                Cell(_name(p)),
                Cell(_plan_is(p)),
                Cell(seconds(p["predicted_s"])),
                Cell(mebibytes(p["peak_bytes"])),
                Cell(f"{1 / fsdp['ratio']:.3f}" if "ratio" in fsdp else "-"),
                Cell(counts if verdicts else "not compared", missed > 0),
                Cell(f"{p['candidates']}, {p['compiles']}", p["compiles"] > COMPILES),
                Cell(
                    f"{spent['propagate']:.0f} + {spent['compile']:.0f} ="
                    f" {spent['with_imports']:.0f} s" + (f" (goal: {said})" if said else ""),
                    late,
                ),
                Cell(f"{p['compiler']}, {p['date']}"),
            )
        )
    own = sum(not p["baseline"] for p in plans)
    rows.append(
        (Cell("plans that are no baseline"), Cell(f"{own} of {len(plans)}"), *[Cell("")] * 7)
    )
    return Table(
        title="Plans",
        heads=(
            "model and target",
            "the plan is",
            "predicted step",
            "peak memory",
            "times as fast as hand FSDP",
            "hand layouts met, equal, missed",
            "candidates, compiles",
            "rung 1 + rung 2 = in all",
            "compiler, date",
        ),
        rows=tuple(rows),
    )


def by_hand(plan: Mapping[str, Any]) -> Table:
    """Every hand layout of one model and target."""
    return Table(
        title=f"By hand: {_name(plan)}",
        heads=("hand layout", "step", "peak memory", "plan / hand", "verdict"),
        rows=tuple(
            (
                Cell(row["name"]),
                Cell(seconds(row.get("time_s"))),
                Cell(mebibytes(row.get("peak_memory_bytes"))),
                Cell(f"{row['ratio']:.4f}" if "ratio" in row else "-"),
                Cell(row["verdict"], row["verdict"] == "missed"),
            )
            for row in plan.get("by_hand", [])
        ),
    )


def growth(part: str, figures: Mapping[str, Any]) -> Table:
    """CPU seconds of rung 1 for each number of devices or layers."""
    return Table(
        title=f"How rung 1's cost grows with {part}",
        heads=(part, "analysis", "within 2 %, analysis included", "a layout", "layouts"),
        rows=tuple(
            (
                Cell(str(run[part])),
                Cell(f"{run['ready_s']:.1f} s"),
                Cell(f"{run['within_s']:.1f} s"),
                Cell(f"{run['total_s'] / run['judged']:.2f} s"),
                Cell(str(run["judged"])),
            )
            for run in figures["runs"]
        ),
    )


def agreement(found: Sequence[Mapping[str, Any]]) -> Table:
    """Kendall's tau of rung 1 with rung 2, its 95 % interval, and what rung 1 rejected."""

    def tau(figures: Mapping[str, Any], of: str, goal: float | None) -> Cell:
        one = figures[f"tau_{of}"]
        text = f"{one['tau']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
        return Cell(text, goal is not None and one["tau"] < goal)

    done = {(f["model"], f["target"]) for f in found if not _overrides(f)}
    lacking = [pair for pair in PAIRS if pair not in done]
    return Table(
        title="Rung 1 against rung 2",
        heads=(
            "model and target",
            "layouts compared",
            "time (goal 0.8)",
            "without communication",
            "peak memory (goal 0.9)",
            "rejected, wrongly",
            "compiler, date",
        ),
        rows=tuple(
            (
                Cell(_name(f)),
                Cell(_compared(f)),
                tau(f, "time_s", 0.8),
                tau(f, "compute_s", None),
                tau(f, "peak_memory_bytes", 0.9),
                Cell(f"{f['rejected']}, {f['wrongly_rejected']}", f["wrongly_rejected"] > 0),
                Cell(f"{f['compiler']}, {f['date']}"),
            )
            for f in found
        )
        + tuple(
            (Cell(f"{model} on {target}"), Cell("not run", True), *[Cell("")] * 5)
            for model, target in lacking
        ),
    )


if __name__ == "__main__":
    app.run(main)
