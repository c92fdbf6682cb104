"""Reads a profiler trace: where the time of each device went.

Two kinds of trace. On CPU every executed operation is an event of the plane "/host:CPU" that
names its device (stats `device_ordinal` and `hlo_op`, jaxlib 0.10.2 and 0.12.0), whichever thread
of the shared pool ran it; so the eight fake devices are told apart. On GPU and TPU each device
has a plane of its own: streams of kernels, or the line "XLA Ops".

What the numbers mean, and what they do not:
- `communication_s` is the time inside collectives that no computation of the same device hides.
  Waiting for the other devices is part of it, as it is of an NCCL kernel: on CPU nearly all of it
  is the rendezvous.
- Fake devices share the machine's cores. An operation's time on CPU includes being descheduled,
  and a device idles where another has its core; the three numbers of one device say how its step
  went here, not how fast its work is.
- The GPU part was seen on traces of one H100 (jax 0.11.2); of collectives there, and of TPUs, it
  follows the format's documentation and is tested on made-up traces alone.
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from autoshard.records.trial import DeviceProfile

Interval = tuple[float, float]

_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-(permute|broadcast)"
    r"|nccl|rccl|MemcpyP2P|^(send|recv)(-done)?\b",
    re.IGNORECASE,
)
_CONTAINER = re.compile(r"^(while|conditional|call)\b")
_DEVICE_PLANE = re.compile(r"^/device:((?:GPU|TPU):\d+)$")


def read_trace(folder: str, steps: int) -> tuple[DeviceProfile, ...]:
    """Splits the time of each device in a trace of `steps` steps; seconds for one step.

    The three parts of a device add up to the span from the first operation on any device to the
    last, divided by the steps: so what the host does between steps is idle time.

    Args:
      folder: what `LocalRunner.trace` returned; of several traces in it the last counts.
      steps: how many steps were traced.

    Returns:
      One profile for each device, in order; empty if the trace holds no device events.

    Raises:
      FileNotFoundError: no trace is there.
    """
    files = sorted(Path(folder).glob("**/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no *.xplane.pb under {folder}")
    return split(jax.profiler.ProfileData.from_file(str(files[-1])), steps)


def split(data: jax.profiler.ProfileData, steps: int) -> tuple[DeviceProfile, ...]:
    """`read_trace` of data that is already in memory."""
    compute: dict[str, list[Interval]] = {}
    communication: dict[str, list[Interval]] = {}
    with warnings.catch_warnings():  # nanobind: "builtin type event_stats has no __module__"
        warnings.simplefilter("ignore", DeprecationWarning)
        for device, operation, interval in _operations(data):
            compute.setdefault(device, [])
            communication.setdefault(device, [])
            table = communication if _COLLECTIVE.search(operation) else compute
            table[device].append(interval)
    everything = [i for table in (compute, communication) for row in table.values() for i in row]
    if not everything:
        return ()
    span = max(end for _, end in everything) - min(begin for begin, _ in everything)
    profiles = []
    for device in sorted(compute, key=lambda name: (name[:3], int(name[4:]))):
        computing = _length(compute[device])
        busy = _length(compute[device] + communication[device])
        profiles.append(
            DeviceProfile(
                device=device,
                compute_s=computing / steps,
                communication_s=(busy - computing) / steps,
                idle_s=(span - busy) / steps,
            )
        )
    return tuple(profiles)


def _operations(data: jax.profiler.ProfileData) -> Iterator[tuple[str, str, Interval]]:
    """(device, operation, when in seconds) of each operation that a device executed.

    Loops and branches are left out: their bodies are there.
    """
    for plane in data.planes:
        if plane.name == "/host:CPU":
            found = _cpu_operations(plane)
        elif match := _DEVICE_PLANE.match(plane.name):
            found = ((match[1], *rest) for rest in _device_operations(plane))
        else:
            continue
        for device, operation, begin_ns, duration_ns in found:
            if not _CONTAINER.match(operation):
                yield device, operation, (begin_ns * 1e-9, (begin_ns + duration_ns) * 1e-9)


def _cpu_operations(plane: object) -> Iterator[tuple[str, str, float, float]]:
    for line in plane.lines:  # type: ignore[attr-defined]
        for event in line.events:
            if event.duration_ns <= 0 or event.name.startswith(("Threadpool", "end: ")):
                continue  # most events; asking each for its stats takes seconds
            stats = dict(event.stats)
            if "hlo_op" in stats and "device_ordinal" in stats:
                device = f"CPU:{stats['device_ordinal']}"
                yield device, str(stats["hlo_op"]), event.start_ns, event.duration_ns


def _device_operations(plane: object) -> Iterator[tuple[str, float, float]]:
    lines = list(plane.lines)  # type: ignore[attr-defined]
    streams = [line for line in lines if line.name.startswith("Stream #")]
    for line in streams or [li for li in lines if li.name in ("XLA Ops", "Async XLA Ops")]:
        for event in line.events:
            stats = dict(event.stats) if streams else {}
            # A TPU event is named by its whole instruction: keep the name, not the operands.
            name = event.name.split(" = ")[0].lstrip("%")
            operation = f"{stats['hlo_op']} {name}" if "hlo_op" in stats else name
            if line.name == "Async XLA Ops" and not _COLLECTIVE.search(operation):
                continue  # copies in the background
            yield operation, event.start_ns, event.duration_ns


def _length(intervals: list[Interval]) -> float:
    """The total length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
