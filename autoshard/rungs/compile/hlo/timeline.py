"""When everything in one step happens: the schedule of a compiled program, replayed with prices.

The text is scheduled, so its order is the order of launches. There are three queues: kernels run
one after another; collectives run one after another, over whatever links (one communication
queue); asynchronous copies run one after another. An asynchronous collective takes its place in its
queue where it starts, and kernels wait where it is done; a synchronous one holds up kernels too.
docs/limits.md lists what is not modelled.
"""

import dataclasses
from typing import Protocol

from autoshard.records.layout import MeshShape
from autoshard.records.trial import Collective
from autoshard.records.work import Work as Work
from autoshard.rungs.compile.hlo.records import HloModule
from autoshard.rungs.compile.hlo.steps import ANY, Branch, Call, Launch, Loop, Step, Steps, Wait


class Prices(Protocol):
    """What things cost on a target."""

    def kernel_s(self, work: Work) -> float:
        """Seconds of one kernel launch."""
        ...

    def collective_s(self, one: Collective) -> float:
        """Seconds of one execution; kind, group_size, mesh_axes and bytes are set."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """How long one step takes on one device, seconds.

    Attributes:
      total_s: of one step.
      compute_s: all kernels, and the waits for asynchronous copies.
      communication_s: all collectives, as if nothing overlapped.
      exposed_s: communication that nothing hides: what total_s has beyond compute_s.
      unmodelled: (what, share of total_s in 0..1) of what is priced by its memory traffic alone.
      assumptions: sentences on what had to be assumed.
    """

    total_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    unmodelled: tuple[tuple[str, float], ...]
    assumptions: tuple[str, ...]


def timeline(module: HloModule, mesh: MeshShape, prices: Prices) -> Timeline:
    """Replays one execution of `module`.

    Args:
      module: an optimized, scheduled module; all devices run the same.
      mesh: (mesh axis, size) pairs, major to minor over the device order; () for one device.
      prices: seconds of kernels and collectives.

    Raises:
      ValueError: the mesh has another number of devices than the module.
      HloError: the module holds something that cannot be read, such as a new group notation.
    """
    replay = _Replay(Steps(module, mesh), prices)
    clock = _Clock((0.0, 0.0))
    clock.follow(replay.run(module.entry, (0.0, 0.0)))
    clock.wait(ANY)
    total_s = clock.now_s
    return Timeline(
        total_s=total_s,
        compute_s=clock.compute_s,
        communication_s=clock.communication_s,
        exposed_s=max(0.0, total_s - clock.compute_s),
        unmodelled=tuple(
            (f"{what} x{times}: only its memory traffic", min(1.0, seconds / total_s))
            for what, (times, seconds) in sorted(clock.unmodelled.items())
            if times and total_s
        ),
        assumptions=tuple(clock.assumptions),
    )


_QUEUED = "collectives under way at the same time take turns: one communication queue is modelled"

_Behind = tuple[float, float]
"""How much longer than the kernels the links and the copies are busy, seconds."""


class _Clock:
    """The three queues while a computation runs, in seconds from its start."""

    def __init__(self, behind: _Behind) -> None:
        self.now_s = 0.0
        self.compute_s = 0.0
        self.communication_s = 0.0
        self.unmodelled: dict[str, tuple[int, float]] = {}
        self.assumptions: dict[str, None] = {}
        self._links_s, self._copies_s = behind
        self._arrivals: dict[str, float] = {}
        self._copied: dict[str, float] = {}

    @property
    def behind(self) -> _Behind:
        return max(0.0, self._links_s - self.now_s), max(0.0, self._copies_s - self.now_s)

    def compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.compute_s += seconds

    def exchange(self, seconds: float, key: str | None) -> None:
        if key is not None and self._links_s > self.now_s:
            self.assumptions[_QUEUED] = None
        self._links_s = max(self.now_s, self._links_s) + seconds
        self.communication_s += seconds
        if key is None:
            self.now_s = self._links_s
        else:
            self._arrivals[key] = self._links_s

    def copy(self, seconds: float, key: str) -> None:
        self._copies_s = max(self.now_s, self._copies_s) + seconds
        self._copied[key] = self._copies_s

    def wait(self, key: str) -> None:
        copied_s = self._copies_s if key == ANY else self._copied.get(key, 0.0)
        arrived_s = self._links_s if key == ANY else self._arrivals.get(key, 0.0)
        self.compute(max(0.0, copied_s - self.now_s))
        self.now_s = max(self.now_s, arrived_s)

    def leave_unmodelled(self, what: str, times: int, seconds: float) -> None:
        had = self.unmodelled.get(what, (0, 0.0))
        self.unmodelled[what] = had[0] + times, had[1] + seconds

    def follow(self, other: "_Clock", times: int = 1) -> None:
        """What another clock saw happens next, `times` times over."""
        self.now_s += other.now_s * times
        self.compute_s += other.compute_s * times
        self.communication_s += other.communication_s * times
        self._links_s, self._copies_s = (self.now_s + behind for behind in other.behind)
        for what, (n, seconds) in other.unmodelled.items():
            self.leave_unmodelled(what, n * times, seconds * times)
        self.assumptions.update(other.assumptions)


class _Replay:
    """Runs computations; each once for each state of the queues it meets."""

    def __init__(self, steps: Steps, prices: Prices) -> None:
        self._steps = steps
        self._prices = prices
        self._runs: dict[tuple[str, _Behind], _Clock] = {}

    def run(self, name: str, behind: _Behind) -> _Clock:
        """The clock at the end of a computation.

        Args:
          behind: the queues that it began with.
        """
        key = name, behind
        if key not in self._runs:
            clock = _Clock(behind)
            for step in self._steps.of(name):
                self._take(step, clock)
            self._runs[key] = clock
        return self._runs[key]

    def _take(self, step: Step, clock: _Clock) -> None:
        match step:
            case Launch():
                self._launch(step, clock)
            case Wait():
                clock.wait(step.key)
            case Call():
                clock.assumptions.update(dict.fromkeys(step.assumptions))
                clock.follow(self._turn(step.called, clock.behind))
            case Branch():
                clock.assumptions.update(dict.fromkeys(step.assumptions))
                runs = [self.run(name, clock.behind) for name in step.called]
                clock.follow(max(runs, key=lambda run: run.now_s + max(run.behind)))
            case Loop():
                clock.assumptions.update(dict.fromkeys(step.assumptions))
                if step.turns:
                    clock.follow(self._turn(step.called, clock.behind))
                if step.turns > 1:
                    # What the first iteration leaves in the queues, the second one meets: it is
                    # the one that repeats.
                    clock.follow(self._turn(step.called, clock.behind), step.turns - 1)

    def _launch(self, launch: Launch, clock: _Clock) -> None:
        work = launch.work
        clock.assumptions.update(dict.fromkeys(launch.assumptions))
        for exchange in launch.exchanges:
            clock.exchange(self._prices.collective_s(exchange.collective), exchange.key)
        if launch.exchanges:
            if not (work.matmul_flops or work.element_flops):
                return
            # The collective's price has its memory traffic in it; what is fused with it adds none.
            work = dataclasses.replace(work, bytes=0.0)
        if launch.scalar:
            return
        seconds = self._prices.kernel_s(work)
        if launch.copy_key is not None:
            clock.copy(seconds, launch.copy_key)
        else:
            clock.compute(seconds)
        for target in launch.unmodelled:
            clock.leave_unmodelled(f"custom call {target}", 1, seconds / len(launch.unmodelled))

    def _turn(self, names: tuple[str, ...], behind: _Behind) -> _Clock:
        """Computations one after another."""
        clock = _Clock(behind)
        for name in names:
            clock.follow(self.run(name, clock.behind))
        return clock
