"""From the JSON files of the parts to the figures of the benchmark. Pure functions.

Nothing is left out for being bad: what failed, what is undecided and what was not measured counts
as missed, and a figure whose part has not been run for every case meets no goal.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.records.rounds import by_round
from autoshard.target.cost import Correction
from experiments import pairs
from experiments.fidelity_parts import leave_out, ranks, regret
from experiments.fidelity_parts.goals import judged
from experiments.fidelity_parts.leave_out import Observation
from experiments.fidelity_parts.sampling import DRAWN
from experiments.fidelity_parts.store import (
    PARTS,
    Layouts,
    Store,
    Task,
    is_of_another_plan,
    lacking,
    read,
)

Key = tuple[str, int]
"""Case and number of devices."""

Parts = Mapping[str, dict[str, Any] | None]
"""Part -> what its file holds, None where there is none."""

RANKED = {"top", *DRAWN}

MINIMAL = {"measured": 48, "drawn": 30, "top": 10}
"""Programs to be measured of a case, unless its space has fewer: in all, drawn, rung 1's best."""


def load(
    store: Store, cases: Sequence[str], devices: Sequence[int], layouts: Layouts
) -> dict[Key, Parts]:
    """Every part of every case that there should be; one of another plan counts as not run.

    Of the pairs by hand those with today's layouts; `lacking` names layouts that have none.
    """

    def of_today(task: Task) -> dict[str, Any] | None:
        found = read(store.result(task))
        if not found or is_of_another_plan(found, store.planned(task)):
            return None
        if task.part != "hand" or found["failed"]:
            return found
        names = layouts(task.case, task.devices)
        rows = [row for row in found["rows"] if row["layout"] in names]
        return {**found, "rows": rows, "lacking": lacking(found, names)}

    return {
        (case, count): {part: of_today(Task(part=part, case=case, devices=count)) for part in PARTS}
        for case in cases
        for count in devices
    }


def summarise(results: Mapping[Key, Parts]) -> dict[str, Any]:
    """All figures: one row for each case, and the figures over all with their goals."""
    observed = {rung: _observations(results, rung) for rung in ("rung1", "rung2")}
    errors = {
        rung: {
            (case, count): error
            for count, own in by_devices.items()
            for case, error in leave_out.errors(own).items()
        }
        for rung, by_devices in observed.items()
    }
    rows = [
        {
            "case": case,
            "devices": count,
            "search": search_row(parts.get("search")),
            "hand": hand_row(parts.get("hand")),
            "sample": sample_row(parts.get("sample")),
            **{f"{rung}_error": found.get((case, count)) for rung, found in errors.items()},
        }
        for (case, count), parts in results.items()
    ]
    done = {part: sum(bool(parts.get(part)) for parts in results.values()) for part in PARTS}
    incomplete = [part for part, n in done.items() if n < len(results)]
    figures = figures_of(rows)
    return {
        "cases": len(results),
        "done": done,
        "figures": figures,
        "goals": [
            {"name": j.goal.name, "value": j.value, "limit": j.goal.limit, "met": j.met}
            for j in judged(figures, incomplete)
        ],
        "factors": {
            rung: {
                str(count): {f: _pair(c) for f, c in leave_out.factors_without(own).items()}
                for count, own in by_devices.items()
            }
            for rung, by_devices in observed.items()
        },
        "rows": rows,
    }


def search_row(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Coverage and cost of one search; None where it was not run."""
    if found is None:
        return None
    if found["failed"]:
        return {"covered": False, "why": found["failed"]}
    # "relative" is agreement with another sharded program, where the unsharded one does not fit.
    covered = found["ended"] == "finished" and found["numerics"] == "exact"
    names = (
        *("numerics", "plan_is", "candidates", "compiles", "profiles", "elapsed_s", "resumed"),
        *("machine", "date", "model_revision"),
    )
    return {"covered": covered, "why": "", **{name: found[name] for name in names}}


def hand_row(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The plan against the hand layouts of one case; None where it was not run."""
    if found is None:
        return None
    if found["failed"]:
        return {"count": 0, "met": 0, "why": found["failed"], "worst": None, "data_or_fsdp": None}
    rows, absent = found["rows"], found.get("lacking", [])
    ratios = {row["layout"]: row["ratio"] for row in rows if row["ratio"] is not None}
    plain = [ratio for layout, ratio in ratios.items() if _is_data_or_fsdp(layout)]
    return {
        "count": len(rows) + len(absent),
        "met": sum(row["verdict"] == "met" for row in rows),
        "undecided": sum(row["verdict"] == "undecided" for row in rows),
        "lacking": len(absent),
        "open": sum(map(pairs.is_open, rows)),
        "why": "",
        "not_met": [
            {name: row[name] for name in ("layout", "ratio", "verdict")}
            for row in rows
            if row["verdict"] != "met"
        ],
        "worst": max(ratios.values(), default=None),
        "worst_layout": max(ratios, key=lambda name: ratios[name], default=""),
        # The better of the two is the one that the plan's ratio is larger to.
        "data_or_fsdp": max(plain, default=None),
    }


def _is_data_or_fsdp(layout: str) -> bool:
    return layout == "data parallel" or (layout.startswith("fsdp") and " x " not in layout)


def sample_row(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Regret and rank correlation of one case; None where it was not measured."""
    if found is None:
        return None
    if found["failed"]:
        return {"why": found["failed"], "programs": 0, "measured": 0, **regret.regret(())}
    programs = {p["name"]: p for p in found["programs"]}
    tables = tables_of(found)
    measured = ranks.times(tables)
    places = {name: p["place"] for name, p in programs.items()}
    figures = regret.regret(found["fresh"])
    own = figures["regret"]
    parallel = [measured[n] for n in measured if programs[n]["baseline"] == "data parallel"]
    plan, dp_s = measured.get(found["plan"]), min(parallel, default=None)
    top = regret.best_in_top(places, measured, tables, found["fresh"])
    return {
        "why": next((p["failed"] for p in found["fresh"] if p["failed"]), ""),
        "programs": len(programs),
        "measured": len(measured),
        **{
            name: sum(bool(groups & set(programs[one]["groups"])) for one in measured)
            for name, groups in (("drawn", set(DRAWN)), ("top", {"top"}))
        },
        "too_large": sum((p["failure"] or {}).get("kind") == "oom" for p in programs.values()),
        "failed": len(programs) - len(measured),
        "whole_space": found["whole_space"],
        "plan_is": programs[found["plan"]]["baseline"],
        **figures,
        "open": sum(map(pairs.is_open, found["fresh"])),
        "top3_strict": top["strict"],
        "top3": top["tied"],
        "speed_up_plan": dp_s / plan if dp_s and plan else None,
        "speed_up_best": dp_s / min(measured.values()) if dp_s else None,
        "speed_up_share": None if own is None else 1.0 / (1.0 + own),
        **{f"{rung}_tau": tau_of(found, rung) for rung in ("rung1", "rung2")},
        **{f"{rung}_tau_near": tau_of(found, rung, near=True) for rung in ("rung1", "rung2")},
    }


def enough(sample: Mapping[str, Any]) -> bool:
    """Whether as many programs were measured as should be, or all that there are and fit."""
    every = sample["programs"] - sample.get("too_large", 0)
    whole = sample.get("whole_space", False) and sample["measured"] == every
    return whole or all(sample.get(name, 0) >= least for name, least in MINIMAL.items())


def tables_of(found: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The rounds of every program that was measured."""
    return {
        p["name"]: by_round(p["samples_s"], p["rounds"])
        for p in found["programs"]
        if p["failure"] is None
    }


def tau_of(found: Mapping[str, Any], rung: str, near: bool = False) -> dict[str, Any] | None:
    """Rank correlation over the sample and rung 1's best; what else was measured is left out.

    None too where the rung says nothing of a program that ran: none is dropped.

    Args:
      near: only over those within `ranks.NEAR` times the fastest that was measured.
    """
    if _is_silent(found, rung):
        return None
    ranked = [p for p in found["programs"] if RANKED & set(p["groups"]) and _seconds(p, rung)]
    names = {p["name"] for p in ranked}
    tables = tables_of(found)
    if near:
        names &= set(ranks.near(ranks.times(tables)))
    tables = {name: table for name, table in tables.items() if name in names}
    return ranks.correlation({p["name"]: p[rung]["time_s"] for p in ranked}, tables)


def observations(found: Mapping[str, Any], rung: str) -> list[Observation]:
    """What a rung predicts of each measured program of a case; [] if it is silent on one."""
    if _is_silent(found, rung):
        return []
    measured = ranks.times(tables_of(found))
    return [
        Observation(
            family=found["family"],
            case=found["case"],
            name=p["name"],
            compute_s=p[rung]["compute_s"],
            communication_s=p[rung]["communication_s"],
            measured_s=measured[p["name"]],
        )
        for p in found["programs"]
        if p["name"] in measured and _seconds(p, rung)
    ]


def _is_silent(found: Mapping[str, Any], rung: str) -> bool:
    """Whether a program ran of which a rung says no time."""
    return any(_seconds(p, rung) is None for p in found["programs"] if p["failure"] is None)


def _seconds(program: Mapping[str, Any], rung: str) -> float | None:
    said = program[rung]
    return said.get("time_s") if said else None


def _observations(results: Mapping[Key, Parts], rung: str) -> dict[int, list[Observation]]:
    found: dict[int, list[Observation]] = {}
    for (_, count), parts in results.items():
        sample = parts.get("sample")
        if sample and not sample["failed"]:
            found.setdefault(count, []).extend(observations(sample, rung))
    return found


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all cases. What has no value counts as the worst there is."""
    searches = [row["search"] for row in rows if row["search"]]
    hands = [row["hand"] for row in rows if row["hand"]]
    samples = [row["sample"] for row in rows if row["sample"]]
    of_sample = [row for row in rows if row["sample"]]
    regrets = [_or(s["regret"], math.inf) for s in samples]
    found: dict[str, Any] = {
        "coverage": _share([s["covered"] for s in searches]),
        "hand_count": sum(h["count"] for h in hands),
        "hand_undecided": sum(h.get("undecided", 0) for h in hands),
        "hand_lacking": sum(h.get("lacking", 0) for h in hands),
        # Without a plan there is nothing to compare: missed once.
        "hand_met": _over(
            sum(h["met"] for h in hands), sum(h["count"] or bool(h["why"]) for h in hands)
        ),
        "data_or_fsdp_median": _median(
            [h["data_or_fsdp"] for h in hands if h["data_or_fsdp"] is not None]
        ),
        "plan_is_baseline": sum(bool(_baseline(row)) for row in rows),
        "plan_is_data_or_fsdp": sum(_is_data_or_fsdp(_baseline(row).lower()) for row in rows),
        "regret_median": _median(regrets),
        "regret_worst": _finite(max(regrets, default=math.inf)),
        "regret_undecided": sum(not s["decided"] for s in samples),
        "pairs_open": sum(found.get("open", 0) for found in (*hands, *samples)),
        "best_in_top_3": _share([s.get("top3", False) for s in samples]),
        "best_in_top_3_strict": _share([s.get("top3_strict", False) for s in samples]),
        "top_1": _share([s["top1"] for s in samples]),
        "speed_up_share_worst": min(
            (_or(s.get("speed_up_share"), 0.0) for s in samples), default=None
        ),
        "programs_least": min((s["measured"] for s in samples), default=None),
        "programs_enough": _share([enough(s) for s in samples]),
    }
    for rung in ("rung1", "rung2"):
        taus = [s.get(f"{rung}_tau") for s in samples]
        found[f"{rung}_tau"] = _median([t["tau"] if t else 0.0 for t in taus])
        found[f"{rung}_tau_share"] = _median([_or(t["share"], 0.0) if t else 0.0 for t in taus])
        # Where hardly anything is near the best, or all of it is equal, there is nothing to rank.
        near = [t for s in samples if (t := s.get(f"{rung}_tau_near"))]
        found[f"{rung}_tau_near_share"] = _median(
            [t["share"] for t in near if t["share"] is not None]
        )
        found["near_count"] = len(near)
        found["near_share_count"] = sum(t["share"] is not None for t in near)
        found[f"{rung}_error"] = _median([_or(row[f"{rung}_error"], math.inf) for row in of_sample])
    seconds = [s["elapsed_s"] for s in searches if "elapsed_s" in s]
    for name in ("candidates", "compiles", "profiles"):
        found[f"{name}_median"] = _median([s[name] for s in searches if name in s])
    for name in ("all", "propagate", "compile", "profile"):
        found[f"{name}_s_median"] = _median([s.get(name, 0.0) for s in seconds])
    return found


def _baseline(row: Mapping[str, Any]) -> str:
    """The baseline that the plan is itself, by the search or by the program that was measured."""
    parts = (row["search"] or {}, row["sample"] or {})
    return next((part["plan_is"] for part in parts if part.get("plan_is")), "")


def _pair(factors: Correction) -> list[float]:
    return [factors.compute, factors.communication]


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _share(said: Sequence[bool]) -> float | None:
    return _over(sum(said), len(said))


def _over(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _median(values: Sequence[float]) -> float | None:
    return _finite(statistics.median(values)) if values else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
