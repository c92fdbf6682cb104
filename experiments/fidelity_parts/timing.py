"""Step times of many programs: rounds in which every program runs, and fresh pairs.

Unlike the race of a search, no program ever leaves: the slow ones are needed for rank correlation.
Programs run in a child process of their own, not in the one that searched.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from autoshard.records.module import Module
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.profile.race import (
    COMPLETE,
    INTERRUPTED,
    Footprint,
    RaceSettings,
    Runner,
    race,
)
from autoshard.rungs.profile.runner import Runner
from experiments import pairs


class MeasuringError(RuntimeError):
    """A program that had to run did not."""


def tried(
    bench: Runner, programs: Mapping[str, Module], tell: Callable[[str], None]
) -> dict[str, Failure]:
    """Loads each program and runs it by itself, so that one that kills the child costs only itself.

    Returns:
      Why those failed that did.
    """
    failed: dict[str, Failure] = {}
    for done, (name, module) in enumerate(programs.items()):
        tell(f"trying {name}, {done} of {len(programs)} done")
        outcome: object = bench.load(name, module)
        if not isinstance(outcome, Failure):
            outcome = bench.run(name, 1)
        bench.unload(name)
        if isinstance(outcome, Failure):
            failed[name] = outcome
    return failed


def in_rounds(
    bench: Runner,
    programs: Mapping[str, Module],
    held: Mapping[str, int],
    *,
    rounds: int,
    seed: int,
    memory_bytes: int,
    begun: Mapping[str, Runner] | None = None,
    keep: Callable[[Mapping[str, Runner]], None] = lambda ran: None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Runner]:
    """Runs every program once in each round, in a fresh random order; all samples are kept.

    Steps shorter than 10 ms are repeated within a turn, and processes renewed, as in the races of a
    search.

    Args:
      bench: its inputs are set.
      held: what each program holds on a device between its turns, bytes. Where not all fit at once,
        a round runs them in blocks, with three steps a turn.
      memory_bytes: what all of them may hold on a device at once.
      begun: the rounds that are over already, of all these programs; they count, and their samples
        come first.
      keep: given all rounds, of earlier calls too, at the end or where Ctrl-C stops them.

    Returns:
      One entry for each program; those that failed say why.

    Raises:
      MeasuringError: the rounds came to an end early, for want of a process to run them in.
    """
    earlier = dict(begun or {})
    first = 1 + max((r for runner in earlier.values() for r in runner.rounds), default=-1)
    on_progress(f"running {len(programs)} programs in {rounds - first} rounds")
    number = first

    def progress() -> bool:
        nonlocal number
        number += 1
        on_progress(f"round {number} of {rounds}")
        return False

    def together(runners: Sequence[Runner]) -> dict[str, Runner]:
        return {one.name: _joined(earlier.get(one.name), one, first) for one in runners}

    result = race(
        list(programs),
        bench.run,
        seed=seed + first,
        # Nobody is judged before the last round is over, so nobody is dropped.
        settings=RaceSettings(max_rounds=rounds - first, min_rounds=rounds + 1, hopeless=math.inf),
        should_stop=progress,
        load=lambda name: bench.load(name, programs[name]),
        unload=bench.unload,
        renew=bench.renew,
        footprints={name: Footprint(held=size) for name, size in held.items()},
        memory_bytes=memory_bytes,
    )
    if result.ended == INTERRUPTED:
        keep(together(_whole(result.runners)))
        raise KeyboardInterrupt
    ran = together(result.runners)
    keep(ran)
    if programs and result.ended not in COMPLETE:
        raise MeasuringError(f"after {number - 1} of {rounds} rounds: {result.ended}")
    return ran


def _whole(runners: Sequence[Runner]) -> list[Runner]:
    """The rounds that every program ran; those that failed show the rounds that they ran."""
    whole = min((len(set(one.rounds)) for one in runners if one.failure is None), default=0)
    found = []
    for one in runners:
        count = sum(number < whole for number in one.rounds)
        found.append(
            dataclasses.replace(one, rounds=one.rounds[:count], samples_s=one.samples_s[:count])
        )
    return found


def _joined(earlier: Runner | None, later: Runner, first: int) -> Runner:
    """The rounds of both, the later ones numbered from `first` on."""
    rounds = tuple(first + number for number in later.rounds)
    if earlier is not None:
        rounds, samples_s = earlier.rounds + rounds, earlier.samples_s + later.samples_s
        later = dataclasses.replace(later, samples_s=samples_s)
    dropped = None if later.dropped is None else first + later.dropped
    return dataclasses.replace(later, rounds=rounds, dropped=dropped)


def fresh_pair(
    bench: Runner, first: Module, second: Module, *, limit_s: float, seed: int
) -> pairs.Comparison:
    """Interleaved pairs of two programs; times are the bench's, taken beside the devices.

    Raises:
      MeasuringError: one of them failed.
    """
    now_s = 0.0

    def runner(name: str, module: Module) -> Callable[[], None]:
        _must(name, bench.load(name, module))

        def run() -> None:
            nonlocal now_s
            samples = bench.run(name, 1)
            _must(name, samples)
            assert not isinstance(samples, Failure)
            now_s += sum(samples)

        return run

    return pairs.compare(
        runner("first", first),
        runner("second", second),
        limit_s=limit_s,
        seed=seed,
        clock=lambda: now_s,
    )


def _must(name: str, outcome: object) -> None:
    if isinstance(outcome, Failure):
        raise MeasuringError(f"{name} failed in fresh pairs: {outcome.kind}, {outcome.message}")


def too_large(peak_bytes: int, limit_bytes: int) -> Failure:
    """What is recorded of a program that does not fit."""
    return Failure(
        stage=Stage.COMPILE,
        kind=Kind.OOM,
        message=f"needs {peak_bytes} bytes a device, the limit is {limit_bytes}",
        missing_bytes=peak_bytes - limit_bytes,
    )
