"""What a compiler made of a module is kept; crashes and other modules, targets are asked anew."""

import dataclasses

import jax
import pytest

from autoshard.compat.deviceless import Hardware
from autoshard.compat.executable import MemoryUse
from autoshard.rungs.compile_job import CompileResult
from autoshard.target import find_target
from autoshard.trial import Failure, Kind, Stage
from experiments import kept_compiles
from tests import lowered

MEMORY = MemoryUse(
    arguments_bytes=1, outputs_bytes=2, aliased_bytes=0, temporaries_bytes=3, peak_bytes=6
)
RESULT = CompileResult(memory=MEMORY, hlo_text="HloModule m", warnings=(), elapsed_s=1.5)


@pytest.fixture
def asked(monkeypatch):
    """Requests that reached the compiler; it answers with what `asked.answer` holds."""

    class Asked(list):
        answer = RESULT

    seen = Asked()

    def compile_(request):
        seen.append(request)
        return seen.answer

    monkeypatch.setattr(kept_compiles, "compile_in_process", compile_)
    return seen


def failure(kind):
    return Failure(stage=Stage.COMPILE, kind=kind, message="no")


def test_a_module_is_compiled_once(asked, tmp_path):
    module, target = lowered.train_module(), find_target(jax.devices())
    for _ in range(2):
        assert kept_compiles.compiled(module, target, tmp_path, 60.0) == RESULT
    assert len(asked) == 1


def test_another_program_mesh_or_version_is_another_question(asked, tmp_path, monkeypatch):
    module, target = lowered.train_module(), find_target(jax.devices())
    ((name, size), *_) = module.mesh
    for change in ({}, {"stablehlo": module.stablehlo + b" "}, {"mesh": ((name + "_", size),)}):
        other = dataclasses.replace(module, **change)
        kept_compiles.compiled(other, target, tmp_path, 60.0)
    assert len(asked) == 3
    monkeypatch.setattr(kept_compiles.jax, "__version__", "0.0.1")
    kept_compiles.compiled(module, target, tmp_path, 60.0)
    assert len(asked) == 4


class Away:
    """As much of a target as is asked of hardware that is not here."""

    is_here = False
    lowering_platform = "tpu"
    device_count = 8

    def __init__(self, hardware, order):
        self.hardware = hardware
        self._order = order

    def order(self, mesh):
        return self._order


def test_another_topology_device_order_or_compiler_is_another_question(
    asked, tmp_path, monkeypatch
):
    module = lowered.train_module()
    here, there = (Hardware(platform="tpu", topology=t) for t in ("v5e:2x4", "v5p:2x2x2"))
    straight, turned = tuple(range(8)), tuple(range(8))[::-1]
    versions = iter(["libtpu 1", "libtpu 1", "libtpu 1", "libtpu 2", "libtpu 2"])
    monkeypatch.setattr(kept_compiles, "compiler_version", lambda platform: next(versions))
    targets = (
        Away(here, straight),
        Away(there, straight),
        Away(here, turned),
        Away(here, straight),
    )
    for target in (*targets, targets[-1]):
        kept_compiles.compiled(module, target, tmp_path, 60.0)
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("kind", "times"), [(Kind.OOM, 1), (Kind.CRASH, 2), (Kind.TIMEOUT, 2), (Kind.UNSUPPORTED, 2)]
)
def test_only_what_the_compiler_itself_says_is_kept(asked, tmp_path, kind, times):
    asked.answer = failure(kind)
    module, target = lowered.train_module(), find_target(jax.devices())
    for _ in range(2):
        assert kept_compiles.compiled(module, target, tmp_path, 60.0) == asked.answer
    assert len(asked) == times
