"""autoshard: a sharding auto-tuner for JAX/XLA.

What it exports is imported where it is first asked for: each of a search's worker processes begins
by importing this package, and has no use for most of it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.api import load_plan as load_plan
    from autoshard.api import search as search
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.errors import JournalError as JournalError
    from autoshard.errors import LayoutError as LayoutError
    from autoshard.errors import NoPlanError as NoPlanError
    from autoshard.errors import PlanError as PlanError
    from autoshard.errors import TargetError as TargetError
    from autoshard.errors import WorkloadError as WorkloadError
    from autoshard.plan.plan import Plan as Plan
    from autoshard.records.layout import Candidate as Candidate
    from autoshard.records.layout import Layout as Layout
    from autoshard.target.catalogue import CatalogueError as CatalogueError
    from autoshard.target.catalogue import targets as targets
    from autoshard.tuner.budget import Budget as Budget
    from autoshard.tuner.budget import Event as Event
    from autoshard.tuner.journal import Journal as Journal
    from autoshard.workload import Workload as Workload

_MODULES = {
    "api": ("load_plan", "search"),
    "errors": (
        "AutoshardError",
        "JournalError",
        "LayoutError",
        "NoPlanError",
        "PlanError",
        "TargetError",
        "WorkloadError",
    ),
    "plan.plan": ("Plan",),
    "records.layout": ("Candidate", "Layout"),
    "target.catalogue": ("CatalogueError", "targets"),
    "tuner.budget": ("Budget", "Event"),
    "tuner.journal": ("Journal",),
    "workload": ("Workload",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
