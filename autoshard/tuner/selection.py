"""Which trials of a search go on to the next rung."""

from collections.abc import Callable, Iterator, Sequence

from autoshard.records.layout import Constraints
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Stage, Trial
from autoshard.space.baselines import DATA_PARALLEL, FSDP
from autoshard.tuner import promotion
from autoshard.tuner.state import SearchState


def baseline_trials(state: SearchState) -> list[int]:
    """Of each baseline the fastest that rung 1 takes to fit, over knobs and meshes; fastest first.

    Of a baseline that fits nowhere by rung 1 the fastest of those that miss by little comes behind:
    rung 1 may be wrong. Those that miss by more would only cost compilations.
    """
    best: dict[str, int] = {}
    factor = lower_bound(state)

    def order(i: int) -> tuple[bool, float]:
        return not _fits(state, i), _propagated(state, i).time_s

    for i, trial in enumerate(state.trials):
        estimate = trial.propagated
        if not trial.baseline or not isinstance(estimate, Estimate):
            continue
        if promotion.surely_too_large(estimate, state.limit_bytes, factor):
            trial.compiled = _too_large(estimate, state.limit_bytes)
            continue
        if estimate.peak_memory_bytes > _NEARLY * state.limit_bytes:
            continue
        other = best.get(trial.baseline)
        if other is None or order(i) < order(other):
            best[trial.baseline] = i
    return sorted(best.values(), key=order)


_NEARLY = 1.2
"""Rung 1's peak of what may fit all the same, over the limit."""


def hopeful_baselines(state: SearchState) -> list[int]:
    """The baselines of `baseline_trials` that rung 1 does not take for hopelessly slow.

    The trials of `always` and the two fastest are among them, whatever rung 1 says. The step as its
    author wrote it comes first, then the fastest and `always`: time may end before the others.
    """
    trials = baseline_trials(state)
    times_s = {i: _propagated(state, i).time_s for i in trials}
    # What does not fit by rung 1 leaves nobody without hope.
    fastest_s = min((t for i, t in times_s.items() if _fits(state, i)), default=0.0)
    hopeful = set(promotion.worth_trying({i: max(fastest_s, t) for i, t in times_s.items()}))
    written = [i for i in trials if state.trials[i].candidate.layout.as_annotated]
    first = [*written, *trials[:1], *always(state, trials), *trials[:_BY_HAND]]
    return list(dict.fromkeys([*first, *(i for i in trials if i in hopeful)]))


def always(state: SearchState, indices: Sequence[int]) -> list[int]:
    """The trials among these that are compiled and measured whatever the rungs say.

    A budget of four measurements or more always includes the first data parallel and the first FSDP
    trial: most people would use one of these two. The step as its author annotated it comes last.
    """
    trials, found = state.trials, []
    if state.budget.profiles >= _ALLOW_USUAL:
        for names in (DATA_PARALLEL, FSDP):
            found += [i for i in indices if trials[i].baseline in names][:1]
    return found + [i for i in indices if trials[i].candidate.layout.as_annotated]


_BY_HAND = 2
"""This many baselines are compiled and measured however slow they are."""

_ALLOW_USUAL = 4
"""Measurements that a budget must allow for data parallel and FSDP to be among them always."""


def promoted(state: SearchState, count: int, taken: Sequence[int]) -> list[int]:
    """The `count` most promising trials that have not gone on yet."""
    judged = {i: t for i, t in enumerate(state.trials) if isinstance(t.propagated, Estimate)}
    gone_on = {*taken, *(i for i, trial in enumerate(state.trials) if _has_gone_on(trial))}
    return promotion.promote(
        judged,
        count,
        state.correction,
        state.limit_bytes,
        lower_bound(state),
        [i for i in judged if i in gone_on],
    )


def _has_gone_on(trial: Trial) -> bool:
    """Whether rung 2 has judged a trial, and not rung 1 in its place, which may learn."""
    judged = trial.compiled
    return judged is not None and not (
        isinstance(judged, Failure) and judged.stage is Stage.PROPAGATE
    )


def worth_measuring(state: SearchState, indices: Sequence[int]) -> list[int]:
    """Of these trials those that fit and may be the fastest of all that is compiled.

    One trial represents each program (`SearchState.representatives`). The fastest by rung 2 comes
    first. Then come the trials of `always` and the two fastest baselines, however slow they are.
    Candidates that failed at run time are excluded, also from the pruning threshold.
    """
    asked = set(indices)
    times_s = {
        i: state.estimated_s(i)
        for i in state.representatives(state.fitting(range(len(state.trials))))
        if not isinstance(state.trials[i].profiled, Failure)
    }
    by_hand = [i for i in sorted(times_s, key=state.estimated_s) if state.trials[i].baseline]
    hopeful = promotion.worth_trying(times_s)
    order = dict.fromkeys([*hopeful[:1], *always(state, by_hand), *by_hand[:_BY_HAND], *hopeful])
    return [i for i in order if i in asked]


def constraint_variants(state: SearchState, known: Callable[[Trial], bool]) -> Iterator[int]:
    """New trials, one by one: the two fastest that fit, put into the program by other constraints.

    The partition is the same, the compiler's choices after it are not. One that comes to a
    program which another one has is passed over. The second is the next fastest that takes another
    time: what takes the same to the last digit is taken for the same program.

    Args:
      known: whether the journal says what the compiler makes of a trial; then it is not lowered.
    """
    times_s = {i: state.estimated_s(i) for i in state.fitting(range(len(state.trials)))}
    fastest = sorted(times_s, key=times_s.__getitem__)
    slower = [i for i in fastest if times_s[i] != times_s[fastest[0]]]
    asked = [
        (i, constraints)
        for i in fastest[:1]
        for constraints in (Constraints.ALL, Constraints.MINIMAL)
    ]
    asked += [(i, Constraints.ALL) for i in slower[:1]]
    programs: dict[int, list[Module | Failure]] = {}
    for index, constraints in asked:
        trial = state.trials[index]
        if not state.specs_of(trial).sites:
            continue
        if state.stops("compiling", 1.0):
            return
        other = Trial(
            problem=trial.problem,
            candidate=trial.candidate.with_constraints(constraints),
            baseline=trial.baseline,
            shardings=(trial.shardings, constraints),
            propagated=trial.propagated,
        )
        if not known(other):
            same = programs.setdefault(index, [state.module_of(trial)])
            program = state.module_of(other)
            if program in same or isinstance(program, Failure):
                continue
            same.append(program)
        state.trials.append(other)
        yield len(state.trials) - 1


def smallest(state: SearchState) -> int | None:
    """The trial with the least predicted peak, None if rung 2 has judged it, or there is none."""
    peaks = [
        (trial.propagated.peak_memory_bytes, i)
        for i, trial in enumerate(state.trials)
        if isinstance(trial.propagated, Estimate)
    ]
    if not peaks:
        return None
    index = min(peaks)[1]
    return None if _has_gone_on(state.trials[index]) else index


def learn(state: SearchState) -> None:
    """Takes from the measurements how far rung 1 is off; where there are none, from rung 2."""
    pairs = [
        (trial.propagated, trial.profiled.median_s)
        for trial in state.trials
        if isinstance(trial.propagated, Estimate) and isinstance(trial.profiled, Measurement)
    ] or [(a, b.time_s) for a, b in _pairs(state)]
    if pairs:
        state.correction = promotion.learn(pairs)


def lower_bound(state: SearchState) -> float:
    return promotion.lower_bound_factor(_pairs(state))


def false_rejections(state: SearchState) -> int:
    """Candidates that rung 1 would have rejected untaught, and that rung 2 found to fit."""
    return sum(
        promotion.surely_too_large(a, state.limit_bytes, promotion.DEFAULT_LOWER_BOUND)
        and b.peak_memory_bytes <= state.limit_bytes
        for a, b in _pairs(state)
    )


def _pairs(state: SearchState) -> list[tuple[Estimate, Estimate]]:
    return [
        (trial.propagated, trial.compiled)
        for trial in state.trials
        if isinstance(trial.propagated, Estimate)
        and isinstance(trial.compiled, Estimate)
        and trial.candidate.layout.constraints
        is Constraints.USUAL  # else rung 1 judged it in other words
    ]


def _propagated(state: SearchState, index: int) -> Estimate:
    found = state.trials[index].propagated
    assert isinstance(found, Estimate)
    return found


def _fits(state: SearchState, index: int) -> bool:
    """Whether a trial fits by rung 1."""
    return _propagated(state, index).peak_memory_bytes <= state.limit_bytes


def _too_large(estimate: Estimate, limit_bytes: int) -> Failure:
    return Failure(
        stage=Stage.PROPAGATE,
        kind=Kind.OOM,
        message=(
            f"needs {estimate.peak_memory_bytes / 2**20:.1f} MiB a device, the limit is"
            f" {limit_bytes / 2**20:.1f} MiB"
        ),
        missing_bytes=max(estimate.peak_memory_bytes, estimate.state_bytes) - limit_bytes,
    )
