"""Fair racing: which candidate has the shortest step, on a machine whose speed drifts.

Pure logic: the clock is behind an injected `run`. In each round every surviving candidate runs
once, in a fresh random order, so that all share the round's weather; what is compared is the
logarithm of the ratio of two candidates' times *within a round*. On a shared machine one step
varies by 2x, while these ratios stay put.

The statistic is Tukey and McLaughlin's (Sankhya A 25, 1963): the 20 %-trimmed mean of the log
ratios, its standard error from the winsorized variance, Student's t with n - 2g - 1 degrees of
freedom. One bad round in five moves it little. Known shortcomings: the bound is looked at after
every round, so over a long race more than 1 % of the drops are by luck; drift within a round is
averaged by the random order, not removed.
"""

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import scipy.special  # type: ignore[import-untyped]

from autoshard.errors import WorkerError
from autoshard.records.rounds import TRIM, by_round, trimmed_mean
from autoshard.records.trial import Failure, Kind, Stage

Run = Callable[[str, int], Sequence[float] | Failure]
"""(name, steps) -> wall time of each step in seconds."""

COMPLETE = ("one left", "none left", "tie", "max rounds")
"""How a race ends that told what it could."""

INTERRUPTED = "interrupted"
"""How one ends that Ctrl-C stopped: what was measured until then stands."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """How long to race and how sure to be.

    Attributes:
      max_rounds: the race ends after these.
      min_rounds: common rounds before anyone is dropped or a tie is called.
      hopeless: who takes more than so many times as long as the leader in every round leaves
        after two: a shared machine's speed varies by that much, but seldom twice the same way.
      confidence: of the one-sided bounds on the mean log ratio.
      tie: leaders closer than this share of the step time are equal.
      min_turn_s: very short steps are repeated until a turn takes about this long, seconds.
      max_steps: but at most so many in one turn.
      block_steps: steps in a turn when not all fit memory together, so that loading pays.
      process_rounds: rounds in one process, where processes can be renewed.
      near: there, who takes less than so many times as long as the leader is neither dropped nor
        tied by what one process says: two processes differ by as much (docs/decisions/0020).
    """

    max_rounds: int = 30
    min_rounds: int = 5
    hopeless: float = 2.0
    confidence: float = 0.99
    tie: float = 0.01
    min_turn_s: float = 0.01
    max_steps: int = 16
    block_steps: int = 3
    process_rounds: int = 5
    near: float = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a candidate takes of a device's memory, bytes.

    Attributes:
      held: while it is loaded.
      running: beyond that, while it runs; one runs at a time.
    """

    held: int = 0
    running: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One candidate's race.

    Attributes:
      samples_s: every sample, in the order taken.
      rounds: the round of each sample, from 0; the samples of one round pair up with other
        candidates' of that round by their medians.
      dropped: the round after which it left, None if it never did.
      reason: why it left; "" if it did not.
      failure: what stopped it, if something did.
    """

    name: str
    samples_s: tuple[float, ...]
    rounds: tuple[int, ...]
    dropped: int | None = None
    reason: str = ""
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """The outcome.

    Attributes:
      contestants: all candidates, in the order given.
      ranking: names, best first: the survivors by their times in common rounds, then the dropped by
        their ratio to the best in the rounds they shared; failed ones are not in it.
      rounds: rounds begun.
      ended: one of `COMPLETE`, "stopped", `INTERRUPTED`, or why no process could be started to go
        on in.
    """

    contestants: tuple[Contestant, ...]
    ranking: tuple[str, ...]
    rounds: int
    ended: str

    @property
    def winner(self) -> str | None:
        """The best name, None if every candidate failed."""
        return self.ranking[0] if self.ranking else None


@dataclasses.dataclass(slots=True)
class _Lane:
    name: str
    samples_s: list[float] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)
    dropped: int | None = None
    reason: str = ""
    failure: Failure | None = None

    def by_round(self) -> dict[int, float]:
        """The logarithm of the median sample of each round."""
        return by_round(self.samples_s, self.rounds)

    def frozen(self) -> Contestant:
        return Contestant(
            name=self.name,
            samples_s=tuple(self.samples_s),
            rounds=tuple(self.rounds),
            dropped=self.dropped,
            reason=self.reason,
            failure=self.failure,
        )


def race(
    names: Sequence[str],
    run: Run,
    *,
    seed: int,
    settings: RaceSettings = RaceSettings(),
    should_stop: Callable[[], bool] = lambda: False,
    load: Callable[[str], object] = lambda name: None,
    unload: Callable[[str], None] = lambda name: None,
    renew: Callable[[], object] | None = None,
    footprints: Mapping[str, Footprint] | None = None,
    memory_bytes: int | None = None,
) -> RaceResult:
    """Races candidates until one is left, the leaders tie, or time is up.

    Args:
      names: distinct names of the candidates.
      run: runs steps of a loaded candidate. A Failure or an exception drops the candidate, but for
        WorkerError, which ends the race with what it has.
      seed: of the order in each round; same seed and same samples, same race.
      should_stop: asked before each round.
      load, unload: make a candidate ready to run and free its memory. `load` may return or raise a
        failure too. After each load one step runs unrecorded. What is loaded stays so at the end.
      renew: goes over to a new process with what is loaded; None where that cannot be.
      footprints, memory_bytes: what each candidate takes, and what there is on a device. Where all
        do not fit, each round runs them in blocks that do, with `settings.block_steps` steps a
        turn.
    """
    lanes = {name: _Lane(name) for name in names}
    if len(lanes) != len(names):
        raise ValueError(f"names must be distinct, got {list(names)}")
    track = _Track(run, load, unload, footprints or {}, memory_bytes)
    rounds = itertools.count()
    try:
        ended = _rounds(
            lanes,
            track,
            rounds,
            random.Random(seed),
            settings,
            should_stop,
            renew,
        )
    except KeyboardInterrupt:
        ended = INTERRUPTED  # who asked goes on with what there is, and raises it again
    return RaceResult(
        contestants=tuple(lane.frozen() for lane in lanes.values()),
        ranking=_ranking(list(lanes.values())),
        rounds=next(rounds),
        ended=ended,
    )


def _rounds(
    lanes: Mapping[str, "_Lane"],
    track: "_Track",
    rounds: Iterator[int],
    order: random.Random,
    settings: RaceSettings,
    should_stop: Callable[[], bool],
    renew: Callable[[], object] | None,
) -> str:
    """Runs rounds, each with a number of its own, until the race has ended; how it did."""
    steps = 1
    round_ = 0
    ended = ""
    while not ended:
        alive = [lane for lane in lanes.values() if lane.dropped is None]
        if not alive or (len(alive) == 1 and round_ >= settings.min_rounds):
            ended = "one left" if alive else "none left"
        elif round_ >= settings.max_rounds:
            ended = "max rounds"
        elif should_stop():
            ended = "stopped"
        if ended:
            break
        if renew is not None and round_ and round_ % settings.process_rounds == 0:
            renew()
        round_ = next(rounds)
        order.shuffle(alive)
        blocks = track.blocks(alive)
        turn = steps if len(blocks) == 1 else max(steps, settings.block_steps)
        try:
            for block in blocks:
                track.enter(block, round_)
                for lane in block:
                    if lane.dropped is None:
                        track.turn(lane, turn, round_)
        except WorkerError as error:  # that says nothing of the lanes
            ended = str(error)
        round_ += 1
        alive = [lane for lane in alive if lane.dropped is None]
        if ended:
            break
        if alive:
            shortest = min(min(lane.samples_s) for lane in alive)
            steps = min(settings.max_steps, max(1, math.ceil(settings.min_turn_s / shortest)))
        if len(alive) > 1 and _judge(alive, round_ - 1, settings, renew is not None):
            ended = "tie"
        for lane in alive:
            if lane.dropped is not None:
                track.leave(lane)
    return ended


class _Track:
    """Who is loaded, and every call that may fail."""

    def __init__(
        self,
        run: Run,
        load: Callable[[str], object],
        unload: Callable[[str], None],
        footprints: Mapping[str, Footprint],
        memory_bytes: int | None,
    ):
        self._run, self._load, self._unload = run, load, unload
        self._footprints, self._limit = footprints, memory_bytes
        self._loaded: set[str] = set()

    def blocks(self, lanes: Sequence[_Lane]) -> list[list[_Lane]]:
        """Consecutive lanes that fit memory together; one too large alone is still tried alone."""
        blocks: list[list[_Lane]] = []
        for lane in lanes:
            if not blocks or not self._fit({lane.name, *(other.name for other in blocks[-1])}):
                blocks.append([])
            blocks[-1].append(lane)
        return blocks

    def enter(self, block: Sequence[_Lane], round_: int) -> None:
        """Makes the block loaded, and others too only as far as they fit beside it."""
        names = {lane.name for lane in block}
        if not self._fit(names | self._loaded):
            for name in sorted(self._loaded - names):
                self._unload(name)
            self._loaded &= names
        for lane in block:
            if lane.name not in self._loaded:
                failure = self._guarded(self._load, lane.name)
                if not isinstance(failure, Failure):
                    self._loaded.add(lane.name)
                    failure = self._guarded(self._run, lane.name, 1)  # warm-up
                if isinstance(failure, Failure):
                    self._fail(lane, failure, round_)

    def _fit(self, names: Collection[str]) -> bool:
        """Whether all these can be loaded and each of them can run."""
        if self._limit is None:
            return True
        taken = [self._footprints.get(name, Footprint()) for name in names]
        return sum(t.held for t in taken) + max(t.running for t in taken) <= self._limit

    def turn(self, lane: _Lane, steps: int, round_: int) -> None:
        samples = self._guarded(self._run, lane.name, steps)
        if isinstance(samples, Failure):
            self._fail(lane, samples, round_)
        else:
            lane.samples_s += samples  # type: ignore[arg-type]
            lane.rounds += [round_] * (len(lane.samples_s) - len(lane.rounds))

    def leave(self, lane: _Lane) -> None:
        if lane.name in self._loaded:
            self._loaded.discard(lane.name)
            self._unload(lane.name)

    def _fail(self, lane: _Lane, failure: Failure, round_: int) -> None:
        lane.dropped, lane.reason, lane.failure = round_, f"failed: {failure.kind}", failure
        self.leave(lane)

    @staticmethod
    def _guarded(call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args)
        except WorkerError:
            raise
        except Exception as error:  # one candidate's trouble must not end the race
            message = f"{type(error).__name__}: {error}"
            return Failure(stage=Stage.PROFILE, kind=Kind.CRASH, message=message)


def _judge(alive: Sequence[_Lane], round_: int, settings: RaceSettings, renewed: bool) -> bool:
    """Drops who cannot win any more; returns whether those left are tied."""
    leader = min(alive, key=_standing(alive))
    tied = True
    for lane in alive:
        if lane is leader:
            continue
        ratios = _log_ratios(lane, leader)
        if len(ratios) < settings.min_rounds:
            if len(ratios) >= 2 and min(ratios.values()) > math.log(settings.hopeless):
                lane.dropped = round_
                lane.reason = (
                    f"more than {settings.hopeless:g} times as long as {leader.name} in each of"
                    f" {len(ratios)} rounds"
                )
            else:
                tied = False
            continue
        mean, margin = with_margin(ratios.values(), settings.confidence)
        if renewed and mean - margin <= math.log(settings.near):
            margin = max(margin, _margin_of_processes(ratios, settings))
        if mean - margin > 0:
            lane.dropped = round_
            lane.reason = (
                f"{math.expm1(mean):.1%} slower than {leader.name} in {len(ratios)} rounds, "
                f"at {settings.confidence:.0%} confidence at least {math.expm1(mean - margin):.1%}"
            )
        elif mean + margin > math.log1p(settings.tie):
            tied = False
    return tied and sum(lane.dropped is None for lane in alive) > 1


def with_margin(values: Collection[float], confidence: float) -> tuple[float, float]:
    """The 20 %-trimmed mean and the half-width of its one-sided confidence bound.

    >>> mean, margin = with_margin([0.1, 0.1, 0.1, 0.1, 9.0], 0.99)
    >>> round(mean, 6), round(margin, 6)
    (0.1, 0.0)
    """
    n = len(values)
    cut = int(TRIM * n)
    ordered, mean = sorted(values), trimmed_mean(values)
    if n - 2 * cut < 2:
        return mean, math.inf
    ordered[:cut] = [ordered[cut]] * cut
    ordered[n - cut :] = [ordered[n - cut - 1]] * cut
    error = statistics.stdev(ordered) / ((1 - 2 * TRIM) * math.sqrt(n))
    return mean, float(scipy.special.stdtrit(n - 2 * cut - 1, confidence)) * error


def _margin_of_processes(ratios: Mapping[int, float], settings: RaceSettings) -> float:
    """Half-width of the one-sided bound on the mean over processes; only whole ones count."""
    by_process: dict[int, list[float]] = {}
    for round_, ratio in ratios.items():
        by_process.setdefault(round_ // settings.process_rounds, []).append(ratio)
    means = [
        trimmed_mean(values)
        for values in by_process.values()
        if len(values) == settings.process_rounds
    ]
    if len(means) < 2:
        return math.inf
    error = statistics.stdev(means) / math.sqrt(len(means))
    return float(scipy.special.stdtrit(len(means) - 1, settings.confidence)) * error


def _log_ratios(lane: _Lane, other: _Lane) -> dict[int, float]:
    """Round -> log(time of lane / time of other), of the rounds that both ran."""
    mine, theirs = lane.by_round(), other.by_round()
    return {r: mine[r] - theirs[r] for r in mine if r in theirs}


def _standing(lanes: Sequence[_Lane]) -> Callable[[_Lane], tuple[float, str]]:
    """A sort key: trimmed mean, over the rounds all ran, of log times over the round's; the name.

    The round's time is the median over the lanes. Without it the trimming would take other rounds
    from each lane, and a machine that is slow in half of the rounds would decide the order.
    """
    tables = {lane.name: lane.by_round() for lane in lanes}
    common = set.intersection(*(set(table) for table in tables.values()))
    weather = {r: statistics.median(table[r] for table in tables.values()) for r in common}

    def key(lane: _Lane) -> tuple[float, str]:
        table = tables[lane.name]
        times = [table[r] - weather[r] for r in sorted(common)] or table.values()
        return trimmed_mean(times), lane.name

    return key


def _ranking(lanes: Sequence[_Lane]) -> tuple[str, ...]:
    alive = [lane for lane in lanes if lane.dropped is None and lane.samples_s]
    slower = [lane for lane in lanes if lane.dropped is not None and lane.failure is None]
    ranked = sorted(alive, key=_standing(alive)) if alive else []
    if slower:
        yardstick = ranked[0] if ranked else max(slower, key=lambda lane: len(lane.by_round()))

        def behind(lane: _Lane) -> tuple[float, str]:
            return trimmed_mean(_log_ratios(lane, yardstick).values()), lane.name

        ranked += sorted(slower, key=behind)
    return tuple(lane.name for lane in ranked)
