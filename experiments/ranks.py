"""How well a model of cost ranks and predicts measured programs. Pure functions.

A measured time is the 20 %-trimmed mean over rounds of the program's log time, after the mean over
all programs is subtracted from each round: a drift of the machine hits all programs of a round
alike. The noise ceiling is Kendall's tau between the times from one half of the rounds and the
times from the other half, averaged over 100 random halves. Half of the rounds is noisier than all
of them, so the ceiling is a little too low and shares of it may exceed 1.

Axes of arrays: P programs, R rounds.
"""

import dataclasses
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from autoshard.records.rounds import TRIM, by_round
from autoshard.target.cost import fit_correction

FIRST = 16
"""The best program is looked for among this many with the least predicted times."""

NEAR = 1.01
"""A program counts as the best if it takes at most this many times as long."""

_SPLITS = 100
_PRIOR = 1e-6  # keeps the fit of two factors solvable where no program communicates


class Parts(NamedTuple):
    """Predicted seconds of a step. The model's time is their sum."""

    compute_s: float
    communication_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One model of cost on the programs of one case.

    Attributes:
      count: programs.
      tau: Kendall's tau-b between predicted and measured times; 0 if the predictions are all equal.
      ceiling: the noise ceiling of that tau.
      finds_best: the `FIRST` programs with the least predicted times hold one that is within 1 % of
        the fastest program.
      error: median absolute relative error of the predicted times, after `fit_correction` fitted
        its two factors to all programs of the case, nearly without its ridge.
    """

    count: int
    tau: float
    ceiling: float
    finds_best: bool
    error: float

    @property
    def share(self) -> float:
        return self.tau / self.ceiling


def log_times(samples: Iterable[tuple[Sequence[float], Sequence[int]]]) -> np.ndarray:
    """Log of each program's median sample in each round that all programs ran: [P, R].

    Args:
      samples: of each program its samples in seconds and the round of each sample.

    >>> log_times([([1.0, 1.0, 9.0, 1.0], [0, 1, 1, 1]), ([1.0], [1])])
    array([[0.],
           [0.]])
    """
    tables = [by_round(samples_s, rounds) for samples_s, rounds in samples]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    return np.array([[table[r] for r in common] for table in tables])


def times(logs_PR: np.ndarray) -> np.ndarray:
    """Step times in seconds: [P].

    >>> drifting_PR = np.log([[1.0, 2.0], [3.0, 6.0]])
    >>> (times(drifting_PR) / times(drifting_PR)[0]).round(6)
    array([1., 3.])
    """
    drift_R = logs_PR.mean(axis=0)
    cut = int(TRIM * len(drift_R))
    kept_PR = np.sort(logs_PR - drift_R, axis=1)[:, cut : len(drift_R) - cut]
    return np.exp(drift_R.mean() + kept_PR.mean(axis=1))


def ceiling(logs_PR: np.ndarray) -> float:
    """Mean Kendall's tau between the times of two random halves of the rounds."""
    rng = random.Random(0)
    rounds = list(range(logs_PR.shape[1]))
    half = len(rounds) // 2
    found = []
    for _ in range(_SPLITS):
        rng.shuffle(rounds)
        found.append(kendall(times(logs_PR[:, rounds[:half]]), times(logs_PR[:, rounds[half:]])))
    return statistics.fmean(found)


def kendall(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Kendall's tau-b; NaN if all values of one ranking are equal."""
    return float(stats.kendalltau(first, second).statistic)


def figures(predicted: Sequence[Parts], logs_PR: np.ndarray) -> Figures:
    """Scores predictions.

    Args:
      predicted: of each program, in the order of `logs_PR`.
    """
    measured = times(logs_PR)
    total = np.array([sum(parts) for parts in predicted])
    tau = kendall(total, measured)
    first = np.argsort(total, kind="stable")[:FIRST]
    pairs = zip(predicted, measured, strict=True)
    factors = fit_correction([(*parts, float(t)) for parts, t in pairs], _PRIOR)
    corrected = np.array(predicted) @ [factors.compute, factors.communication]
    return Figures(
        count=len(measured),
        tau=0.0 if np.isnan(tau) else tau,
        ceiling=ceiling(logs_PR),
        finds_best=bool(measured[first].min() <= NEAR * measured.min()),
        error=float(np.median(np.abs(corrected / measured - 1.0))),
    )
