"""The parts of the GPU check that need no GPU."""

import pytest

from autoshard.catalogue import catalogue
from experiments import gpu_check


def test_measured_rates_go_into_a_catalogue_file(tmp_path) -> None:
    chip = gpu_check.chip_of("NVIDIA H100 80GB HBM3")
    path = tmp_path / "hardware.toml"
    rates = {"flops.bf16": 6.1e14, "flops.f32": 3.3e14, "memory_bandwidth": 2.9e12}
    path.write_text(gpu_check.corrected(chip, rates))
    own = catalogue(path)[chip.name]
    assert own.flops["bf16"].value == 6.1e14 and own.memory_bandwidth.value == 2.9e12
    assert own.element_flops == chip.element_flops and own.digest != chip.digest


def test_a_gpu_that_is_not_in_the_catalogue_is_named() -> None:
    with pytest.raises(SystemExit, match="GeForce 256"):
        gpu_check.chip_of("GeForce 256")
