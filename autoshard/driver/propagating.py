"""Rung 1 of a search: the baselines, then what the strategies ask for, each judged and recorded."""

from collections.abc import Callable

from autoshard.driver.ledger import Ledger, Row
from autoshard.layout import Candidate
from autoshard.rungs.propagate import Propagator
from autoshard.space import Space
from autoshard.strategy import Beam, Exhaustive, Seen, Strategy, baselines
from autoshard.trial import Estimate, Failure, Kind, Stage


def propagate_all(
    ledger: Ledger,
    strategy: Strategy | None,
    share: float,
    after_baselines: Callable[[], None] = lambda: None,
) -> None:
    """Judges candidates until the strategies or the budget end.

    Args:
      strategy: for every subject; default exhaustive where the space is small, else beam.
      share: part of the budget's seconds that rung 1 may take.
      after_baselines: called when the baselines are judged and nothing else is.
    """
    _Propagation(ledger, strategy).run(share, after_baselines)


class _Propagation:
    def __init__(self, ledger: Ledger, strategy: Strategy | None):
        self._ledger = ledger
        self._cost = ledger.cost
        self._propagators = [Propagator(s.analysis) for s in ledger.subjects]
        self._histories: list[list[Seen]] = [[] for _ in ledger.subjects]
        self._known: dict[object, Estimate | Failure] = {}
        self._users = strategy is not None
        self._strategies = [strategy or self._default(s.space) for s in ledger.subjects]

    def _default(self, space: Space) -> Strategy:
        if space.size() <= self._ledger.budget.candidates // len(self._ledger.subjects):
            return Exhaustive()
        return Beam(self._ledger.limit_bytes)

    def run(self, share: float, after_baselines: Callable[[], None]) -> None:
        ledger, limit = self._ledger, self._ledger.budget.candidates
        ledger.tell(Stage.PROPAGATE, 0, limit, "judging the baselines")
        for i, subject in enumerate(ledger.subjects):
            for baseline in baselines(subject.space):
                self._judge(i, baseline.candidate, baseline.name)
        after_baselines()
        live = list(range(len(ledger.subjects)))
        while live and len(ledger.rows) < limit:
            # The subject that is furthest behind goes next, so that knobs share the budget.
            i = min(live, key=lambda k: (len(self._histories[k]), k))
            asked = self._strategies[i].ask(
                ledger.subjects[i].space, ledger.seed, tuple(self._histories[i])
            )
            done = {seen.candidate for seen in self._histories[i]}
            asked = tuple(c for c in dict.fromkeys(asked) if c not in done)
            if not asked:
                live.remove(i)
                continue
            for candidate in asked:
                if len(ledger.rows) >= limit or ledger.late(share):
                    live = []
                    break
                self._judge(i, candidate, "")
            ledger.journal.sync()
        ledger.tell(Stage.PROPAGATE, len(ledger.rows), limit, "layouts judged")

    def _judge(self, index: int, candidate: Candidate, baseline: str) -> None:
        ledger = self._ledger
        subject = ledger.subjects[index]
        layout = candidate.layout
        key = ledger.key("propagate", subject, candidate)
        # The library's own strategies ask for members of the space only.
        foreign = subject.space.contains(candidate) if self._users else None
        if foreign is not None:
            failure = Failure(stage=Stage.PROPAGATE, kind=Kind.INFEASIBLE, message=foreign)
            # Not for the journal: another space may hold it.
            self._add(index, candidate, baseline, object(), failure, None)
            return
        program = (index, layout if layout.as_written else subject.space.specs(layout).key())
        outcome = ledger.journal.find(key)
        new = not isinstance(outcome, (Estimate, Failure))
        if new:
            outcome = self._known.get(program)  # another spelling of the same program
        if outcome is None:
            propagator = self._propagators[index]
            if layout.as_written:
                propagator = Propagator(subject.analysis_for(layout))
            outcome = propagator.judge(subject.space, layout, self._cost)
        assert isinstance(outcome, (Estimate, Failure))
        self._known[program] = outcome
        self._add(index, candidate, baseline, program, outcome, key if new else None)

    def _add(
        self,
        index: int,
        candidate: Candidate,
        baseline: str,
        program: object,
        outcome: Estimate | Failure,
        key: str | None,
    ) -> None:
        """Makes a row; with a key it is new to the journal."""
        ledger = self._ledger
        row = Row(
            subject=index,
            candidate=candidate,
            baseline=baseline,
            program=program,
            propagated=outcome,
        )
        if key is not None:
            ledger.journal.add(key, outcome, ledger.note("propagate", row), sync=False)
        ledger.rows.append(row)
        self._histories[index].append(Seen(candidate=candidate, outcome=outcome))
        if len(ledger.rows) % 10 == 0:
            ledger.tell(
                Stage.PROPAGATE, len(ledger.rows), ledger.budget.candidates, "propagating layouts"
            )
