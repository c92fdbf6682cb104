"""How far two rungs agree: points, rankings, and where sampled layouts come from."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate, Failure, Stage
from autoshard.space.baselines import baselines
from autoshard.space.moves import moves
from autoshard.space.space import Space
from autoshard.tuner.promotion import DEFAULT_LOWER_BOUND, surely_too_large
from autoshard.tuner.state import Row

MEASURES = ("time_s", "compute_s", "communication_s", "peak_memory_bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate as both rungs see it."""

    group: str  # "top", "uniform", "baselines" or "best"
    row: Row
    fits: bool  # by rung 2

    @property
    def pair(self) -> tuple[Estimate, Estimate] | None:
        one, two = self.row.propagated, self.row.compiled
        return (one, two) if isinstance(one, Estimate) and isinstance(two, Estimate) else None

    def memory(self, usable_bytes: int) -> tuple[int, int] | None:
        """Peaks by both rungs; None where one says nothing of it.

        Args:
          usable_bytes: the compiler's own limit; it refuses more, and says what is missing.
        """
        one, two = self.row.propagated, self.row.compiled
        if not isinstance(one, Estimate):
            return None
        if isinstance(two, Estimate):
            return one.peak_memory_bytes, two.peak_memory_bytes
        if two is None or two.stage is not Stage.COMPILE or two.missing_bytes is None:
            return None
        return one.peak_memory_bytes, usable_bytes + two.missing_bytes


def walk(best: Sequence[Candidate], space: Space, rng: random.Random) -> Candidate | None:
    """Up to four decisions away from one of the best, or from a baseline where there are none."""
    starts = [c for c in best if c.knobs == space.knobs]
    starts = starts or [b.candidate for b in baselines(space)]
    here = rng.choice(starts)
    for _ in range(rng.randint(1, 4)):
        near = list(moves(space, here))
        rng.shuffle(near)
        here = next((c for c in near if space.contains(c) is None), here)
    return here


def summary(points: Sequence[Point], limit_bytes: int, usable_bytes: int) -> dict[str, Any]:
    """What the points say; taus over all that fit, and the ten best whether they fit or not.

    What the compiler refuses as too large has a peak and no time, and what it gave no answer of has
    neither: `without_time` and `without_memory` count what the taus are not over.

    Args:
      limit_bytes: what a device may use, headroom taken off.
      usable_bytes: what a device may use by the compiler.
    """
    chosen = [
        p for p in points if isinstance(p.row.propagated, Estimate) and (p.fits or p.group == "top")
    ]
    pairs = [p.pair for p in chosen if p.pair]
    compared: dict[str, list[tuple[float, float]]] = {
        measure: [(getattr(a, measure), getattr(b, measure)) for a, b in pairs]
        for measure in MEASURES
    }
    peaks = [found for p in chosen if (found := p.memory(usable_bytes))]
    compared["peak_memory_bytes"] = [(float(a), float(b)) for a, b in peaks]
    top = [p for p in points if p.group == "top"]
    rejected = [
        p
        for p in points
        if isinstance(one := p.row.propagated, Failure)
        or surely_too_large(one, limit_bytes, DEFAULT_LOWER_BOUND)
    ]
    return {
        "compared": len(pairs),
        "without_time": len(chosen) - len(pairs),
        "without_memory": len(chosen) - len(peaks),
        "fitting": sum(p.fits for p in points if p.group != "top"),
        "compiled": len(points),
        "failed": sum(isinstance(p.row.compiled, Failure) for p in points),
        **{
            f"tau_{measure}": tau([a for a, _ in both], [b for _, b in both])
            for measure, both in compared.items()
        },
        "ratios": {
            measure: _spread([a / b for a, b in both])
            for measure, both in compared.items()
            if all(b for _, b in both)
        },
        "rejected": len(rejected),
        "wrongly_rejected": sum(p.fits for p in rejected),
        "top_too_large": sum(not p.fits for p in top),
    }


def tau(first: Sequence[float], second: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """Kendall's tau-b of two rankings, and its 95 % interval over resampled points.

    >>> tau([1, 2, 3, 4], [2, 4, 6, 9])["tau"]
    1.0
    """
    rows = np.random.default_rng(0).integers(len(first), size=(draws, len(first)))
    counts = np.stack([np.bincount(drawn, minlength=len(first)) for drawn in rows])
    # Of pairs (i, j) of points: the order in each ranking, 1 for up, -1 for down, 0 for a tie.
    x, y = (np.sign(np.subtract.outer(v, v)) for v in (np.array(first), np.array(second)))

    def over(pairs: np.ndarray) -> np.ndarray:
        """Their sum in each draw, where a point counts as often as it was drawn."""
        return np.einsum("di,ij,dj->d", counts, pairs, counts, optimize=True)

    with np.errstate(invalid="ignore"):  # a draw that is all ties ranks nothing: NaN
        found = over(x * y) / np.sqrt(over(abs(x)) * over(abs(y)))
    low, high = np.nanquantile(found, [0.025, 0.975])
    return {"tau": kendall(first, second), "low": float(low), "high": float(high)}


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b; NaN where one of the rankings is all ties."""
    return float(stats.kendalltau(first, second).statistic)


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    quantiles = {"least": 0.0, "tenth": 0.1, "median": 0.5, "ninth": 0.9, "most": 1.0}
    return {name: float(np.quantile(ratios, q)) for name, q in quantiles.items()}


def figures_of(point: Point) -> dict[str, Any]:
    row = point.row

    def said(outcome: object) -> dict[str, Any]:
        if isinstance(outcome, Failure):
            return {
                "failure": outcome.kind,
                "message": outcome.message[:300],
                "missing_bytes": outcome.missing_bytes,
            }
        return {k: getattr(outcome, k) for k in (*MEASURES, "state_bytes", "flops")}

    return {
        "group": point.group,
        "fits": point.fits,
        "candidate": row.candidate.to_json(),
        "rung1": said(row.propagated),
        "rung2": said(row.compiled),
    }
