"""What tests of the experiments share."""

import pathlib
from collections.abc import Iterator

import pytest

from autoshard.compat.tracers import origins_unsaid
from experiments.fidelity_parts.store import Store


@pytest.fixture
def kept(tmp_path: pathlib.Path) -> Store:
    return Store(results=tmp_path / "results", runs=tmp_path / "runs")


@pytest.fixture(autouse=True, scope="module")
def quickly_traced() -> Iterator[None]:
    """Many models of Flax NNX are traced here, by functions of JAX alone too."""
    with origins_unsaid():
        yield
