"""What this host is: its processor, and what of cores and memory this process may use."""

import contextlib
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import NamedTuple

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_GENERATION = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
"""Fields of /proc/cpuinfo that tell processors of one name apart, on x86 and on Arm."""


def machine() -> str:
    """The kind of machine this is, as results name it: its architecture and its processor."""
    return f"{platform.machine()} {processor()}".strip()


def cores(cgroups: pathlib.Path = _CGROUPS, of_process: str | None = None) -> int:
    """How many cores this process may use: those of its affinity, or less by its control group.

    A batch system gives a job some of a node's cores, a container gives it a share of their time.
    The limits of the group and of those around it count, of version 2 and of version 1 (kernel
    documentation, admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst, 2026). Parts of a core do
    not count, but one core always does.

    Args:
      cgroups, of_process: as `memory_bytes` has them.
    """
    if hasattr(os, "sched_getaffinity"):
        found = float(len(os.sched_getaffinity(0)))
    else:
        found = float(os.cpu_count() or 1)
    for folder, version in _groups("cpu", cgroups, of_process):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            if version == 2:
                quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
            if int(quota) > 0:  # -1 is no limit
                found = min(found, int(quota) / int(period))
    return max(1, int(found))


def memory_bytes(cgroups: pathlib.Path = _CGROUPS, of_process: str | None = None) -> int:
    """How much memory this process may use: the host's, or less where its control group says so.

    A container or a batch system gives a job some of a node's. The limits of the group and of those
    around it count, of version 2 and of version 1 (kernel documentation, admin-guide/cgroup-v2.rst
    and cgroup-v1/memory.rst, 2026).

    Args:
      cgroups: where the groups are mounted.
      of_process: what /proc/self/cgroup says; None to read it.
    """
    limits = [_physical_bytes()]
    for folder, version in _groups("memory", cgroups, of_process):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limits.append(int((folder / _MEMORY[version].limit).read_text(encoding="utf-8")))
    return min(limit for limit in limits if limit > 0)


def available_bytes(
    proc: pathlib.Path = pathlib.Path("/proc"),
    cgroups: pathlib.Path = _CGROUPS,
    of_process: str | None = None,
) -> int | None:
    """How much memory is left to this process; None where nothing tells.

    What the kernel takes for available (MemAvailable, kernel documentation, filesystems/proc.rst,
    2026), or less where a control group leaves less: its limit, less its usage but for what its
    files have in the page cache and nobody has read lately.

    Args:
      proc: where the kernel says so.
      cgroups, of_process: as `memory_bytes` has them.
    """
    left = []
    with contextlib.suppress(OSError):
        for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                left.append(int(value.split()[0]) * 1024)
    for folder, version in _groups("memory", cgroups, of_process):
        files = _MEMORY[version]
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text(encoding="utf-8"))
            used = int((folder / files.usage).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8").split()
            cached = int(stat[stat.index(files.cached) + 1])
            if limit > 0:
                left.append(limit - used + cached)
    return max(0, min(left)) if left else None


def peak_bytes(proc: pathlib.Path = pathlib.Path("/proc")) -> int:
    """The most memory that this process has held so far; 0 where nothing tells.

    Not by getrusage: what it says covers the process that started this one, too.

    Args:
      proc: where the kernel says so.
    """
    with contextlib.suppress(OSError):
        for line in (proc / "self/status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    return 0


class _MemoryFiles(NamedTuple):
    """Files of a control group's folder, and the field of its memory.stat with cached files."""

    limit: str
    usage: str
    cached: str


_MEMORY = {
    1: _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _MemoryFiles("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups."""


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(
    controller: str, cgroups: pathlib.Path, of_process: str | None
) -> Iterator[tuple[pathlib.Path, int]]:
    """The control groups that bound this process, inner before outer: folders and versions.

    Args:
      controller: what they bound, "memory" or "cpu".
    """
    if of_process is None:
        try:
            of_process = pathlib.Path("/proc/self/cgroup").read_text(encoding="utf-8")
        except OSError:
            return
    for line in of_process.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, version = cgroups, 2
        elif controller in controllers.split(","):
            root, version = cgroups / controller, 1
        else:
            continue
        # In a container the group's name may be one that is seen from outside alone: then the
        # mount's root is the container's own group.
        inner = root / group.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder, version
            if folder == root:
                break


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
