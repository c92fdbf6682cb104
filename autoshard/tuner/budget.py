"""Budget: how much a search may spend; and the events that tell how far it is."""

import dataclasses
import logging
from collections.abc import Callable

from autoshard.records.trial import Stage

_log = logging.getLogger("autoshard")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a search. Rung 1 judges every baseline, also beyond the limit of candidates.

    Attributes:
      candidates: judged by rung 1.
      compiles: programs compiled by rung 2, half of them (rounded up) baselines as such, at most.
        None for 10, and 2 more for each program above two that this machine compiles at once.
        Without measurements, two of six compiles retry the best layout with other constraint
        densities, and one of nine retries the next best.
      profiles: programs measured by rung 3; 0 plans without measuring.
      seconds: wall time of the whole search; None for no limit. It includes tracing and
        calibration, which are never cut short.
      compile_seconds, measure_seconds: limits of one compile and of one measuring call, which is
        then killed. They do not hold on live accelerators, where both run in the search's process.
      rounds: the most rounds of the final race.
    """

    candidates: int = 600
    compiles: int | None = None
    profiles: int = 16
    seconds: float | None = None
    compile_seconds: float = 300.0
    measure_seconds: float = 300.0
    rounds: int = 30

    def __post_init__(self) -> None:
        for name in ("candidates", "compiles", "profiles", "rounds"):
            value = getattr(self, name)
            if value is None and name == "compiles":
                continue
            if not isinstance(value, int) or value < (0 if name == "profiles" else 1):
                raise ValueError(f"Budget.{name} must be a positive whole number, got {value!r}")
        for name in ("seconds", "compile_seconds", "measure_seconds"):
            value = getattr(self, name)
            if value is None and name == "seconds":
                continue
            if value is None or not value > 0:
                raise ValueError(f"Budget.{name} must be positive, got {value!r}")

    def compiles_by(self, workers: int) -> int:
        """The most programs to compile.

        Args:
          workers: how many programs compile at once.
        """
        return 10 + 2 * max(0, workers - 2) if self.compiles is None else self.compiles


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The progress of a search.

    Attributes:
      stage: the rung at work; trace means everything before rung 1.
      done, total: steps before rung 1, candidates of rungs 1 and 2 out of the budget's, or
        finalists of a race; 0, 0 if there is nothing to count.
      text: one line for a person.
      best_s: the best step time so far, predicted or measured, seconds; None if there is none.
    """

    stage: Stage
    done: int
    total: int
    text: str
    best_s: float | None = None


Callback = Callable[[Event], None]


def harmless(callback: Callback) -> Callback:
    """A callback that costs no search: one that raised is logged and not called again.

    KeyboardInterrupt passes: it ends a search, which keeps what it found.
    """
    raised = False

    def call(event: Event) -> None:
        nonlocal raised
        if raised:
            return
        try:
            callback(event)
        except Exception:  # the user's own code
            raised = True
            _log.exception("the callback %r raised; it is not called again", callback)

    return call
