"""What a compiler made of a module is kept; crashes and other modules, targets are asked anew."""

import dataclasses
import pickle

import jax
import pytest

from autoshard.compat.xla.deviceless import Hardware
from autoshard.compat.xla.executable import MemoryUse
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.compile.job import CompileRequest, CompileResult, request_for
from autoshard.rungs.worker.process import WorkerSettings
from autoshard.target.target import find_target
from experiments import kept_compiles
from experiments.kept_compiles import KeptCompiles
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


@pytest.fixture
def answer(asked, tmp_path):
    """What the executor says of a request; each time by an executor of its own."""

    def answer(request):
        with KeptCompiles(tmp_path) as compiles:
            return compiles.submit(kept_compiles.compile_in_process, request).result()

    return answer


def request(**changes) -> CompileRequest:
    settings = WorkerSettings(platform="cpu", device_count=8, folder="nowhere")
    wanted = CompileRequest(module=lowered.train_module(), time_limit_s=60.0, settings=settings)
    return dataclasses.replace(wanted, **changes)


def failure(kind):
    return Failure(stage=Stage.COMPILE, kind=kind, message="no")


def test_a_module_is_compiled_once(asked, answer):
    for limit_s in (60.0, 90.0):
        assert answer(request(time_limit_s=limit_s)) == RESULT
    assert len(asked) == 1


def test_another_program_mesh_or_version_is_another_question(asked, answer, monkeypatch):
    module = request().module
    ((name, size), *_) = module.mesh
    for change in ({}, {"stablehlo": module.stablehlo + b" "}, {"mesh": ((name + "_", size),)}):
        answer(request(module=dataclasses.replace(module, **change)))
    assert len(asked) == 3
    monkeypatch.setattr(kept_compiles.jax, "__version__", "0.0.1")
    answer(request())
    assert len(asked) == 4


def test_another_topology_device_order_or_compiler_is_another_question(asked, answer):
    here, there = (Hardware(platform="tpu", topology=t) for t in ("v5e:2x4", "v5p:2x2x2"))
    straight, turned = tuple(range(8)), tuple(range(8))[::-1]
    wanted = {"hardware": here, "order": straight, "compilers": "libtpu 1"}
    changes = ({}, {"hardware": there}, {"order": turned}, {"compilers": "libtpu 2"}, {})
    for change in changes:
        answer(request(**{**wanted, **change}))
    assert len(asked) == 4


def test_other_options_of_the_compiler_are_another_question(asked, answer, monkeypatch, tmp_path):
    for options in ("", "--xla_a=1", "", "--xla_a=1"):
        monkeypatch.setenv("XLA_FLAGS", options)
        target = find_target(jax.devices())
        answer(request_for(lowered.train_module(), target, str(tmp_path), 60.0))
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("kind", "times"), [(Kind.OOM, 1), (Kind.CRASH, 2), (Kind.TIMEOUT, 2), (Kind.UNSUPPORTED, 2)]
)
def test_only_what_the_compiler_itself_says_is_kept(asked, answer, kind, times):
    asked.answer = failure(kind)
    for _ in range(2):
        assert answer(request()) == asked.answer
    assert len(asked) == times


def test_it_does_nothing_but_compile(tmp_path):
    with (
        KeptCompiles(tmp_path) as compiles,
        pytest.raises(ValueError, match="expected compile_in_process"),
    ):
        compiles.submit(pickle.dumps, request())


def test_what_a_worker_raises_reaches_the_asker(monkeypatch, tmp_path):
    def compile_(request):
        raise RuntimeError("no worker")

    monkeypatch.setattr(kept_compiles, "compile_in_process", compile_)
    with KeptCompiles(tmp_path) as compiles:
        future = compiles.submit(compile_, request())
    with pytest.raises(RuntimeError, match="no worker"):
        future.result()
    assert not list(tmp_path.iterdir())
