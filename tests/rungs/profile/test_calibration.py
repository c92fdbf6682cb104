"""Calibration: kept in a file, used again as it is, measured anew when the file is no good."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from autoshard.errors import CalibrationError
from autoshard.records.trial import COLLECTIVE_KINDS
from autoshard.rungs.profile import calibration as calibrate
from autoshard.rungs.profile import calibration_files as calibrations
from autoshard.rungs.profile.calibration import (
    bandwidth_bytes_per_s,
    fresh_s_per_byte,
    groups_of,
    least_of_rounds,
    median_of_draws,
    rates_by_dtype,
)
from autoshard.rungs.profile.calibration_files import calibrated
from autoshard.rungs.profile.probes import Effort, on_accelerator
from autoshard.target.catalogue import catalogue
from autoshard.target.cost import FRESH_FROM_BYTES, Constants
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.target import find_target

TARGET = find_target(jax.devices())


@pytest.fixture(scope="module")
def constants(calibration):
    return calibrated(TARGET, calibration)


@pytest.fixture
def measuring(monkeypatch, constants):
    """Counts calibrations, and makes them quick."""
    calls = []
    monkeypatch.setattr(calibrate, "calibrate", lambda target: calls.append(target) or constants)
    return calls


def test_every_constant_is_measured_and_makes_sense(constants):
    assert constants.device_count == 8 and constants.shared and constants.date
    assert 1e8 < constants.contract_flops_per_s < 1e14
    assert 1e7 < constants.element_flops_per_s < 1e13, (
        "more than 1e14 when noise was taken for work"
    )
    assert 1e8 < constants.bandwidth_bytes_per_s < 1e13
    assert 0 < constants.launch_s < 1e-2
    assert 0 <= constants.fresh_s_per_byte < 1e-7
    assert constants.gathers_by_dimension
    assert {(x.kind, x.group_size) for x in constants.links} == {
        (k, n) for k in COLLECTIVE_KINDS for n in (2, 8)
    }
    assert all(x.latency_s > 0 and x.s_per_byte > 0 for x in constants.links)
    assert Constants.from_json(json.loads(json.dumps(constants.to_json()))) == constants


def test_the_least_of_many_samples_counts_and_what_takes_long_has_few():
    now, taken = [0.0], {"quick": [3e-3] * 9, "long": [0.3] * 9, "disturbed": [0.9] * 9}
    taken["quick"][7] = 1e-3
    taken["long"][3] = 0.2
    taken["disturbed"][3] = 0.01  # its third sample: the first run of each is not counted
    runs = dict.fromkeys(taken, 0)

    def probe(name):
        now[0] += taken[name][runs[name]]
        runs[name] += 1

    seconds = least_of_rounds(
        {name: functools.partial(probe, name) for name in taken}, lambda: now[0]
    )
    assert seconds == pytest.approx({"quick": 1e-3, "long": 0.2, "disturbed": 0.01})
    assert runs == {"quick": 9, "long": 4, "disturbed": 9}


def test_of_several_draws_the_median_counts():
    now, runs, lasted = [0.0], [0], {0: 5e-3, 1: 1e-3, 2: 2e-3}

    def probe():
        now[0] += lasted[runs[0] // 9] + 1e-4 * (runs[0] % 9)  # the first run is not counted
        runs[0] += 1

    seconds = median_of_draws({"probe": probe}, 3, lambda: now[0])
    assert seconds == {"probe": pytest.approx(2.1e-3)} and runs == [27]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v5e", "v5e"),
        ("GeForce 256", None),
        ("cpu", None),
    ],
)
def test_a_live_device_has_its_entry_in_the_catalogue(kind, name):
    chip = chip_of_kind(kind)
    assert (chip.name if chip else None) == name


def test_rates_of_other_dtypes_are_reached_as_far_as_that_of_bf16():
    chip = catalogue()["h100"]
    measured = {"product bf16": chip.flops["bf16"].value / 2, "product f32": 1e14}
    found = dict(rates_by_dtype(measured, chip))
    assert found["bf16"] == measured["product bf16"] and found["f32"] == 1e14
    assert found["f8"] == pytest.approx(chip.flops["f8"].value / 2)
    assert set(found) == {*chip.flops, "f32:highest"}
    assert found["f32:highest"] == pytest.approx(chip.element_flops.value / 2)
    assert rates_by_dtype(measured, None) == (("bf16", found["bf16"]), ("f32", 1e14))


def test_an_accelerator_has_its_clock_and_other_dtypes_from_the_catalogue(monkeypatch):
    live = dataclasses.replace(
        find_target(jax.devices()[:2]), shared_host=False, device_kind="TPU v5e"
    )
    little = Effort(floor_s=0.0, side=64, elements=256, copy_bytes=1024)
    monkeypatch.setattr(
        calibrate, "on_accelerator", functools.partial(on_accelerator, effort=little)
    )
    monkeypatch.setattr(calibrate, "_LARGEST", 1 << 14)
    found = calibrate.calibrate(live, draws=1)
    chip = catalogue()["v5e"]
    assert not found.shared and found.clock_hz == chip.clock_hz.value
    assert chip.digest in found.source
    rates = dict(found.contract_by_dtype)
    assert set(rates) == {*chip.flops, "f32:high", "f32:highest"}
    assert rates["f32"] == pytest.approx(3 * rates["f32:high"])
    assert rates["f32"] == pytest.approx(6 * rates["f32:highest"])
    assert found.contract_flops_per_s == rates["f32"] > 0
    assert found.element_flops_per_s > 0 and found.bandwidth_bytes_per_s > 0
    assert {x.group_size for x in found.links} == {2}


@pytest.mark.parametrize("count", [3, 6])
def test_devices_that_are_no_power_of_two_have_their_collectives_measured(count, monkeypatch):
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    target = find_target(jax.devices()[:count])
    groups = groups_of(count)
    assert groups[-1] == count and all(count % group == 0 for group in groups)
    for group in groups:
        for kind in COLLECTIVE_KINDS:
            size = calibrate._divided(64, group)
            assert 64 <= size < 64 + group and size % group == 0
            array = calibrate._collective(target, kind, group, size)()
            assert np.shape(array) == (count, size), kind


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("memory_bytes", [1 << 10, 1 << 20, 1 << 23, 1 << 40])
def test_collectives_fit_and_come_in_two_sizes(memory_bytes, shared, monkeypatch):
    sizes = []
    monkeypatch.setattr(calibrate, "_collective", lambda *asked: sizes.append(asked[-1]))
    monkeypatch.setattr(calibrate, "on_accelerator", lambda *_: {})
    monkeypatch.setattr(calibrate, "program", lambda *_, **__: lambda: None)

    class Sized(Exception):
        pass

    def stop(*_):
        raise Sized

    monkeypatch.setattr(calibrate, "median_of_draws", stop)
    with pytest.raises(Sized):
        calibrate.calibrate(
            dataclasses.replace(TARGET, memory_bytes=memory_bytes, shared_host=shared)
        )
    small, large = min(sizes), max(sizes)
    assert large >= 2 * small == 2 * calibrate._SMALL, "a difference is divided by"
    assert large == 2 * small or 16 * 8 * large <= memory_bytes / 4


def test_another_compiler_of_a_live_tpu_is_another_calibration(measuring, tmp_path, monkeypatch):
    live = dataclasses.replace(TARGET, platform="tpu", shared_host=False)
    for count, version in ((1, "libtpu 0.0.42"), (1, "libtpu 0.0.42"), (2, "libtpu 0.0.43")):
        monkeypatch.setattr(calibrations, "compiler_version", lambda platform, v=version: v)
        calibrated(live, tmp_path)
        assert len(measuring) == count


def test_neither_dispatch_nor_the_result_counts_as_memory_traffic():
    def taken(rate: float) -> dict[object, float]:
        return {
            ("memory", turns): 1e-3 + turns * 2 * calibrate._TOUCHED_BYTES / rate
            for turns in (calibrate._FEW_TURNS, calibrate._MANY_TURNS)
        }

    seconds = taken(40e9)
    assert bandwidth_bytes_per_s(seconds) == pytest.approx(40e9)
    many = seconds["memory", calibrate._MANY_TURNS]
    held_up = {**seconds, ("memory", calibrate._FEW_TURNS): many}
    assert 20e9 < bandwidth_bytes_per_s(held_up) < 80e9


def test_a_byte_of_a_fresh_block_costs_what_a_kept_one_does_not():
    kept_bytes, devices = 4 << 20, 4
    of_all = devices * (FRESH_FROM_BYTES + kept_bytes)
    seconds = {"nothing of few": 0.001, "kept": 0.003, "fresh": 0.001 + 9 * 0.002 + of_all * 2e-10}
    assert fresh_s_per_byte(seconds, devices, kept_bytes) == pytest.approx(2e-10)
    quicker = {**seconds, "fresh": 0.01}
    assert fresh_s_per_byte(quicker, devices, kept_bytes) == 0.0


def test_the_file_holds_date_digest_and_identity(constants, calibration):
    files = calibration.glob("calibration-*.json")  # others may be writing theirs
    (path,) = [p for p in files if json.loads(p.read_text())["digest"] == constants.digest]
    data = json.loads(path.read_text())
    assert data["date"] == constants.date
    assert jax.__version__ in data["identity"] and "|8|" in data["identity"]


def test_a_target_is_calibrated_once(measuring, constants, tmp_path, monkeypatch):
    assert calibrated(TARGET, tmp_path / "new") == constants
    assert calibrated(TARGET, tmp_path / "new") == constants
    assert len(measuring) == 1
    calibrated(find_target(jax.devices()[:4]), tmp_path / "new")
    assert len(measuring) == 2, "another number of devices is another target"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_copy_insertion_use_region_analysis=true")
    calibrated(TARGET, tmp_path / "new")
    assert len(measuring) == 3, "other flags make other programs"
    monkeypatch.setenv("PJRT_NPROC", "16")
    calibrated(TARGET, tmp_path / "new")
    assert len(measuring) == 4, "more threads take other times"
    monkeypatch.delenv("PJRT_NPROC")
    assert calibrated(TARGET, tmp_path / "new") == constants
    assert len(measuring) == 4


@pytest.mark.parametrize("damage", ["cut", "altered", "empty", "list"])
def test_a_damaged_file_is_measured_anew(measuring, constants, tmp_path, damage):
    calibrated(TARGET, tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    altered = json.loads(text)
    altered["constants"]["launch_s"] = 1.0
    path.write_text(
        {"cut": text[:50], "altered": json.dumps(altered), "empty": "", "list": "[]"}[damage]
    )
    assert calibrated(TARGET, tmp_path) == constants
    assert len(measuring) == 2
    calibrated(TARGET, tmp_path)
    assert len(measuring) == 2, "and the file is whole again"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_constants_of_another_version_are_refused_and_their_file_stays(measuring, tmp_path):
    calibrated(TARGET, tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    data["constants"]["array_s"] = 1e-6
    path.write_text(json.dumps(data))
    before = path.read_bytes()
    with pytest.raises(CalibrationError, match=rf"^{path}: the constants .* array_s: .*$"):
        calibrated(TARGET, tmp_path)
    assert path.read_bytes() == before and len(measuring) == 1


def test_a_calibration_of_another_revision_is_named_in_one_line_and_stays(
    measuring, constants, tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as patched:
        patched.setattr(calibrate, "REVISION", calibrate.REVISION - 1)
        calibrated(TARGET, tmp_path)
        calibrated(find_target(jax.devices()[:4]), tmp_path)
    (tmp_path / "calibration-damaged.json").write_text("[]")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert not caplog.records
    assert calibrated(TARGET, tmp_path) == constants and len(measuring) == 3
    (said,) = [record.getMessage() for record in caplog.records]
    old = said.partition(" was written by another version")[0]
    assert json.loads(before[tmp_path / old])["identity"].split("|")[3] == "8"
    assert all(path.read_bytes() == text for path, text in before.items())
    assert calibrated(TARGET, tmp_path) == constants and len(measuring) == 3
    assert len(caplog.records) == 1, "what is used says nothing"


def test_a_folder_that_cannot_be_written_costs_time_and_one_warning(measuring, constants, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    said = r"cannot be kept in .*file/cache \(.*Not a directory.*calibrates this machine again"
    with pytest.warns(UserWarning, match=said):
        assert calibrated(TARGET, blocked / "cache") == constants
    assert calibrated(TARGET, blocked / "cache") == constants
    assert len(measuring) == 2


def test_only_a_target_that_is_measured_is_told_of(measuring, tmp_path):
    told = []
    for _ in range(2):
        calibrated(TARGET, tmp_path, lambda: told.append(len(measuring)))
    assert told == [0] and len(measuring) == 1


def test_two_that_measure_at_the_same_time_agree(constants, tmp_path, monkeypatch):
    others = dataclasses.replace(constants, launch_s=2 * constants.launch_s)

    def meanwhile(target):
        monkeypatch.setattr(calibrate, "calibrate", lambda target: others)
        assert calibrated(target, tmp_path) == others
        return constants

    monkeypatch.setattr(calibrate, "calibrate", meanwhile)
    assert calibrated(TARGET, tmp_path) == others == calibrated(TARGET, tmp_path)


def test_the_default_folder_is_in_the_users_cache(measuring, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    calibrated(TARGET)
    assert len(list((tmp_path / ".cache" / "autoshard").iterdir())) == 1


def test_a_process_without_a_home_keeps_none(measuring, constants, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert calibrated(TARGET) == calibrated(TARGET) == constants
    assert len(measuring) == 2


def test_one_device_needs_no_links():
    found = calibrate.calibrate(find_target(jax.devices()[:1]), draws=1)
    assert found.links == () and found.contract_flops_per_s > 0
