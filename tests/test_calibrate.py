"""Calibration: kept in a file, used again as it is, measured anew when the file is no good."""

import json

import jax
import pytest

from autoshard import calibrate
from autoshard.calibrate import calibrated, fresh_s_per_byte
from autoshard.cost import FRESH_FROM_BYTES, KINDS, Constants
from autoshard.target import find_target

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
        (k, n) for k in KINDS for n in (2, 8)
    }
    assert all(x.latency_s > 0 and x.s_per_byte > 0 for x in constants.links)
    assert Constants.from_json(json.loads(json.dumps(constants.to_json()))) == constants


def test_a_byte_of_a_fresh_block_costs_what_a_kept_one_does_not():
    kept_bytes, devices = 4 << 20, 4
    of_all = devices * (FRESH_FROM_BYTES + kept_bytes)
    seconds = {"nothing of few": 0.001, "kept": 0.003, "fresh": 0.001 + 9 * 0.002 + of_all * 2e-10}
    assert fresh_s_per_byte(seconds, devices, kept_bytes) == pytest.approx(2e-10)
    quicker = {**seconds, "fresh": 0.01}
    assert fresh_s_per_byte(quicker, devices, kept_bytes) == 0.0


def test_the_file_holds_date_digest_and_identity(constants, calibration):
    (path,) = [
        p for p in calibration.iterdir() if json.loads(p.read_text())["digest"] == constants.digest
    ]
    data = json.loads(path.read_text())
    assert data["date"] == constants.date
    assert jax.__version__ in data["identity"] and "|8|" in data["identity"]


def test_a_target_is_calibrated_once(measuring, constants, tmp_path):
    assert calibrated(TARGET, tmp_path / "new") == constants
    assert calibrated(TARGET, tmp_path / "new") == constants
    assert len(measuring) == 1
    calibrated(find_target(jax.devices()[:4]), tmp_path / "new")
    assert len(measuring) == 2, "another number of devices is another target"


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


def test_a_folder_that_cannot_be_written_only_costs_time(measuring, constants, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert calibrated(TARGET, blocked / "cache") == constants
    assert calibrated(TARGET, blocked / "cache") == constants
    assert len(measuring) == 2


def test_the_default_folder_is_in_the_users_cache(measuring, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    calibrated(TARGET)
    assert len(list((tmp_path / ".cache" / "autoshard").iterdir())) == 1


def test_one_device_needs_no_links():
    found = calibrate.calibrate(find_target(jax.devices()[:1]))
    assert found.links == () and found.contract_flops_per_s > 0
