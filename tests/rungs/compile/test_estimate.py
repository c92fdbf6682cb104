"""What rung 2 says of a compiled program beside its time."""

import dataclasses
import gzip
import pathlib

import pytest

from autoshard.compat.xla.executable import MemoryUse
from autoshard.records.module import Module
from autoshard.rungs.compile import hlo
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.hlo.timeline import timeline
from autoshard.rungs.compile.job import CompileResult
from autoshard.target.catalogued import catalogued
from autoshard.target.cost import CostModel, MeshPrices
from autoshard.target.network import Network
from tests import hardware
from tests.analysed import CONSTANTS

TEXTS = pathlib.Path(__file__).parent / "hlo" / "texts"
MESH = (("data", 4), ("model", 4))
MODULE = Module(stablehlo=b"", mesh=MESH, platform="cuda", inputs=(), outputs=(), state_count=0)


def compiled(name):
    memory = MemoryUse(
        arguments_bytes=0, outputs_bytes=0, aliased_bytes=0, temporaries_bytes=0, peak_bytes=0
    )
    text = gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode()
    return CompileResult(memory=memory, hlo_text=text, warnings=(), elapsed_s=0.0)


def priced(topology):
    return CostModel(catalogued(topology), network=Network(topology))


@pytest.mark.parametrize(
    "name", ["ragged-h100-1x2x8-jax-0.10.2", "pointwise-h100-1x2x8-jax-0.10.2"]
)
def test_all_that_the_timeline_says_reaches_the_estimate(name):
    cost, result = priced(hardware.gpu(2, 8)), compiled(name)
    line = timeline(hlo.parse(result.hlo_text), MESH, MeshPrices(cost, MESH))
    found = estimate_of(MODULE, result, cost)
    assert found.assumptions == line.assumptions
    assert found.unmodelled == line.unmodelled
    assert found.exposed_s == line.exposed_s
    assert found.assumptions or found.unmodelled


def test_on_a_shared_host_nothing_hides_communication():
    result = compiled("tower-cpu-16-jax-0.10.2")
    cost = CostModel(dataclasses.replace(CONSTANTS, shared=True))
    found = estimate_of(MODULE, result, cost)
    assert found.exposed_s == found.communication_s > 0
    assert found.time_s == found.compute_s + found.communication_s
