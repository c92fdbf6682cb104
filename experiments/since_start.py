"""How long this process has been running, its imports and the interpreter's own start included."""

import os
import pathlib
import time


def since_start_s() -> float:
    """Seconds since the process was started; Linux alone.

    Raises:
      OSError: there is no /proc.
    """
    # proc_pid_stat(5): field 22 is the start in clock ticks since boot; field 2 may hold spaces.
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
