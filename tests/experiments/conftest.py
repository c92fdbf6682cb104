"""What tests of the experiments share."""

import pathlib

import pytest

from experiments.fidelity_parts.store import Store


@pytest.fixture
def kept(tmp_path: pathlib.Path) -> Store:
    return Store(results=tmp_path / "results", runs=tmp_path / "runs")
