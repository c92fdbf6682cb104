"""What a search learnt, and what of a plan is printed."""

import dataclasses
from collections.abc import Mapping

from autoshard.records.layout import Constraints, Layout
from autoshard.records.trial import Trial


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a search learnt, in the order asked.

    Attributes:
      trials: every trial.
      ranking: indices of the trials that may be planned, best first; the plan is the first.
      ended: as of `tuner.loop.Found`.
      target: the devices, in words.
      memory_limit_bytes: what a device may use, headroom taken off.
      elapsed_s: seconds by rung, and in all.
      false_rejections: candidates rung 1 would have rejected and rung 2 found to fit.
      correction: factors the measurements put on predicted compute and communication.
      notes: sentences a reader should know (synthetic batches, dropped rules).
      axes: (name, size, where) of each logical axis.
      constants_digest: of the calibration.
      compiles: the most programs that rung 2 could compile; 0 in files that do not say it.
    """

    trials: tuple[Trial, ...] = ()
    ranking: tuple[int, ...] = ()
    ended: str = "finished"
    target: str = ""
    memory_limit_bytes: int = 0
    elapsed_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    false_rejections: int = 0
    correction: tuple[float, float] = (1.0, 1.0)
    notes: tuple[str, ...] = ()
    axes: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    constants_digest: str = ""
    compiles: int = 0
    created: str = ""

    @property
    def candidates(self) -> int:
        """How many layouts were judged, the same in other words counted once."""
        return len({t.candidate.with_constraints(Constraints.USUAL) for t in self.trials})

    @property
    def winner(self) -> Trial | None:
        """The trial of the plan; None for a plan that no search made."""
        return self.trials[self.ranking[0]] if self.ranking else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What a report says of a plan.

    Attributes:
      target: the devices, in words.
      is_here: whether they are the devices of this process.
      labels: logical axis -> its short name for people.
    """

    evidence: Evidence
    layout: Layout
    target: str
    is_here: bool
    labels: Mapping[str, str]

    @property
    def trial(self) -> Trial | None:
        """The winner's trial."""
        return self.evidence.winner
