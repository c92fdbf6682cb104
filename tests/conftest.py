"""Tests run on 8 fake CPU devices; with `-m gpu` those marked so run on the GPUs that JAX finds."""

import dataclasses
import os
import pathlib

import hypothesis
import jax
import pytest

from autoshard.rungs.profile import calibration as calibrate

jax.config.update("jax_num_cpu_devices", 8)
# Other work may share the machine: slow is no failure.
hypothesis.settings.register_profile("autoshard", deadline=None)
hypothesis.settings.load_profile("autoshard")


_QUICK_COMPILES = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 12) else []),
]
"""XLA compiles a tiny step in a tenth of the time. Collectives stay those of a plain compile."""


def pytest_configure(config: pytest.Config) -> None:
    """CPU devices alone, unless tests on GPUs are asked for: then whatever JAX finds by itself.

    A run without the slow tests compiles quickly, here and in workers. With `-m ""` programs are
    compiled as a user's are.
    """
    jax.config.update("jax_platforms", None if _on_gpus(config) else "cpu")
    if config.getoption("markexpr") == "not slow":
        given = os.environ.get("XLA_FLAGS", "").split()
        added = [flag for flag in _QUICK_COMPILES if flag not in given]
        os.environ["XLA_FLAGS"] = " ".join([*given, *added])


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` leaves out other modules: many make CPU meshes as they are imported."""
    if not _on_gpus(config) or collection_path.suffix != ".py":
        return None
    return "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


def _on_gpus(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "gpu"


@dataclasses.dataclass(frozen=True)
class Searched:
    """One search that many tests look at; nobody writes to its files.

    Attributes:
      calibration: folder of the calibration, for searches that shall share it.
      events: what the callbacks were told.
    """

    plan: object
    journal: pathlib.Path
    calibration: pathlib.Path
    events: tuple


@pytest.fixture(scope="session", autouse=True)
def few_samples():
    """Calibrations by this process take seconds: no test asks what exactly they find."""
    whole = calibrate.calibrate

    def hurried(target: calibrate.Target, draws: int = 1) -> calibrate.Constants:
        with pytest.MonkeyPatch.context() as fewer:
            fewer.setattr(calibrate, "_ROUNDS", 3)
            fewer.setattr(calibrate, "_FEW_ROUNDS", 2)
            return whole(target, draws)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibrate, "calibrate", hurried)
        yield


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    """One folder for all processes of a run: who begins later finds what another measured."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "calibration"
    folder.mkdir(exist_ok=True)  # tests link to it, and a link to nothing keeps nothing
    return folder


@pytest.fixture(scope="session")
def searched(tmp_path_factory, calibration):
    import autoshard
    from tests import workloads

    journal = tmp_path_factory.mktemp("searched") / "journal.jsonl"
    events: list = []
    plan = autoshard.search(
        workloads.mlp,
        jax.devices(),
        budget=workloads.MEASURED,
        journal=journal,
        calibration=calibration,
        callbacks=(events.append,),
    )
    return Searched(plan, journal, calibration, tuple(events))


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    """A worker that stays warm: starting one for each search would take most of the time."""
    from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings

    folder = str(tmp_path_factory.mktemp("compiler"))
    worker = WorkerProcess(WorkerSettings(platform="cpu", device_count=8, folder=folder))
    yield worker
    worker.close()


@pytest.fixture
def quick(calibration, compiler, monkeypatch):
    """Searches without measuring, in about a second."""
    import autoshard
    from autoshard.rungs.compile.job import compile_module_job
    from autoshard.tuner import compiling
    from tests import workloads

    monkeypatch.setattr(
        compiling,
        "compile_in_process",
        lambda request: compile_module_job(
            request.module, request.time_limit_s, compiler, executables=request.executables
        ),
    )

    def search(model_fn=workloads.mlp, mesh=None, **options):
        return autoshard.search(
            model_fn,
            jax.devices() if mesh is None else mesh,
            **{"budget": workloads.UNMEASURED, "calibration": calibration, **options},
        )

    return search
