"""autoshard: a sharding auto-tuner for JAX/XLA.

What it exports is imported where it is first asked for: each of a search's worker processes begins
by importing this package, and has no use for most of it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.api import load_plan as load_plan
    from autoshard.api import search as search
    from autoshard.budget import Budget as Budget
    from autoshard.budget import Event as Event
    from autoshard.catalogue import CatalogueError as CatalogueError
    from autoshard.catalogue import targets as targets
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.errors import JournalError as JournalError
    from autoshard.errors import LayoutError as LayoutError
    from autoshard.errors import NoPlanError as NoPlanError
    from autoshard.errors import PlanError as PlanError
    from autoshard.errors import TargetError as TargetError
    from autoshard.errors import WorkloadError as WorkloadError
    from autoshard.journal import Journal as Journal
    from autoshard.layout import Candidate as Candidate
    from autoshard.layout import Layout as Layout
    from autoshard.plan import Plan as Plan
    from autoshard.workload import Workload as Workload

_MODULES = {
    "api": ("load_plan", "search"),
    "budget": ("Budget", "Event"),
    "catalogue": ("CatalogueError", "targets"),
    "errors": (
        "AutoshardError",
        "JournalError",
        "LayoutError",
        "NoPlanError",
        "PlanError",
        "TargetError",
        "WorkloadError",
    ),
    "journal": ("Journal",),
    "layout": ("Candidate", "Layout"),
    "plan": ("Plan",),
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
