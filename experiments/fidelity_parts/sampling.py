"""Which programs of a case are measured: by chance with a fixed seed, rung 1's best, the plan's.

At least `fitting` candidates that fit and run are drawn: half by `Space.sample`, a quarter by walks
of up to four decisions from the baselines, the rest by such walks from rung 1's ten best, so that
not all layouts are absurd. Rung 1's ten best (the fastest programs of those that fit, by its word;
for each that does not run the next), the programs that the search measured and the fastest of each
baseline come on top; more walks from the best fill up to `total` distinct programs that fit and
run. A space that has no more programs than that is taken whole. Nothing is left out for what rung 1
says of it, but for the bytes of its state alone; what does not fit or run stays in the list and
says so. Layouts that come to one program are one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Set

import jax

from autoshard.lowering.problem import make_problem, trace_all
from autoshard.records.layout import Candidate
from autoshard.rungs.propagate import Propagator
from autoshard.target.cost import CostModel
from autoshard.target.target import Target, find_target
from autoshard.tuner.budget import Budget, Callback
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.journal import Journal
from autoshard.tuner.promoting import baseline_rows
from autoshard.tuner.propagating import propagate_all
from autoshard.tuner.state import Row, SearchState
from experiments.agreement import walk
from experiments.draws import Draw, Draws, fastest, uniform
from experiments.fidelity_parts.store import Case, Store, Task

DRAWN = ("uniform", "near baselines", "near best")
"""Groups of the sample; "top" is rung 1's ten best. Rank correlation is over these and "top"."""

_HEADROOM = 0.05  # of the memory: the default of `autoshard.search`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is sampled: `fitting` drawn by chance, `top` of rung 1, `total` programs in all.

    That is of programs that fit and run; no more than `most` are picked, whatever becomes of them.
    A few more than are asked for (`report.MINIMAL`): on fake devices one that ran alone may die in
    the rounds, when nothing can take its place.
    """

    fitting: int = 34
    top: int = 12
    total: int = 52
    at_once: int = 8  # compiled between two looks at how many fit and run

    @property
    def most(self) -> int:
        return 3 * self.total


@dataclasses.dataclass(slots=True)
class Chosen:
    """One program of the sample: a row of the ledger, and every group that it belongs to."""

    row: int
    groups: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The programs that are compiled and, where they fit, measured.

    Attributes:
      finalists: rows that stand for what the search measured, the plan first.
      whole: the space has no other programs.
      skipped: drawn candidates left out because their state alone is too large.
    """

    programs: tuple[Chosen, ...]
    finalists: tuple[int, ...]
    whole: bool
    skipped: int


def target_of(task: Task) -> Target:
    """The fake devices of a task."""
    return find_target(jax.devices()[: task.devices])


def open_ledger(
    task: Task,
    case: Case,
    store: Store,
    journal: Journal,
    cost: CostModel,
    *,
    seed: int,
    budget: Budget,
    callbacks: Sequence[Callback] = (),
) -> SearchState:
    """The ledger of a search on the case, before its first rung, as `autoshard.search` makes it."""
    target = target_of(task)
    (program,), _ = trace_all(case.workload, None, False)
    return SearchState(
        subjects=[make_problem(program, target, "free", None)],
        target=target,
        cost=cost,
        budget=budget,
        journal=journal,
        callbacks=tuple(callbacks),
        seed=seed,
        limit_bytes=int(target.memory_bytes * (1 - _HEADROOM)),
        folder=store.run_folder(task),
    )


def choose(
    ledger: SearchState,
    finalists: Sequence[Candidate],
    size: Size,
    try_out: Callable[[Sequence[int]], None],
) -> Sample:
    """Picks the sample, compiles it and tries it out. What the journal holds is not compiled again.

    Args:
      finalists: what the search measured, the plan first; they get the group "finalists".
      try_out: runs each of these rows alone; to one that fails it gives the failure as `profiled`.
    """
    propagate_all(ledger, None, 1.0)
    compiling = Compiling(ledger, None)
    picks = _Picks(ledger)
    ranked = fastest(ledger, len(ledger.rows))
    picks.add("top", ranked[: size.top])
    picks.add("baselines", baseline_rows(ledger))
    found = picks.find(finalists)
    picks.add("finalists", found)

    def judge() -> None:
        """Compiles and tries out what was picked since the last time."""
        compiling.compile([i for i in picks.rows() if ledger.rows[i].compiled is None], 1.0)
        picks.settle()
        try_out(picks.untried())

    def sample(whole: bool, skipped: int) -> Sample:
        standing = tuple(picks.standing(found))
        return Sample(
            programs=tuple(picks.chosen), finalists=standing, gather=whole, skipped=skipped
        )

    with compiling.opened():
        if picks.whole_space(size.total):
            picks.add("uniform", range(len(ledger.rows)))
            judge()
            return sample(True, 0)
        judge()
        next_ = size.top
        most = size.most
        while (lack := size.top - picks.running({"top"})) > 0 and next_ < min(len(ranked), most):
            picks.add("top", ranked[next_ : next_ + lack])
            next_ += lack
            judge()
        draws = Draws(ledger, set())
        best = [ledger.rows[i].candidate for i in ranked[: size.top]]
        near_best = functools.partial(walk, best)
        kinds: tuple[tuple[str, Draw, int], ...] = (
            ("uniform", uniform, size.fitting // 2),
            ("near baselines", functools.partial(walk, ()), size.fitting * 3 // 4),
            ("near best", near_best, size.fitting),
        )
        for group, draw, wanted in kinds:
            source = draws.rows(draw)
            while (lack := wanted - picks.running(set(DRAWN))) > 0 and len(picks.chosen) < most:
                if not picks.take(group, source, min(lack, size.at_once)):
                    break
                judge()
        source = draws.rows(near_best)
        while (lack := size.total - picks.running()) > 0 and len(picks.chosen) < most:
            if not picks.take("filling", source, min(lack, size.at_once)):
                break
            judge()
    return sample(False, draws.skipped)


class _Picks:
    """The sample in the making: each program once, with all its groups."""

    def __init__(self, ledger: SearchState):
        self.chosen: list[Chosen] = []
        self._state = ledger
        self._by_program: dict[object, Chosen] = {}
        self._tried: set[int] = set()

    def rows(self) -> list[int]:
        return [one.row for one in self.chosen]

    def standing(self, rows: Sequence[int]) -> list[int]:
        """The row that stands for the program of each of these."""
        return [self._by_program[self._state.rows[i].program].row for i in rows]

    def running(self, groups: Set[str] | None = None) -> int:
        """How many programs fit and ran when they were tried, of all or of these groups."""
        rows = [one.row for one in self.chosen if groups is None or groups & set(one.groups)]
        return sum(self._state.rows[i].profiled is None for i in self._state.fitting(rows))

    def untried(self) -> list[int]:
        """Rows that fit, each once."""
        rows = [i for i in self._state.fitting(self.rows()) if i not in self._tried]
        self._tried |= set(rows)
        return rows

    def add(self, group: str, rows: Sequence[int]) -> None:
        """Takes rows in; where a program is there under another row, that row stands for it."""
        for i in rows:
            program = self._state.rows[i].program
            one = self._by_program.get(program)
            if one is None:
                one = Chosen(row=i, groups=[])
                self._by_program[program] = one
                self.chosen.append(one)
            if group not in one.groups:
                one.groups.append(group)

    def settle(self) -> None:
        """Of rows that were found to come to one program one stands for it, in all groups.

        The first, or one with the name of a baseline.
        """
        rows, first = self._state.rows, dict[str, Chosen]()
        every, self.chosen = self.chosen, []
        for one in every:
            digest = rows[one.row].digest
            same = first.setdefault(digest, one) if digest else one
            if same is one:
                self.chosen.append(one)
                continue
            same.groups += [group for group in one.groups if group not in same.groups]
            for program, other in self._by_program.items():
                if other is one:
                    self._by_program[program] = same
            if rows[one.row].baseline and not rows[same.row].baseline:
                rows[one.row].profiled = rows[same.row].profiled
                if same.row in self._tried:
                    self._tried.add(one.row)
                same.row = one.row

    def take(self, group: str, source: Iterator[int], count: int) -> bool:
        """Takes the next rows of a draw in; False if there are none."""
        rows = list(itertools.islice(source, count))
        self.add(group, rows)
        return bool(rows)

    def find(self, candidates: Sequence[Candidate]) -> list[int]:
        """Rows of candidates; what this rung 1 has not judged (a plan from elsewhere) is judged."""
        ledger = self._state
        known = {row.candidate: i for i, row in reversed(list(enumerate(ledger.rows)))}
        for candidate in candidates:
            if candidate not in known:
                known[candidate] = len(ledger.rows)
                ledger.rows.append(judged(ledger, candidate))
        return [known[candidate] for candidate in candidates]

    def whole_space(self, most: int) -> bool:
        """Whether the ledger's rows are the whole space, in no more than so many programs."""
        (subject,) = self._state.subjects
        every = subject.space.size() <= self._state.budget.candidates
        return every and len({row.program for row in self._state.rows}) <= most


def judged(ledger: SearchState, candidate: Candidate) -> Row:
    """A row for a candidate that no rung 1 of this ledger has met: judged now, not yet compiled."""
    (subject,) = ledger.subjects
    layout = candidate.layout
    specs = subject.space.specs(layout)
    return Row(
        subject=0,
        candidate=candidate,
        baseline="",
        program=(0, layout if layout.as_annotated else specs.key()),
        propagated=Propagator(subject.analysis_for(layout)).judge(
            subject.space, layout, ledger.cost
        ),
    )
