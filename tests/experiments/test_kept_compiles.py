"""What a compiler made of a module is kept; crashes and other modules, targets are asked anew."""

import dataclasses

import jax
import pytest

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


def test_a_module_is_compiled_once_for_each_target(asked, tmp_path):
    module, target = lowered.train_module(), find_target(jax.devices())
    for _ in range(2):
        assert kept_compiles.compiled(module, target, tmp_path, 60.0) == RESULT
    assert len(asked) == 1
    other = dataclasses.replace(module, stablehlo=module.stablehlo + b" ")
    kept_compiles.compiled(other, target, tmp_path, 60.0)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("kind", "times"), [(Kind.OOM, 1), (Kind.CRASH, 2), (Kind.TIMEOUT, 2), (Kind.UNSUPPORTED, 2)]
)
def test_only_what_the_compiler_itself_says_is_kept(asked, tmp_path, kind, times):
    asked.answer = failure(kind)
    module, target = lowered.train_module(), find_target(jax.devices())
    for _ in range(2):
        assert kept_compiles.compiled(module, target, tmp_path, 60.0) == asked.answer
    assert len(asked) == times
