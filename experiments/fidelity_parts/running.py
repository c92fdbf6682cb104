"""Runs what is missing, each part in a process of its own."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from experiments.fidelity_parts.store import Store, Task, read


def run_each(
    store: Store,
    tasks: Iterable[Task],
    *,
    start: Callable[[Task], str],
    tell: Callable[[str], None],
) -> list[Task]:
    """Starts one part after the other, and goes on when one ends badly.

    Args:
      tasks: such as `missing` says, one by one.
      start: runs a part in a process of its own; returns why there may be no result.

    Returns:
      The parts that left no result: the next call tries them again.
    """
    lost = []
    for task in tasks:
        tell(f"{time.strftime('%H:%M:%S')} {task.case} on {task.devices} devices: {task.part}")
        before = _stamp(store.result(task))
        reason = start(task)
        found = read(store.result(task))
        if found is None or _stamp(store.result(task)) == before:
            lost.append(task)
            tell(f"  no result: {reason or 'its process wrote none'}")
        elif found.get("failed"):
            tell(f"  failed: {found['failed'].splitlines()[0][:200]}")
    return lost


def predict_again(
    store: Store,
    cases: Sequence[str],
    devices: Sequence[int],
    *,
    start: Callable[[Task], str],
    tell: Callable[[str], None],
) -> list[Task]:
    """Starts the predict part of every sample that is there; returns those whose process failed."""
    lost = []
    for case in cases:
        for count in devices:
            if read(store.result(Task(part="sample", case=case, devices=count))) is None:
                continue
            task = Task(part="predict", case=case, devices=count)
            tell(f"{time.strftime('%H:%M:%S')} {case} on {count} devices: predictions anew")
            reason = start(task)
            if reason:
                lost.append(task)
                tell(f"  no predictions: {reason}")
    return lost


def _stamp(path: pathlib.Path) -> int:
    """When a file was last written; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


def in_process(module: str, flags: Sequence[str], limit_s: float | None) -> str:
    """Runs `python -m module flags` and waits; returns why it ended badly, "" if it did not.

    It sees CPUs only: the benchmark is one of fake CPU devices, whatever else the machine has.
    """
    command = [sys.executable, "-m", module, *flags]
    try:
        code = subprocess.run(
            command, timeout=limit_s, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        ).returncode
    except subprocess.TimeoutExpired:
        return f"its process was ended after {limit_s:g} s"
    return f"its process ended with code {code}" if code else ""
