"""How many threads XLA:CPU has: for each core or device one, or what the environment says.

With as many as devices some programs never end: all threads stand in collectives that wait for a
device which has none left (docs/decisions/0035).
"""

import os

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""The first that is a number counts: `DefaultThreadPoolSize` in xla/pjrt/utils.cc (2026)."""


def threads_asked() -> int:
    """What the environment asks for; 0 for nothing."""
    said = (os.environ.get(name, "").strip() for name in _VARIABLES)
    return next((int(text) for text in said if text.isdigit()), 0)


def more_threads(devices: int) -> str:
    """What a user can do where the devices of a program wait for each other."""
    count = max(devices + devices // 2, 2 * threads_asked())
    return (
        f"PJRT_NPROC={count} in the environment, before JAX starts, gives XLA:CPU more threads than"
        " devices, with which such a program may run, here and in your own process"
    )
