"""How far a program's results are from the reference's, leaf by leaf."""

import dataclasses
import math

from autoshard.records.trial import Failure, Kind, Stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafError:
    """How far one state leaf or metric is off.

    Attributes:
      path: pytree path; a metric's ends with its step, counted from 1.
      error: relative error, `||dx - dx_ref|| / (||dx_ref|| + slack / tolerance)`, so that it is
        within the tolerance exactly when the rule above holds. A metric is compared by its value.
        For integers, booleans and keys: the share of elements that differ.
      tolerance: the largest error that passes. 0 for integers, booleans and keys, unless rounding
        noise changes them in the reference too (a count of correct answers).
      noisy: the change is mostly rounding noise; only gross errors show.
      copies: distinct copies on the devices; more than 1 where replicas differ.
    """

    path: str
    error: float
    tolerance: float
    noisy: bool = False
    copies: int = 1

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a share of what is allowed: above 1 it fails."""
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance else math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """The comparison of one program with a reference.

    Attributes:
      steps: steps that both ran from the same state.
      state, metrics: every leaf that was compared.
      unchecked: paths of the state leaves for which the host had no room.
    """

    steps: int
    state: tuple[LeafError, ...]
    metrics: tuple[LeafError, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[LeafError, ...]:
        return self.state + self.metrics

    @property
    def passed(self) -> bool:
        return all(leaf.passed for leaf in self.leaves)

    @property
    def worst(self) -> LeafError | None:
        """The leaf with the largest error relative to its tolerance; None without any."""
        return max(self.leaves, key=lambda leaf: leaf.share, default=None)

    @property
    def noisy(self) -> tuple[str, ...]:
        """Paths of the leaves where only gross errors show."""
        return tuple(leaf.path for leaf in self.leaves if leaf.noisy)

    def failure(self, elapsed_s: float = 0.0) -> Failure | None:
        """The failure this comparison means for the candidate, None if it passed.

        Args:
          elapsed_s: what the comparison took, seconds.
        """
        wrong = sorted((x for x in self.leaves if not x.passed), key=lambda x: -x.share)
        if not wrong:
            return None
        lines = [
            f"  {x.path}: error {x.error:.3g}, tolerance {x.tolerance:.3g}"
            + (f", {x.copies} different copies on the devices" if x.copies > 1 else "")
            for x in wrong[:5]
        ]
        share = f"{len(wrong)} of {len(self.leaves)} leaves"
        head = f"after {self.steps} steps {share} differ from the reference:"
        return Failure(
            stage=Stage.PROFILE,
            kind=Kind.NUMERICS,
            message="\n".join([head, *lines]),
            elapsed_s=elapsed_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceLost:
    """There is no comparison: the reference ran before, and failed when it had to run once more.

    That says nothing of who was to be compared with it.
    """

    failure: Failure
