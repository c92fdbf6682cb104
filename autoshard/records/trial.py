"""What the rungs say of a candidate: estimates, measurements, failures; all kept in a trial."""

import dataclasses
import enum
import math
import statistics

from autoshard.records.layout import Candidate
from autoshard.records.module import Module
from autoshard.records.rounds import by_round, trimmed_mean


class Rung(enum.StrEnum):
    """The three ways to judge a candidate, cheapest first."""

    PROPAGATE = "propagate"
    COMPILE = "compile"
    PROFILE = "profile"


class Stage(enum.StrEnum):
    """Where a candidate failed."""

    TRACE = "trace"
    PROPAGATE = "propagate"
    COMPILE = "compile"
    PROFILE = "profile"


class Kind(enum.StrEnum):
    """How a candidate failed."""

    INFEASIBLE = "infeasible"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    NUMERICS = "numerics"
    UNSUPPORTED = "unsupported"


COLLECTIVE_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)
"""The kinds of collectives that have a price."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communicating operation, or several alike.

    Attributes:
      kind: one of `COLLECTIVE_KINDS`.
      group_size: devices that take part together.
      mesh_axes: the mesh axes the group runs over, or parts of them (`"x":(2)4`, see `subaxes`);
        empty where groups are no product of them.
      bytes: payload of one execution on one device, in bytes: the larger of the local operand and
        the local result.
      arrays: how many arrays one execution sends, all of them in `bytes`.
      count: executions in one step, loop trips included.
      source: where in the user's step it comes from, `file:line` or an operation name; may be "".
      members: of a group that is no product of axes, the places in the mesh; else empty.
    """

    kind: str
    group_size: int
    mesh_axes: tuple[str, ...]
    bytes: int
    count: int
    source: str = ""
    members: tuple[int, ...] = ()
    arrays: int = 1

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What rung 1 or rung 2 predicts for one step of a candidate, for one device.

    Attributes:
      rung: which rung says it.
      time_s: predicted step time, seconds.
      compute_s, communication_s: the two parts of it (not overlapped unless the model says so).
      exposed_s: communication that no kernel hides, seconds; None in records that do not say.
      peak_memory_bytes: arguments, outputs not aliased to them, and temporaries at the peak.
      state_bytes: the part of it that the state alone takes.
      flops: floating-point operations a device executes, loop trips included.
      bytes_accessed: memory traffic a device causes, loop trips included.
      op_count: kernels a device launches, loop trips included.
      collectives: every communicating operation.
      dropped: sentences on what divisibility took away.
      unmodelled: (what, share of time_s in 0..1 that its known part takes; 0 where nothing of it
        is priced); empty means everything was modelled.
      assumptions: sentences on what had to be assumed.
      warnings: the partitioner's warnings of bad reshards, one line each.
      elapsed_s: what the judgement cost.
    """

    rung: Rung
    time_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: int
    state_bytes: int
    flops: float
    bytes_accessed: float
    op_count: int
    collectives: tuple[Collective, ...] = ()
    dropped: tuple[str, ...] = ()
    unmodelled: tuple[tuple[str, float], ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    exposed_s: float | None = None

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes communicated a step and device, by kind of collective."""
        total: dict[str, int] = {}
        for c in self.collectives:
            total[c.kind] = total.get(c.kind, 0) + c.total_bytes
        return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Where one device's time went in a profiled step, seconds; `idle_s` is the rest."""

    device: str
    compute_s: float
    communication_s: float
    idle_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What rung 3 measured: every sample, in the order taken.

    Attributes:
      samples_s: wall time of each step, seconds (`rungs.bench.Runner.run` says from when to when).
      rounds: for each sample the round it was taken in; samples of one round pair up.
      devices: the profile of each device, empty where no trace was taken.
      numerics: "exact", "relative", "unchecked", or "unsharded": on one device, where
        it is what others are compared with, and finite.
      numerics_error: error of a state leaf's change or of a metric, relative to it and to what
        rounding may do to it (`numerics.LeafError`), of the leaf or metric that comes closest
        to what is allowed; None if unchecked.
      numerics_where: the pytree path of that leaf or metric.
      numerics_allowed: the largest error that passes there; None if unchecked, and in records of
        before.
      trace: folder of the profiler trace, or "".
    """

    samples_s: tuple[float, ...]
    rounds: tuple[int, ...]
    devices: tuple[DeviceProfile, ...] = ()
    numerics: str = "unchecked"
    numerics_error: float | None = None
    numerics_where: str = ""
    numerics_allowed: float | None = None
    trace: str = ""
    elapsed_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    def quantile_s(self, q: float) -> float:
        """The q-quantile (0..1) of the samples by linear interpolation, seconds."""
        ordered = sorted(self.samples_s)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rung has no answer for a candidate. A value, never an exception, never inf.

    Attributes:
      message: at most `LONGEST_MESSAGE` characters. The middle of a longer one is left out: XLA
        may print a whole program or all buffers, and a journal keeps every failure.
      missing_bytes: for an OOM, by how much the candidate exceeds the limit; else None.
    """

    stage: Stage
    kind: Kind
    message: str
    elapsed_s: float = 0.0
    missing_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", _shortened(self.message))


LONGEST_MESSAGE = 4000


def _shortened(text: str) -> str:
    """The head and the tail of a text that is too long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    head, tail = LONGEST_MESSAGE * 5 // 8, LONGEST_MESSAGE // 4
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[-tail:]}"


def paired_ratio(a: Measurement, b: Measurement) -> float | None:
    """How many times as long b's step takes as a's, from rounds in which both ran.

    By what a race ranks: the trimmed mean, over the rounds in which both ran, of the logarithm of
    the ratio of each round's medians. Machines drift, so samples of different rounds say little.
    None without a common round.
    """

    first, second = by_round(a.samples_s, a.rounds), by_round(b.samples_s, b.rounds)
    logs = [second[number] - first[number] for number in first.keys() & second.keys()]
    return math.exp(trimmed_mean(logs)) if logs else None


def relative_time(fastest: Measurement, other: Measurement) -> float:
    """How many times as long other's step takes as that of the one that a race ranked first.

    Rankings and tables go by this number, so that they never contradict each other. It is
    `paired_ratio`, or the ratio of the medians where no round is common. It is at least 1: the race
    compares all that are left at once, and rounds that only these two have in common may say that
    other is a little faster.
    """
    ratio = paired_ratio(fastest, other)
    return max(1.0, other.median_s / fastest.median_s if ratio is None else ratio)


Outcome = Estimate | Measurement | Failure


@dataclasses.dataclass(slots=True, kw_only=True)
class Trial:
    """A candidate with all that the rungs say of it. Each rung fills in its own field.

    Attributes:
      baseline: the name of the baseline it is, or "".
      problem: index of the knob setting that it belongs to, in the search.
      shardings: equal for two trials of one search that put the same shardings at the same places.
        None outside a search.
      digest: of the lowered program, once the search or its journal knows it. Trials of one knob
        setting with one digest came to one program, by constraints that the lowering leaves out.
      module: the lowered program, while a search runs.
    """

    candidate: Candidate
    propagated: Estimate | Failure
    compiled: Estimate | Failure | None = None
    profiled: Measurement | Failure | None = None
    baseline: str = ""
    problem: int = dataclasses.field(default=0, compare=False)
    shardings: object = dataclasses.field(default=None, compare=False, repr=False)
    digest: str = dataclasses.field(default="", compare=False)
    module: Module | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the trial, if one did."""
        for outcome in (self.profiled, self.compiled, self.propagated):
            if isinstance(outcome, Failure):
                return outcome
        return None

    @property
    def was_compiled(self) -> bool:
        """Whether the compiler saw it: not where rung 1 alone rejected it, as too large."""
        judged = self.compiled
        return isinstance(judged, Estimate) or (
            isinstance(judged, Failure) and judged.stage is Stage.COMPILE
        )

    @property
    def estimate(self) -> Estimate | None:
        """The best estimate there is: the compiler's before the propagation's."""
        for outcome in (self.compiled, self.propagated):
            if isinstance(outcome, Estimate):
                return outcome
        return None
