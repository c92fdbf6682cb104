"""Which finalists compute what they should: compared before they race, knob by knob.

The unsharded step of the same knobs is the reference. Where it cannot run (it does not fit one
device), programs are compared with one of their own, the yardstick, and believed if most of them
agree with it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport, ReferenceLost
from autoshard.records.trial import Failure, Kind, Measurement, Stage
from autoshard.rungs.profile.race import Footprint
from autoshard.rungs.profile.runner import Runner

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A candidate that is measured.

    Attributes:
      name: distinct among the finalists.
      module: the program that will run.
      footprint: what it takes on a device, loaded and running.
      reference: name of the unsharded program of the same knobs.
      checked: an earlier measurement whose numerics check stands, None if there is none.
    """

    name: str
    module: Module
    footprint: Footprint
    reference: str
    checked: Measurement | None


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a finalist passed: the fields `numerics...` of its `Measurement`."""

    kind: str
    error: float | None = None
    where: str = ""
    allowed: float | None = None


Touching = Callable[[Sequence[str]], AbstractContextManager[object]]


class Checking:
    """Checks the numerics of finalists.

    Attributes:
      passed: name -> verdict.
      failed: name -> failure.
      notes: what else the user should know.

    Args:
      touching: entered for as long as programs of these names run, which may take the process down.
      on_failure: told of each failure at once, so that an interrupt later does not lose it.
    """

    def __init__(
        self,
        bench: Runner,
        *,
        should_stop: Callable[[], bool],
        touching: Touching,
        on_progress: Callable[[int, str], None],
        on_failure: Callable[[str, Failure], None],
    ):
        self.passed: dict[str, Verdict] = {}
        self.failed: dict[str, Failure] = {}
        self.notes: list[str] = []
        self._elapsed_s: dict[str, float] = {}
        self._bench = bench
        self._should_stop = should_stop
        self._touching = touching
        self._on_progress = on_progress
        self._on_failure = on_failure

    def check(
        self, finalists: Sequence[Finalist], references: Mapping[str, Module | Failure]
    ) -> None:
        """Checks them all, or as many as there is time for: one at least.

        Args:
          references: the unsharded programs of those that are not checked yet, by name; or why one
            is not run.
        """
        groups: dict[str, list[Finalist]] = {}
        for finalist in finalists:
            groups.setdefault(finalist.reference, []).append(finalist)
            if (earlier := finalist.checked) is not None:
                self.passed[finalist.name] = Verdict(
                    earlier.numerics,
                    earlier.numerics_error,
                    earlier.numerics_where,
                    earlier.numerics_allowed,
                )
        for reference, group in groups.items():
            fresh = [f for f in group if f.checked is None]
            if not fresh or self._no_more():
                continue
            if all(f.module.device_count == 1 for f in fresh):
                self._check_finite(fresh)
                continue
            lost = self._trusted(reference, references[reference])
            if lost is None:
                lost = self._compare_all(fresh, reference)
            if lost is not None:
                self.notes.append(_without_reference(lost))
                self._check_each_other(group, lost)

    def _no_more(self) -> bool:
        return bool(self.passed) and self._should_stop()

    def _tell(self, text: str) -> None:
        self._on_progress(len(self.passed) + len(self.failed), text)

    def _fail(self, name: str, failure: Failure) -> None:
        self.failed[name] = failure
        self._on_failure(name, failure)

    def _trusted(self, reference: str, program: Module | Failure) -> Failure | None:
        """Runs the unsharded step, for others to be compared with it; why that cannot be."""
        if isinstance(program, Failure):
            return program
        self._tell("running the unsharded step")
        with self._touching([reference]):
            return self._bench.trust(reference, program)

    def _compare_all(self, finalists: Sequence[Finalist], reference: str) -> Failure | None:
        """Judges each by the unsharded step; why that was lost, if it was."""
        for name, report in self._compared(finalists, reference):
            if isinstance(report, ReferenceLost):
                return report.failure
            self._judge(name, report, "exact")
        return None

    def _judge(self, name: str, report: NumericsReport, kind: str) -> None:
        if report.unchecked and (note := _partly(report)) not in self.notes:
            self.notes.append(note)
        if (failure := report.failure(self._elapsed_s[name])) is not None:
            self._fail(name, failure)
            return
        worst = report.worst
        self.passed[name] = (
            Verdict(kind, worst.error, worst.path, worst.tolerance) if worst else Verdict(kind, 0.0)
        )

    def _compared(
        self, finalists: Sequence[Finalist], reference: str
    ) -> Iterator[tuple[str, NumericsReport | ReferenceLost]]:
        """Runs each beside the trusted reference; those that cannot run fail here."""
        for number, finalist in enumerate(finalists):
            if (self.passed or number) and self._should_stop():
                return
            answer = self._asked(finalist, lambda name: self._bench.numerics(name, reference))
            if not isinstance(answer, Failure):
                yield finalist.name, answer

    def _check_finite(self, finalists: Sequence[Finalist]) -> None:
        """Of the unsharded step itself: right by definition, as long as it does not blow up.

        Where sums come in no order, as on GPUs, it may even differ from itself.
        """
        for finalist in finalists:
            if not isinstance(self._asked(finalist, self._bench.finite), Failure):
                self.passed[finalist.name] = Verdict("unsharded")

    def _asked(self, finalist: Finalist, question: Callable[[str], T]) -> T | Failure:
        """What the bench says of a finalist while it is loaded; a failure is one of its own."""
        self._tell(f"checking the numerics of {finalist.name}")
        begin = time.perf_counter()
        with self._touching([finalist.name]):
            loaded = self._bench.load(finalist.name, finalist.module)
            answer = loaded if isinstance(loaded, Failure) else question(finalist.name)
            self._bench.unload(finalist.name)
        self._elapsed_s[finalist.name] = time.perf_counter() - begin
        if isinstance(answer, Failure):
            self._fail(finalist.name, answer)
        return answer

    def _check_each_other(self, group: Sequence[Finalist], lost: Failure) -> None:
        """Compares programs of the same knobs with one of them that most agree with.

        One that passed an earlier check is believed in any case, and who failed stays so.

        Args:
          lost: why there is no reference.
        """
        group = [f for f in group if f.name not in self.failed]
        believed = [f for f in group if self._is_believed(f.name)]
        open_ = [f for f in group if f not in believed]
        differing: dict[str, Failure] = {}
        for yardstick in (*believed, *open_):
            if yardstick.name in self.failed:
                continue
            # What blows up agrees with nobody, and nobody can be told from it.
            if yardstick in open_ and isinstance(
                self._asked(yardstick, self._bench.finite), Failure
            ):
                self.passed.pop(yardstick.name, None)
                continue
            with self._touching([yardstick.name]):
                refused = self._bench.trust(yardstick.name, yardstick.module)
            if refused is not None:
                if yardstick in open_:
                    self.passed.pop(yardstick.name, None)
                    self._fail(yardstick.name, refused)
                continue
            others = [f for f in open_ if f is not yardstick and f.name not in self.failed]
            compared = dict(self._compared(others, yardstick.name))
            reports = {n: r for n, r in compared.items() if isinstance(r, NumericsReport)}
            if len(reports) < len(compared):
                continue  # the yardstick did not run once more
            agreeing = [name for name, report in reports.items() if report.passed]
            if yardstick in believed or 2 * (len(agreeing) + 1) > len(reports) + 1:
                for name, report in reports.items():
                    self.passed.pop(name, None)
                    self._judge(name, report, "relative")
                if yardstick in open_:
                    alone = Verdict("unchecked")
                    self.passed[yardstick.name] = self.passed[agreeing[0]] if agreeing else alone
                return
            for name, report in reports.items():
                if (failure := report.failure(self._elapsed_s[name])) is not None:
                    differing[name] = failure
                    differing.setdefault(yardstick.name, failure)
        for name, failure in differing.items():
            if name not in self.failed:
                self.passed.pop(name, None)
                self._fail(name, _disagreeing(failure, lost))

    def _is_believed(self, name: str) -> bool:
        """Whether a program was found to be right."""
        return name in self.passed and self.passed[name].kind != "unchecked"


def _disagreeing(failure: Failure, lost: Failure) -> Failure:
    return Failure(
        stage=Stage.PROFILE,
        kind=Kind.NUMERICS,
        message="programs of this step compute different things, and the unsharded one, which could"
        f" tell which is right, does not run here ({_why(lost)}): {failure.message}",
        elapsed_s=failure.elapsed_s,
    )


def _without_reference(lost: Failure) -> str:
    return (
        "the unsharded step does not run here, so that programs were compared with each other:"
        f" {_why(lost)}"
    )


def _partly(report: NumericsReport) -> str:
    total = len(report.unchecked) + len(report.state)
    return (
        f"the numerics check compared {len(report.state)} of {total} state leaves: the host has no"
        f" free memory for the others, such as {report.unchecked[0]}"
    )


def _why(lost: Failure) -> str:
    """Why there is no reference, in one line, and what to do."""
    said = lost.message.strip().splitlines()
    longer = "; Budget(measure_seconds=...) gives it longer" if lost.kind is Kind.TIMEOUT else ""
    return f"{lost.kind}: {said[0][:300] if said else ''}{longer}"
