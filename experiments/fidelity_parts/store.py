"""Where the results of the benchmark stand: one JSON file for each part, written whole or not."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from autoshard import Workload
from autoshard.compat.xla.threads import threads_asked
from autoshard.errors import LayoutError
from autoshard.records.layout import Candidate
from autoshard.target.cost import MODEL_REVISION
from autoshard.target.host import machine
from experiments import pairs

PARTS = ("search", "sample", "hand")
"""The parts that are run, in this order; the report is made from what they leave."""

Layouts = Callable[[str, int], Sequence[str]]
"""(case, devices) -> names of the layouts by hand that there are today."""

_NUMBERS = re.compile(r'\[\s+([^\[\]{}"]*?)\s+\]')


class Case(Protocol):
    """What the benchmark asks of a case, see `experiments/zoo/case.py`."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def sample(self) -> Callable[[int], Any]: ...

    def workload(self) -> Workload: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One part of one case on so many devices."""

    part: str
    case: str
    devices: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Folders of the benchmark.

    Attributes:
      results: what is kept: a JSON file for each part, and the plans.
      runs: journals and what else an interrupted part goes on from.
    """

    results: pathlib.Path
    runs: pathlib.Path

    def result(self, task: Task) -> pathlib.Path:
        return self.results / f"{task.case}-{task.devices}" / f"{task.part}.json"

    def plan(self, task: Task) -> pathlib.Path:
        return self.result(task).with_name("plan.json")

    def planned(self, task: Task) -> dict[str, Any] | None:
        """The candidate that the case's plan holds, as JSON; None where there is no plan."""
        found = read(self.plan(task))
        return None if found is None else found.get("candidate")

    def run_folder(self, task: Task) -> pathlib.Path:
        """Made when missing."""
        folder = (self.runs / f"{task.case}-{task.devices}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def calibration(self) -> pathlib.Path:
        """One calibration for the searches of all cases."""
        return self.runs / "calibration"


def read(path: pathlib.Path) -> dict[str, Any] | None:
    """What a part wrote; None where there is nothing, or nothing whole."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write(path: pathlib.Path, data: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all; lists of numbers stand on one line.

    Paths in it that lie below the working directory become relative: others read them elsewhere.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    here = json.dumps(f"{pathlib.Path.cwd()}{os.sep}")[1:-1]
    text = json.dumps(data, indent=1, allow_nan=False).replace(here, "")
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def missing(
    store: Store,
    cases: Sequence[str],
    devices: Sequence[int],
    parts: Sequence[str],
    retry: bool,
    layouts: Layouts,
) -> Iterator[Task]:
    """What is still to do, in the order of cases. Asked one by one: a part may finish meanwhile.

    What was measured of another plan than the case has now is to do again, and pairs by hand where
    a layout has none.

    Args:
      retry: parts whose file says that they failed, lost something or left something undecided
        count as missing too, and those with a comparison that fewer processes were asked about
        than are asked today.
    """
    for case in cases:
        for count in devices:
            for part in parts:
                task = Task(part=part, case=case, devices=count)
                found = read(store.result(task))
                if (
                    found is None
                    or is_of_another_plan(found, store.planned(task))
                    or (part == "hand" and lacking(found, layouts(case, count)))
                    or (retry and is_unsettled(found))
                ):
                    yield task


def is_of_another_plan(found: dict[str, Any], plan: dict[str, Any] | None) -> bool:
    """Whether a part's result speaks of a plan that is not the case's present one.

    One that was written where there was no plan is of another as soon as there is one.

    Args:
      plan: the candidate of the present one, as JSON.
    """
    return found.get("part") != "search" and not is_same_plan(found.get("planned"), plan)


def is_same_plan(first: dict[str, Any] | None, second: dict[str, Any] | None) -> bool:
    """Whether two candidates as JSON are one: versions have written the same in other words."""
    if first == second or first is None or second is None:
        return first == second
    try:
        return Candidate.from_json(first) == Candidate.from_json(second)
    except LayoutError:
        return False


def lacking(found: Mapping[str, Any], layouts: Sequence[str]) -> list[str]:
    """Today's layouts that a hand part says nothing of; none where it failed as a whole."""
    if found["failed"]:
        return []
    asked = {row["layout"] for row in found["rows"]}
    return [name for name in layouts if name not in asked]


def is_unsettled(found: dict[str, Any]) -> bool:
    """Whether a result failed, lost something, or has a comparison that is to be asked on.

    The pairs of a sample are asked on where the sample was taken: elsewhere other programs may be
    the fastest.
    """
    if any(found.get(name) for name in ("failed", "lost", "undecided")):
        return True
    fresh = found.get("fresh", ()) if is_from_here(found) else ()
    return any(pairs.is_open(row) for row in (*found.get("rows", ()), *fresh))


def is_from_here(found: Mapping[str, Any]) -> bool:
    """Whether figures are of such a machine as this is, with its compiler and number of threads.

    Processes elsewhere say nothing of how the same two programs stand to each other here.
    """
    now = seen_on()
    compiler, threads = found.get("versions", {}).get("jaxlib"), found.get("threads")
    return bool(
        found.get("machine") == now["machine"]
        and compiler == now["versions"].get("jaxlib")
        and threads == now.get("threads")
    )


def seen_on() -> dict[str, Any]:
    """The machine and the versions that figures are of, and the threads that were asked for."""
    names = ("autoshard", "jax", "jaxlib", "numpy", "scipy", "flax", "optax")
    versions = {name: version for name in names if (version := _version(name))}
    threads = {"threads": threads_asked()} if threads_asked() else {}
    return {"machine": machine(), "versions": versions, **threads}


def provenance(task: Task, case: Case, scale: str, seed: int) -> dict[str, Any]:
    """What every result says of where it comes from."""
    return {
        "part": task.part,
        "case": task.case,
        "family": case.family,
        "devices": task.devices,
        "scale": scale,
        "seed": seed,
        **seen_on(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "model_revision": MODEL_REVISION,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


@functools.lru_cache(maxsize=1)
def commit() -> str:
    """The commit that runs, with "-dirty" where its code was changed; "" where git does not say."""
    root = pathlib.Path(__file__).parents[2]

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        if found.returncode:
            return ""
        changed = git("diff", "--quiet", "HEAD", "--", "autoshard", "experiments", "models")
    except OSError:
        return ""
    return found.stdout.strip() + ("-dirty" if changed.returncode else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
