"""The parts of the GPU check that need no GPU."""

import dataclasses
import types

import pytest

from autoshard.target.catalogue import catalogue
from experiments import gpu_check
from tests.analysed import CONSTANTS


def test_measured_rates_go_into_a_catalogue_file(tmp_path) -> None:
    chip = gpu_check.chip_of("NVIDIA H100 80GB HBM3")
    path = tmp_path / "hardware.toml"
    constants = dataclasses.replace(
        CONSTANTS,
        contract_by_dtype=(("bf16", 6.1e14), ("f16", 6.1e14), ("f32", 3.3e14)),
        bandwidth_bytes_per_s=2.9e12,
        launch_s=2e-6,
    )
    rates = gpu_check.measured_rates(constants)
    path.write_text(gpu_check.corrected(chip, rates))
    own = catalogue(path)[chip.name]
    assert own.flops["bf16"].value == 6.1e14 and own.memory_bandwidth.value == 2.9e12
    assert own.flops["f32"].value == 3.3e14 and own.launch_s.value == 2e-6
    assert own.flops["f16"] == chip.flops["f16"] and own.digest != chip.digest
    assert own.element_flops == chip.element_flops, "products without TF32 take its rate"


def test_a_gpu_that_is_not_in_the_catalogue_is_named() -> None:
    with pytest.raises(SystemExit, match="GeForce 256"):
        gpu_check.chip_of("GeForce 256")


def test_a_module_is_compiled_once_for_two_searches() -> None:
    asked = []

    def compile_(request):
        asked.append(request.module.stablehlo)

    with gpu_check.Once() as once:
        for text in (b"one", b"one", b"another"):
            module = types.SimpleNamespace(stablehlo=text)
            once.submit(compile_, types.SimpleNamespace(module=module)).result()
    assert asked == [b"one", b"another"]


def test_rows_of_other_programs_stay(tmp_path) -> None:
    path, head = tmp_path / "h100.json", {"chip": "h100", "rates": {}}
    first = [{"program": "a", "ratio": 0.7}, {"program": "a", "ratio": 0.9}]
    gpu_check.keep_rows(path, head, first)
    gpu_check.keep_rows(path, head, [{"program": "b", "failed": "no room"}])
    gpu_check.keep_rows(path, head, [{"program": "b", "ratio": 0.8}])
    assert gpu_check.kept_rows(path) == [*first, {"program": "b", "ratio": 0.8}]
    assert gpu_check.kept_rows(tmp_path / "none.json") == []


def test_rows_are_kept_where_writing_ends_early(tmp_path, monkeypatch) -> None:
    path, head = tmp_path / "h100.json", {"chip": "h100", "rates": {}}
    rows = [{"program": "a", "ratio": 0.7}]
    gpu_check.keep_rows(path, head, rows)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        gpu_check.keep_rows(path, head, [{"program": "b", "ratio": 0.8}])
    assert gpu_check.kept_rows(path) == rows
