"""Processors by name and generation."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

from autoshard.target.host import (
    available_bytes,
    cores,
    described,
    machine,
    memory_bytes,
    peak_bytes,
    processor,
)

X86 = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n"


def test_two_generations_of_one_name_are_told_apart() -> None:
    older, newer = (described(X86.format(*both)) for both in ((25, 17), (26, 2)))
    assert older == "AMD EPYC (cpu family 25, model 17)" != newer
    assert described(X86.format(25, 17) + "\n" + X86.format(26, 2)) == older


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", ""),
        ("model name\t: Some Processor\n", "Some Processor"),
        (
            "CPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n",
            "(CPU implementer 0x41, CPU part 0xd0c, CPU variant 0x3)",
        ),
    ],
)
def test_what_is_not_told_is_left_out(text: str, name: str) -> None:
    assert described(text) == name


def test_this_host_has_one() -> None:
    assert processor() and "\n" not in processor()


def test_a_machine_is_its_architecture_and_its_processor() -> None:
    architecture, _, rest = machine().partition(" ")
    assert architecture == platform.machine() and rest == processor()


def test_only_the_cores_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert cores(of_process="") == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores(of_process="") == (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {}, 8),
        ("0::/job", {"job/cpu.max": "250000 100000"}, 2),
        ("0::/job", {"job/cpu.max": "50000 100000"}, 1),
        ("0::/job", {"job/cpu.max": "3200000 100000"}, 8),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3),
        (
            "5:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            "5:cpu,cpuacct:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            8,
        ),
        (
            "5:memory:/job",
            {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"},
            8,
        ),
    ],
)
def test_a_process_has_no_more_cores_than_its_control_group_has_time_for(
    of_process: str,
    files: dict[str, str],
    expected: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path, files)
    assert cores(tmp_path, of_process) == expected


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_the_peak_is_that_of_this_program_alone(tmp_path: pathlib.Path) -> None:
    """getrusage says that of a larger process that started this one."""
    assert peak_bytes(tmp_path) == 0, "nothing tells"
    write(tmp_path, {"self/status": "VmPeak:\t 9000 kB\nVmHWM:\t    8 kB\nVmRSS:\t 4 kB"})
    assert peak_bytes(tmp_path) == 8192


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_small_child_of_a_large_process_has_a_small_peak() -> None:
    code = "from autoshard.target import host; print(host.peak_bytes())"
    run = f"subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    large = f"import subprocess, sys; held = b'x' * (400 << 20); {run}"
    done = subprocess.run([sys.executable, "-c", large], capture_output=True, check=True)
    assert 1 << 20 < int(done.stdout) < 200 << 20


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {}, None),
        ("", {}, None),
        ("0::/", {"memory.max": "4096"}, 4096),
        ("0::/job/step", {"job/memory.max": "4096", "job/step/memory.max": "max"}, 4096),
        ("0::/job/step", {"job/memory.max": "8192", "job/step/memory.max": "4096"}, 4096),
        ("0::/seen/from/outside", {"memory.max": "4096"}, 4096),
        ("5:cpu:/\n4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpu,cpuacct:/job", {"job/memory.max": "4096"}, None),
    ],
)
def test_a_process_has_no_more_memory_than_its_control_group(
    of_process: str, files: dict[str, str], expected: int | None, tmp_path: pathlib.Path
) -> None:
    write(tmp_path, files)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(tmp_path, of_process) == (expected or physical)


def test_this_process_has_memory() -> None:
    assert 0 < memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("of_process", "group", "expected"),
    [
        ("0::/job", {}, 8192),
        ("0::/job", {"memory.max": "max", "memory.current": "99999"}, 8192),
        ("0::/job", {"memory.max": "99999", "memory.current": "9"}, 8192),
        ("0::/job", {"memory.max": "9000", "memory.current": "4000"}, 5700),
        ("0::/job", {"memory.max": "9000", "memory.current": "9900"}, 0),
        (
            "4:memory:/job",
            {"memory.limit_in_bytes": "9000", "memory.usage_in_bytes": "4000"},
            5070,
        ),
    ],
)
def test_what_memory_is_left_is_what_the_host_and_the_group_leave(
    of_process: str, group: dict[str, str], expected: int, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / ("memory/job" if "memory" in of_process else "job")
    folder.mkdir(parents=True)
    (tmp_path / "meminfo").write_text("MemTotal: 24 kB\nMemAvailable:       8 kB\n")
    statistics = "anon 5\nactive_file 1\ninactive_file 700\ntotal_inactive_file 70\n"
    for name, text in {**group, "memory.stat": statistics}.items():
        (folder / name).write_text(text + "\n")
    assert available_bytes(tmp_path, tmp_path, of_process) == expected


def test_where_nothing_tells_what_is_left_nothing_is_said(tmp_path: pathlib.Path) -> None:
    assert available_bytes(tmp_path, tmp_path, "") is None


@pytest.mark.skipif(not pathlib.Path("/proc/meminfo").exists(), reason="not Linux")
def test_some_memory_is_left_to_this_process() -> None:
    left = available_bytes()
    assert left is not None and 0 < left <= memory_bytes()
