"""The tables of the benchmark; what misses its goal is red."""

from collections.abc import Mapping
from typing import Any

from experiments.fidelity_parts.goals import GOALS, Goal, shown
from experiments.fidelity_parts.report import MINIMAL, enough
from experiments.pages import Cell, Table


def all_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Every table of the report."""
    rows = summary["rows"]
    return [
        goals_table(summary),
        Table(
            title="Regret and the plan among what people write",
            heads=(
                "case",
                "devices",
                "programs",
                "not measured",
                "plan is",
                "regret",
                "95 %",
                "in top 3",
                "plan, best over DP",
                "hand met",
                "worst ratio, or those not met",
                "to DP or FSDP",
            ),
            rows=tuple(_regret_row(row) for row in rows),
        ),
        Table(
            title="Rank correlation with measured times: tau [95 %] (its share of the ceiling)",
            heads=(
                "case",
                "devices",
                "ceiling",
                "rung 1",
                "rung 2",
                "programs",
                "near: ceiling",
                "rung 1",
                "rung 2",
                "programs",
                "error rung 1",
                "error rung 2",
            ),
            rows=tuple(_rank_row(row) for row in rows),
        ),
        Table(
            title="Coverage and cost of the search",
            heads=(
                "case",
                "devices",
                "numerics",
                "candidates",
                "compiles",
                "profiles",
                "seconds",
                "tracing, calibration",
                "rung 1",
                "rung 2",
                "rung 3",
                "machine of the search",
                "date",
                "revision",
            ),
            rows=tuple(_cost_row(row) for row in rows),
        ),
    ]


def goals_table(summary: Mapping[str, Any]) -> Table:
    """Each figure beside its goal, then those that have none."""
    by_name = {goal.name: goal for goal in GOALS}
    rows = []
    for one in summary["goals"]:
        goal = by_name[one["name"]]
        done = f"{summary['done'][goal.part]} of {summary['cases']}"
        value = Cell(shown(one["value"], goal.style), red=not one["met"])
        rows.append((Cell(goal.text), value, Cell(goal.in_words()), Cell(done)))
    figures = summary["figures"]
    besides = (
        ("plan over the better of data parallel and FSDP, median", "data_or_fsdp_median", "ratio"),
        ("best program among the search's first 3, strictly", "best_in_top_3_strict", "percent"),
        (
            "rung 2: tau over its ceiling, within 1.5 times the best, where there is a share",
            "rung2_tau_near_share",
            "ratio",
        ),
        (
            "rung 1: tau over its ceiling, within 1.5 times the best, where there is a share",
            "rung1_tau_near_share",
            "ratio",
        ),
    )
    for text, name, style in besides:
        rows.append((Cell(text), Cell(shown(figures[name], style)), Cell(""), Cell("")))
    for text, name in (
        ("cases whose plan is itself a baseline", "plan_is_baseline"),
        ("of these data parallel or FSDP", "plan_is_data_or_fsdp"),
        ("hand layouts", "hand_count"),
        ("of these undecided, counted as missed", "hand_undecided"),
        ("of these new and not measured yet, counted as missed", "hand_lacking"),
        ("cases whose fresh pairs are undecided", "regret_undecided"),
        ("comparisons that fewer processes were asked about than are today", "pairs_open"),
        ("fewest programs measured for a case", "programs_least"),
        ("cases with three or more ranked programs within 1.5 times the best", "near_count"),
        ("of these with a ceiling of at least 0.7, and so a share", "near_share_count"),
    ):
        count = figures[name]
        rows.append((Cell(text), Cell("-" if count is None else str(count)), Cell(""), Cell("")))
    return Table(title="Goals", heads=("figure", "value", "goal", "cases done"), rows=tuple(rows))


def _goal(name: str) -> Goal:
    return next(goal for goal in GOALS if goal.name == name)


def _judged(value: float | None, name: str) -> Cell:
    """A figure of one case against the goal for the worst of them."""
    goal = _goal(name)
    return Cell(shown(value, goal.style), red=not goal.met(value))


def _head(row: Mapping[str, Any]) -> tuple[Cell, Cell]:
    return Cell(row["case"]), Cell(str(row["devices"]))


def _regret_row(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    sample, hand = row["sample"], row["hand"]
    cells = [*_head(row)]
    if sample is None:
        cells += [Cell("not run", red=True), *[Cell("")] * 6]
    elif sample["regret"] is None:
        cells += [Cell(sample["why"][:60] or "no fresh pairs", red=True), *[Cell("")] * 6]
    else:
        interval = f"{100 * sample['low']:.1f} to {100 * sample['high']:.1f} %"
        ups = [shown(sample[f"speed_up_{which}"], "ratio") for which in ("plan", "best")]
        cells += [
            Cell(_measured(sample), red=not enough(sample)),
            Cell(str(sample["failed"])),
            Cell(sample["plan_is"] or "its own"),
            _judged(sample["regret"], "regret_worst"),
            Cell(interval if sample["decided"] else f"{interval}, undecided", not sample["top1"]),
            Cell("yes" if sample["top3"] else "no", red=not sample["top3"]),
            Cell(", ".join(ups)),
        ]
    if hand is None:
        return (*cells, Cell("not run", red=True), Cell(""), Cell(""))
    if hand["why"]:
        return (*cells, Cell(hand["why"][:60], red=True), Cell(""), Cell(""))
    missed = hand["met"] < hand["count"]
    return (
        *cells,
        Cell(f"{hand['met']} of {hand['count']}", red=missed),
        Cell(_not_met(hand) or f"{shown(hand['worst'], 'ratio')} {hand['worst_layout']}", missed),
        Cell(shown(hand["data_or_fsdp"], "ratio")),
    )


def _measured(sample: Mapping[str, Any]) -> str:
    """How many programs were measured, and which kind is too few."""
    if sample["whole_space"]:
        return f"{sample['measured']}, all"
    few = [
        f"{sample[name]} {words}"
        for name, words in (("drawn", "drawn"), ("top", "of rung 1's best"))
        if sample[name] < MINIMAL[name]
    ]
    return f"{sample['measured']}" + (f" ({', '.join(few)})" if few else "")


def _not_met(hand: Mapping[str, Any]) -> str:
    """The layouts by hand that the plan does not meet; "" if there are none."""
    said = [
        f"{shown(one['ratio'], 'ratio')} {one['layout']}"
        + (" (undecided)" if one["verdict"] == "undecided" else "")
        for one in hand["not_met"]
    ]
    return "; ".join(said + [f"{hand['lacking']} not measured"] * bool(hand["lacking"]))


def _rank_row(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    sample = row["sample"]
    if sample is None:
        return (*_head(row), Cell("not run", red=True), *[Cell("")] * 9)
    cells = [*_head(row)]
    for kind in ("tau", "tau_near"):
        taus = {rung: sample.get(f"{rung}_{kind}") for rung in ("rung1", "rung2")}
        some = taus["rung2"] or taus["rung1"]
        cells.append(Cell(shown(some["ceiling"] if some else None, "ratio")))
        for rung, found in taus.items():
            if found is None:
                cells.append(Cell("-", red=kind == "tau"))
                continue
            interval = f"{found['low']:.2f} to {found['high']:.2f}"
            text = f"{found['tau']:.2f} [{interval}] ({shown(found['share'], 'ratio')})"
            met = _goal(f"{rung}_tau_share").met(found["share"])
            cells.append(Cell(text, red=kind == "tau" and not met))
        cells.append(Cell(str(some["count"]) if some else "-"))
    return (
        *cells,
        *(_judged(row[f"{rung}_error"], f"{rung}_error") for rung in ("rung1", "rung2")),
    )


def _cost_row(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    search = row["search"]
    if search is None:
        return (*_head(row), Cell("not run", red=True), *[Cell("")] * 11)
    if "numerics" not in search:
        return (*_head(row), Cell(search["why"][:60], red=True), *[Cell("")] * 11)
    seconds = search["elapsed_s"]
    whole = seconds["all"]
    shares = [
        Cell(f"{100 * seconds[rung] / whole:.0f} %" if whole and rung in seconds else "-")
        for rung in ("trace", "propagate", "compile", "profile")
    ]
    return (
        *_head(row),
        Cell(search["numerics"], red=not search["covered"]),
        *(Cell(str(search[name])) for name in ("candidates", "compiles", "profiles")),
        # A search that went on from a journal says what its last process took.
        Cell(f"{'more than ' if search['resumed'] else ''}{whole:.0f}"),
        *shares,
        Cell(search["machine"]),
        Cell(search["date"]),
        Cell(str(search["model_revision"])),
    )
