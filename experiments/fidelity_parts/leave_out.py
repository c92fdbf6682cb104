"""Error of predicted step times, calibrated on the other families of models. Pure functions.

Both rungs say how long a step computes and how long it communicates, by constants measured on the
machine. Two factors on these are what is calibrated, one pair for each rung and device count:
least squares of the relative error, none below zero, each case of the same weight, over the
measured programs of all families but the one that is then predicted.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from autoshard.target.cost import Correction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One program: what a rung predicts of it, seconds, and what was measured.

    Attributes:
      family, case, name: whose it is; cases of one family are left out together.
    """

    family: str
    case: str
    name: str
    compute_s: float
    communication_s: float
    measured_s: float

    def predicted_s(self, factors: Correction) -> float:
        return self.compute_s * factors.compute + self.communication_s * factors.communication

    def error(self, factors: Correction) -> float:
        """Absolute error relative to what was measured."""
        return abs(self.predicted_s(factors) / self.measured_s - 1.0)


def fit(observations: Sequence[Observation]) -> Correction:
    """The two factors; 1, 1 where there is nothing to fit."""
    if not observations:
        return Correction()
    counts: dict[str, int] = {}
    for one in observations:
        counts[one.case] = counts.get(one.case, 0) + 1
    weights = np.array([counts[one.case] ** -0.5 for one in observations])
    parts = np.array([[one.compute_s, one.communication_s] for one in observations])
    measured = np.array([one.measured_s for one in observations])
    factors, _ = nnls(parts * (weights / measured)[:, None], weights)
    return Correction(compute=float(factors[0]), communication=float(factors[1]))


def factors_without(observations: Sequence[Observation]) -> dict[str, Correction]:
    """Family -> factors fitted on all others; {} where there is one family only."""
    families = sorted({one.family for one in observations})
    if len(families) < 2:
        return {}
    return {f: fit([one for one in observations if one.family != f]) for f in families}


def errors(observations: Sequence[Observation]) -> dict[str, float]:
    """Case -> median absolute relative error of its programs, its family left out."""
    factors = factors_without(observations)
    if not factors:
        return {}
    return {
        case: statistics.median(one.error(factors[one.family]) for one in own)
        for case, own in by_case(observations).items()
    }


def by_case(observations: Iterable[Observation]) -> dict[str, list[Observation]]:
    found: dict[str, list[Observation]] = {}
    for one in observations:
        found.setdefault(one.case, []).append(one)
    return found
