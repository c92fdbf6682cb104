"""Which rows of a search go on to the next rung."""

from collections.abc import Callable, Iterator, Sequence

from autoshard.records.layout import Constraints
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Kind, Measurement, Stage
from autoshard.space.baselines import DATA_PARALLEL, FSDP
from autoshard.tuner import promotion as promote
from autoshard.tuner.state import Row, SearchState


def baseline_rows(state: SearchState) -> list[int]:
    """Of each baseline the fastest that rung 1 takes to fit, over knobs and meshes; fastest first.

    Of a baseline that fits nowhere by rung 1 the fastest of those that miss by little comes behind:
    rung 1 may be wrong. Those that miss by more would only cost compilations.
    """
    best: dict[str, int] = {}
    factor = lower_bound(state)

    def order(i: int) -> tuple[bool, float]:
        return not _fits(state, i), _propagated(state, i).time_s

    for i, row in enumerate(state.rows):
        estimate = row.propagated
        if not row.baseline or not isinstance(estimate, Estimate):
            continue
        if promote.surely_too_large(estimate, state.limit_bytes, factor):
            row.compiled = _too_large(estimate, state.limit_bytes)
            continue
        if estimate.peak_memory_bytes > _NEARLY * state.limit_bytes:
            continue
        other = best.get(row.baseline)
        if other is None or order(i) < order(other):
            best[row.baseline] = i
    return sorted(best.values(), key=order)


_NEARLY = 1.2
"""Rung 1's peak of what may fit all the same, over the limit."""


def hopeful_baselines(state: SearchState) -> list[int]:
    """The baselines of `baseline_rows` that rung 1 does not take for hopelessly slow.

    The rows of `always` and the two fastest are among them, whatever rung 1 says. The step as its
    author wrote it comes first, then the fastest and `always`: time may end before the others.
    """
    rows = baseline_rows(state)
    times_s = {i: _propagated(state, i).time_s for i in rows}
    # What does not fit by rung 1 leaves nobody without hope.
    fastest_s = min((t for i, t in times_s.items() if _fits(state, i)), default=0.0)
    hopeful = set(promote.worth_trying({i: max(fastest_s, t) for i, t in times_s.items()}))
    written = [i for i in rows if state.rows[i].candidate.layout.as_annotated]
    first = [*written, *rows[:1], *always(state, rows), *rows[:_BY_HAND]]
    return list(dict.fromkeys([*first, *(i for i in rows if i in hopeful)]))


def always(state: SearchState, indices: Sequence[int]) -> list[int]:
    """The rows among these that are compiled and measured whatever the rungs say.

    In a budget of four measurements or more they are the first data parallel row and the first FSDP
    row. Most people would use one of these two, and on programs of other people the plan lost up to
    20 % to data parallel that was not measured. Last comes the step as its author wrote it.
    """
    rows, found = state.rows, []
    if state.budget.profiles >= _ALLOW_USUAL:
        for names in (DATA_PARALLEL, FSDP):
            found += [i for i in indices if rows[i].baseline in names][:1]
    return found + [i for i in indices if rows[i].candidate.layout.as_annotated]


_BY_HAND = 2
"""This many baselines are compiled and measured however slow they are."""

_ALLOW_USUAL = 4
"""Measurements that a budget must allow for data parallel and FSDP to be among them always."""


def promoted(state: SearchState, count: int, taken: Sequence[int]) -> list[int]:
    """The `count` most promising rows that have not gone on yet."""
    entries = [
        promote.Entry(
            index=i,
            estimate=row.propagated,
            family=(
                row.candidate.knobs,
                tuple(axis for axis, _ in row.candidate.layout.activation_rules),
            ),
            program=row.program,
        )
        for i, row in enumerate(state.rows)
        if isinstance(row.propagated, Estimate)
    ]
    gone_on = {*taken, *(i for i, row in enumerate(state.rows) if _has_gone_on(row))}
    done = [e for e in entries if e.index in gone_on]
    chosen = promote.promote(
        entries, count, state.correction, state.limit_bytes, lower_bound(state), done
    )
    return [e.index for e in chosen]


def _has_gone_on(row: Row) -> bool:
    """Whether rung 2 has judged a row, and not rung 1 in its place, which may learn."""
    judged = row.compiled
    return judged is not None and not (
        isinstance(judged, Failure) and judged.stage is Stage.PROPAGATE
    )


def worth_measuring(state: SearchState, indices: Sequence[int]) -> list[int]:
    """Of these rows those that fit and may be the fastest of all that is compiled.

    Of rows that came to one program those that stand for it (`SearchState.standing`).

    The fastest by rung 2 comes first. Then come the rows of `always` and the two fastest baselines,
    however slow they are. What failed on the devices is no longer among them, and leaves nobody
    without hope.
    """
    asked = set(indices)
    times_s = {
        i: state.estimated_s(i)
        for i in state.standing(state.fitting(range(len(state.rows))))
        if not isinstance(state.rows[i].profiled, Failure)
    }
    by_hand = [i for i in sorted(times_s, key=state.estimated_s) if state.rows[i].baseline]
    hopeful = promote.worth_trying(times_s)
    order = dict.fromkeys([*hopeful[:1], *always(state, by_hand), *by_hand[:_BY_HAND], *hopeful])
    return [i for i in order if i in asked]


def reworded(state: SearchState, known: Callable[[Row], bool]) -> Iterator[int]:
    """New rows, one by one: the two fastest that fit, put into the program by other constraints.

    The partition is the same, the compiler's choices after it are not. One that comes to a
    program which another one has is passed over. The second is the next fastest that takes another
    time: what takes the same to the last digit is taken for the same program.

    Args:
      known: whether the journal says what the compiler makes of a row; then it is not lowered.
    """
    times_s = {i: state.estimated_s(i) for i in state.fitting(range(len(state.rows)))}
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
        row = state.rows[index]
        if not state.specs_of(row).sites:
            continue
        if state.stops("compiling", 1.0):
            return
        other = Row(
            problem=row.problem,
            candidate=row.candidate.with_constraints(constraints),
            baseline=row.baseline,
            program=(row.program, constraints),
            propagated=row.propagated,
        )
        if not known(other):
            same = programs.setdefault(index, [state.module_of(row)])
            program = state.module_of(other)
            if program in same or isinstance(program, Failure):
                continue
            same.append(program)
        state.rows.append(other)
        yield len(state.rows) - 1


def smallest(state: SearchState) -> int | None:
    """The row with the least predicted peak, None if rung 2 has judged it, or there is none."""
    peaks = [
        (row.propagated.peak_memory_bytes, i)
        for i, row in enumerate(state.rows)
        if isinstance(row.propagated, Estimate)
    ]
    if not peaks:
        return None
    index = min(peaks)[1]
    return None if _has_gone_on(state.rows[index]) else index


def learn(state: SearchState) -> None:
    """Takes from the measurements how far rung 1 is off; where there are none, from rung 2."""
    pairs = [
        (row.propagated, row.profiled.median_s)
        for row in state.rows
        if isinstance(row.propagated, Estimate) and isinstance(row.profiled, Measurement)
    ] or [(a, b.time_s) for a, b in _pairs(state)]
    if pairs:
        state.correction = promote.learn(pairs)


def lower_bound(state: SearchState) -> float:
    return promote.lower_bound_factor(_pairs(state))


def false_rejections(state: SearchState) -> int:
    """Candidates that rung 1 would have rejected untaught, and that rung 2 found to fit."""
    return sum(
        promote.surely_too_large(a, state.limit_bytes, promote.DEFAULT_LOWER_BOUND)
        and b.peak_memory_bytes <= state.limit_bytes
        for a, b in _pairs(state)
    )


def _pairs(state: SearchState) -> list[tuple[Estimate, Estimate]]:
    return [
        (row.propagated, row.compiled)
        for row in state.rows
        if isinstance(row.propagated, Estimate)
        and isinstance(row.compiled, Estimate)
        and row.candidate.layout.constraints
        is Constraints.USUAL  # else rung 1 judged it in other words
    ]


def _propagated(state: SearchState, index: int) -> Estimate:
    found = state.rows[index].propagated
    assert isinstance(found, Estimate)
    return found


def _fits(state: SearchState, index: int) -> bool:
    """Whether a row fits by rung 1."""
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
