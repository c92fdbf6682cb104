"""Results of the benchmark made by hand, whose figures are known."""

from typing import Any

import numpy as np

PROVENANCE = {
    "devices": 8,
    "scale": "small",
    "seed": 0,
    "machine": "x86_64 Abacus",
    "date": "2026-01-01",
    "model_revision": 1,
}


def program(
    name: str,
    seconds: float,
    *,
    rounds: int = 8,
    noise: float = 0.0,
    groups: tuple[str, ...] = ("uniform",),
    baseline: str = "",
    place: int | None = None,
    compute_s: float | None = None,
    communication_s: float = 0.0,
    failure: str = "",
) -> dict[str, Any]:
    """A program that takes so long in every round, but for a drift that all share, and noise."""
    rng = np.random.default_rng(sum(map(ord, name)))
    compute_s = seconds if compute_s is None else compute_s
    said = {
        "time_s": compute_s + communication_s,
        "compute_s": compute_s,
        "communication_s": communication_s,
    }
    samples = [
        seconds * (1.0 + number / 4) * float(np.exp(noise * rng.standard_normal()))
        for number in range(rounds)
    ]
    return {
        "name": name,
        "groups": list(groups),
        "baseline": baseline,
        "place": place,
        "candidate": {},
        "rung1": dict(said),
        "rung2": dict(said),
        "failure": {"stage": "profile", "kind": failure, "message": ""} if failure else None,
        "samples_s": [] if failure else samples,
        "rounds": [] if failure else list(range(rounds)),
    }


def sample(
    programs: list[dict[str, Any]],
    *,
    case: str = "mlp",
    family: str = "mlp",
    plan: str = "a",
    ratio: float = 1.0,
    half_width: float = 0.005,
    decided: bool = True,
    rivals: tuple[str, ...] = ("b",),
) -> dict[str, Any]:
    """What the sample part writes; `ratio` is that of the fresh pairs, plan over first rival.

    It is a little less against each further one.
    """
    return {
        **PROVENANCE,
        "part": "sample",
        "case": case,
        "family": family,
        "failed": "",
        "plan": plan,
        "whole_space": True,
        "fresh": [
            {
                "rival": rival,
                "failed": "",
                "ratio": ratio - 0.01 * place,
                "low": ratio - 0.01 * place - half_width,
                "high": ratio - 0.01 * place + half_width,
                "decided": decided or place == 0 < len(rivals) - 1,
                "first_s": [],
                "second_s": [],
                "processes": [0] * 4,
            }
            for place, rival in enumerate(rivals)
        ],
        "programs": programs,
    }


def search(plan_is: str = "", numerics: str = "exact") -> dict[str, Any]:
    """What the search part writes."""
    return {
        **PROVENANCE,
        "failed": "",
        "ended": "finished",
        "numerics": numerics,
        "plan_is": plan_is,
        "candidates": 600,
        "compiles": 16,
        "profiles": 12,
        "resumed": False,
        "elapsed_s": {"propagate": 30.0, "compile": 60.0, "profile": 10.0, "all": 100.0},
    }


def hand(processes: int = 4, **ratios: float | None) -> dict[str, Any]:
    """What the hand part writes: layout (underscores for spaces) -> ratio, None for undecided."""
    rows = []
    for name, ratio in ratios.items():
        verdict = "undecided" if ratio is None else "met" if ratio <= 1.0 else "missed"
        compared = {"low": ratio, "high": ratio, "decided": ratio is not None}
        compared |= {"first_s": [], "second_s": [], "processes": [0] * processes}
        rows.append(
            {"layout": name.replace("_", " "), "ratio": ratio, "verdict": verdict, **compared}
        )
    return {**PROVENANCE, "failed": "", "rows": rows}
