"""Tests run on 8 fake CPU devices."""

import dataclasses
import pathlib

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


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


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration")


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


@pytest.fixture
def quick(calibration):
    """Searches without measuring, in about two seconds."""
    import autoshard
    from tests import workloads

    def search(model_fn=workloads.mlp, mesh=None, **options):
        return autoshard.search(
            model_fn,
            jax.devices() if mesh is None else mesh,
            **{"budget": workloads.UNMEASURED, "calibration": calibration, **options},
        )

    return search
