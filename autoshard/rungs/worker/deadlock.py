"""Tells a process whose devices wait for each other for ever from one that takes its time.

XLA:CPU says after 20 seconds that a collective may be stuck, and ends the process 40 seconds later
(docs/decisions/0035). It may be wrong, where a device computes for so long, and then says that too;
but who has said so, uses no processor since, and has no thread that would or that waits for a disk,
waits for nothing that will come.
"""

import math
import os
from pathlib import Path

QUIET_S = 5.0
"""So long nothing may be computed, seconds."""

_STUCK, _UNSTUCK = b"may be stuck", b"unstuck waiting"
_LEAST_SHARE = 0.01  # of one processor: threads that wait wake up now and then
_LOOKS_APART_S = 3.0  # who was asked longer ago may have been stopped, or the watcher was
_ASLEEP = frozenset("SI")  # proc(5): not running, stopped, or waiting for a disk


class Standstill:
    """Watches a process during one call.

    Args:
      pid: of the process.
      log: the file behind its stderr; what stands there already is of earlier calls.
    """

    def __init__(self, pid: int, log: Path):
        self._pid, self._log = pid, log
        self._read = _size(log)
        self._warned = False
        self._since: tuple[float, float] | None = None
        self._looked_s = -math.inf

    def seen(self, now_s: float) -> bool:
        """Whether it stands still; asked every second or so.

        Args:
          now_s: of any clock that goes on.
        """
        self._listen()
        used_s = _processor_s(self._pid) if self._warned else None
        looked_s, self._looked_s = self._looked_s, now_s
        if used_s is None or not _all_asleep(self._pid) or now_s - looked_s > _LOOKS_APART_S:
            self._since = None
            return False
        begin_s, before_s = self._since or (now_s, used_s)
        if self._since is None or used_s - before_s > _LEAST_SHARE * QUIET_S:
            self._since = now_s, used_s
            return False
        return now_s - begin_s >= QUIET_S

    def _listen(self) -> None:
        """Reads what came into the log: which word of XLA's is its last."""
        if _size(self._log) <= self._read:
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += max(0, len(new) - len(_UNSTUCK))  # the end of a word may still come
        if _STUCK in new or _UNSTUCK in new:
            self._warned = new.rfind(_STUCK) > new.rfind(_UNSTUCK)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _processor_s(pid: int) -> float | None:
    """What a process has used of processors so far, seconds; None where the system does not say."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    if fields is None:
        return None
    user, system = fields[11:13]  # proc(5): fields 14 and 15, in clock ticks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _all_asleep(pid: int) -> bool:
    """Whether no thread of a process runs, would run, or waits for a disk."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    states = [fields[0] for thread in threads if (fields := _fields(thread)) is not None]
    return _ASLEEP.issuperset(states)


def _fields(stat: Path) -> list[str] | None:
    """Of a file of proc(5) `stat`, what follows the name, from the state on; None if it is gone."""
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
