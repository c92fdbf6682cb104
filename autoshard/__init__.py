"""autoshard: a sharding auto-tuner for JAX/XLA."""

from autoshard.compat.noise import import_jax as _import_jax

_import_jax()  # before anything below does: what its plugins write is for the log

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
