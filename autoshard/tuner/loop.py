"""The driver: the only part that knows all roles. Data goes one way, from rung 1 to the ranking."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence

from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Constraints
from autoshard.records.trial import Failure, Kind, Stage, Trial
from autoshard.target.cost import Correction, CostModel
from autoshard.target.target import Target
from autoshard.tuner.budget import Budget, Callback
from autoshard.tuner.compiling import Compiling
from autoshard.tuner.journal import Journal
from autoshard.tuner.measuring import Measuring, opened_runner
from autoshard.tuner.propagating import propagate_all
from autoshard.tuner.selection import (
    always,
    constraint_variants,
    false_rejections,
    hopeful_baselines,
    learn,
    promoted,
    smallest,
    worth_measuring,
)
from autoshard.tuner.state import SearchState
from autoshard.tuner.strategy import Strategy

RUNG1_SHARE, FIRST_WAVE_SHARE, RUNG2_SHARE = 0.25, 0.45, 0.7
"""Parts of a limit of seconds after which rung 1, the first compiles, and the first race and all
compiles stop."""

FIRST_WAVE_ROUNDS = 6
"""Rounds of the first race: enough to correct rung 1 and to drop what is clearly slow."""

_KEPT = 4
"""One measurement in so many is kept for those that the first wave points to."""

_DEFENDERS = 3

_FEWEST_REWORDED, _MOST_REWORDED = 2, 3
"""How many compilations ask for the best layouts in other words: of three times as many."""

_WORTH = 1e-4
"""By how much other words must be faster than the usual ones to be preferred."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
      trials: every trial, in the order asked.
      ranking: indices of trials that may be planned, best first; empty if none may.
      ended: "finished", "interrupted", "out of time" where the whole time was up, or what was cut
        short by its share of the time, such as "cut short: judging layouts, measuring".
      false_rejections: candidates that rung 1 would have rejected and rung 2 found to fit.
      elapsed_s: seconds by rung, and in all.
      correction: what measurements taught of rung 1.
      notes: what else the user should know, each once.
      compiles: the most programs that rung 2 could compile (`Budget.compiles`, or by the machine).
    """

    trials: tuple[Trial, ...]
    ranking: tuple[int, ...]
    ended: str
    false_rejections: int
    elapsed_s: dict[str, float]
    correction: Correction
    notes: tuple[str, ...] = ()
    compiles: int = 0


@without_mesh()
def run_search(
    problems: Sequence[SearchProblem],
    target: Target,
    cost: CostModel,
    *,
    budget: Budget,
    journal: Journal,
    executor: concurrent.futures.Executor | None,
    strategy: Strategy | None,
    seed: int,
    callbacks: Sequence[Callback],
    limit_bytes: int,
    folder: pathlib.Path | None,
    start_s: float,
) -> Found:
    """Runs the rungs; a KeyboardInterrupt or the end of the budget keeps what is known.

    Args:
      limit_bytes: what a device may use, headroom taken off.
      folder: for workers' output and traces; None to keep none.
      start_s: when the search began, by `time.perf_counter`.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-") as scratch:
        state = SearchState(
            problems=list(problems),
            target=target,
            cost=cost,
            budget=budget,
            journal=journal,
            callbacks=tuple(callbacks),
            seed=seed,
            limit_bytes=limit_bytes,
            folder=folder,
            executables=pathlib.Path(scratch) / "executables",
            start_s=start_s,
            elapsed_s={"trace": time.perf_counter() - start_s},
        )
        compiling = Compiling(state, executor)
        measuring = Measuring(state, compiling.compiled_by())
        with compiling.opened():
            with _keeping_what_there_is(state):
                _climb(state, compiling, measuring, strategy)
            ranking = [*measuring.ranking]
            if not ranking and _may_be_estimated(state, measuring):
                with _keeping_what_there_is(state):
                    _compile_until_one_fits(state, compiling)
                ranking = _by_estimate(state)
    journal.sync()
    for trial in state.trials:
        trial.module = None  # a program may be large
    state.elapsed_s["all"] = time.perf_counter() - state.start_s
    return Found(
        trials=tuple(state.trials),
        ranking=tuple(ranking),
        ended=state.how_it_ended(),
        false_rejections=false_rejections(state),
        elapsed_s=dict(state.elapsed_s),
        correction=state.correction,
        notes=tuple(dict.fromkeys(state.notes)),
        compiles=compiling.most,
    )


@contextlib.contextmanager
def _keeping_what_there_is(state: SearchState) -> Iterator[None]:
    """A KeyboardInterrupt, also a callback's, ends what is inside; the search goes on after it."""
    try:
        yield
    except KeyboardInterrupt:
        state.interrupted = True
        state.tell(Stage.PROFILE, 0, 0, "interrupted: finishing with the best so far")


def _climb(
    state: SearchState, compiling: Compiling, measuring: Measuring, strategy: Strategy | None
) -> None:
    """The rungs in two waves: the first teaches the model of rung 1, the second profits."""
    budget = state.budget
    # Of compilations that nothing is measured after, some ask for the best in other words.
    spared = min(compiling.most // 3, _MOST_REWORDED)
    if budget.profiles or spared < _FEWEST_REWORDED:
        spared = 0
    first: list[int] = []
    share = FIRST_WAVE_SHARE if budget.profiles else 1.0

    def begin_baselines() -> None:
        # Rung 1 needs one core: the workers have the others until it is done. Half of the
        # compilations are for what it finds, or what is left beside those that always are.
        hopeful = hopeful_baselines(state)
        certain = always(state, hopeful)[: compiling.most]
        others = [i for i in hopeful if i not in certain]
        room = max(0, (compiling.most - spared + 1) // 2 - len(certain))
        first.extend(i for i in hopeful if i in certain or i in others[:room])
        with state.timed("compile"):
            compiling.begin(first, share)

    with state.timed("propagate"):
        propagate_all(state, strategy, RUNG1_SHARE, begin_baselines)
    with state.timed("compile"):
        room = max(0, compiling.most - spared - len(first))
        room = min(room, budget.profiles or room)
        more = promoted(state, room - room // 2, first)
        compiling.compile(more, share)
        first += more
    if budget.profiles == 0:
        learn(state)
        with state.timed("compile"):
            second = promoted(state, max(0, compiling.most - spared - compiling.count), first)
            compiling.compile(second, 1.0)
            for index in itertools.islice(constraint_variants(state, compiling.known), spared):
                compiling.begin([index], 1.0)
            compiling.finish()
            rest = promoted(state, max(0, compiling.most - compiling.count), first)
            compiling.compile(rest, 1.0)
        return
    with opened_runner(state) as bench:
        with state.timed("profile"):
            most = budget.profiles - budget.profiles // _KEPT
            begun = worth_measuring(state, first)[:most]
            measuring.measure(bench, begun, "first", FIRST_WAVE_ROUNDS, 0, RUNG2_SHARE)
        learn(state)
        with state.timed("compile"):
            room = min(compiling.most - compiling.count, budget.profiles - len(state.measured()))
            second = promoted(state, max(0, room), first)
            compiling.compile(second, RUNG2_SHARE)
        with state.timed("profile"):
            left = budget.profiles - len(state.measured())
            # After those that the first wave points to, what it had no place for.
            rest = worth_measuring(state, first)
            more = [*always(state, rest), *worth_measuring(state, second), *rest]
            fresh = [i for i in more if state.trials[i].profiled is None][: max(0, left)]
            finalists = [*measuring.ranking[:_DEFENDERS], *fresh]
            measuring.measure(bench, finalists, "final", budget.rounds, FIRST_WAVE_ROUNDS, 1.0)
        learn(state)


def _may_be_estimated(state: SearchState, measuring: Measuring) -> bool:
    """Nothing was measured: whether that leaves something to plan by its estimate.

    Not where candidates compute something else than they should, unless others were left unchecked,
    by an interrupt or for want of time: nobody knows of these, which is noted.
    """
    checked = [trial.profiled for trial in state.trials if isinstance(trial.profiled, Failure)]
    wrong = sum(failure.kind is Kind.NUMERICS for failure in checked)
    if not wrong or (not state.interrupted and not measuring.left):
        return not wrong
    state.notes.append(
        f"{wrong} of {len(checked)} programs that ran before the search ended compute something"
        " else than the unsharded step; the plan was not checked: plan.check() compares it"
    )
    return True


def _fitting(state: SearchState) -> list[int]:
    """Trials that rung 2 finds to fit and that have not failed on the devices."""
    fitting = state.representatives(state.fitting(range(len(state.trials))))
    return [i for i in fitting if not isinstance(state.trials[i].profiled, Failure)]


def _compile_until_one_fits(state: SearchState, compiling: Compiling) -> None:
    """Compiles a few more where nothing is known to fit, at last the smallest by rung 1.

    Rung 1 may be wrong, and if it is not, the error can say what is missing.
    """
    for _ in range(4):
        more = [] if _fitting(state) else promoted(state, 2, [])
        if not more:
            break
        with state.timed("compile"):
            compiling.compile(more, float("inf"))
    if not _fitting(state) and (least := smallest(state)) is not None:
        with state.timed("compile"):
            compiling.compile([least], float("inf"))


def _by_estimate(state: SearchState) -> list[int]:
    """Nothing was measured: what rung 2 finds to fit, by its estimate."""

    def order(i: int) -> tuple[float, int]:
        usual = state.trials[i].candidate.layout.constraints is Constraints.USUAL
        return state.estimated_s(i) * (1.0 if usual else 1.0 + _WORTH), i

    return sorted(_fitting(state), key=order)
