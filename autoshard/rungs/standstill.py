"""Tells a process whose devices wait for each other for ever from one that takes its time.

XLA:CPU says after 20 seconds that a collective may be stuck, and ends the process 40 seconds later
(docs/decisions/0035). It may be wrong, where a device computes for so long; but who has said so and
uses no processor since waits for nothing that will come.
"""

import os
from pathlib import Path

QUIET_S = 5.0
"""So long nothing may be computed, seconds."""

_STUCK = b"may be stuck"
_LEAST_SHARE = 0.01  # of one processor: threads that wait wake up now and then


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

    def seen(self, now_s: float) -> bool:
        """Whether it stands still; asked every second or so.

        Args:
          now_s: of any clock that goes on.
        """
        if not self._warned and not self._warning_came():
            return False
        used_s = _processor_s(self._pid)
        if used_s is None:
            return False
        begin_s, before_s = self._since or (now_s, used_s)
        if self._since is None or used_s - before_s > _LEAST_SHARE * QUIET_S:
            self._since = now_s, used_s
            return False
        return now_s - begin_s >= QUIET_S

    def _warning_came(self) -> bool:
        if _size(self._log) > self._read:
            with self._log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            # A part of the words may have been written yet.
            self._read += max(0, len(new) - len(_STUCK))
            self._warned = _STUCK in new
        return self._warned


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _processor_s(pid: int) -> float | None:
    """What a process has used of processors so far, seconds; None where the system does not say."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:
        return None
    user, system = after_name.split()[11:13]  # proc(5): fields 14 and 15, in clock ticks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
