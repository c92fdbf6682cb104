"""Which processor this host has: figures measured on one do not hold on another."""

import os
import pathlib
import platform

_GENERATION = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
"""Fields of /proc/cpuinfo that tell processors of one name apart, on x86 and on Arm."""


def machine() -> str:
    """The kind of machine this is, as results name it: its architecture and its processor."""
    return f"{platform.machine()} {processor()}".strip()


def cores() -> int:
    """How many cores this process may use, where the system says it; else how many there are.

    A batch system gives a job some of a node's.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name and generation, as `described` puts them; "" where nothing tells."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return described(text)


def described(cpuinfo: str) -> str:
    """The first processor of a /proc/cpuinfo.

    A virtual machine may call several generations by one name.

    >>> described("model name : AMD EPYC\\ncpu family : 25\\nmodel : 17\\n\\nmodel : 18")
    'AMD EPYC (cpu family 25, model 17)'
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    generation = ", ".join(f"{name} {fields[name]}" for name in _GENERATION if name in fields)
    name = fields.get("model name", "")
    return f"{name} ({generation})".strip() if generation else name
