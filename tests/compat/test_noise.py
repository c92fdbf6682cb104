"""What the compilers write to descriptor 2 goes to the log, all else stays where it belongs."""

import logging
import os
import subprocess
import sys
import tempfile

import pytest

from autoshard.compat.noise import quiet
from tests.hardware import needs

XLA = b"W1121 01:18:17.223898  27997 sharding.cc:263] [SPMD] Involuntary full rematerialization\n"


def test_lines_of_xla_go_to_the_log_and_others_to_stderr(capfd, caplog):
    terminal = os.fstat(2).st_ino
    with caplog.at_level(logging.DEBUG, logger="autoshard"), quiet():
        os.write(2, b"mine\n" + XLA)
        os.write(2, b"no newline")
        assert os.fstat(2).st_ino != terminal, "held back until the end"
    assert os.fstat(2).st_ino == terminal
    assert capfd.readouterr().err == "mine\nno newline"
    assert [r.message for r in caplog.records] == [XLA.decode().strip()]


def test_an_error_inside_lets_everything_out_again(capfd):
    with pytest.raises(ValueError, match="inside"), quiet():
        os.write(2, b"before the error\n")
        raise ValueError("inside")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before the error\nafter\n"


def test_it_nests(capfd):
    with quiet(), quiet():
        os.write(2, b"deep\n" + XLA)
    assert capfd.readouterr().err == "deep\n"


@pytest.mark.deviceless
def test_jax_is_imported_quietly_where_its_plugins_write():
    """CUDA's wheels without a driver: `import jax` alone writes that none is found."""
    needs("cuda")
    done = subprocess.run(
        [sys.executable, "-c", "import autoshard"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_no_descriptor_leaks(capfd):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with quiet():
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_stderr_is_no_trouble(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw and some daemons
    with quiet():
        pass


def test_without_a_folder_to_write_to_nothing_is_held_back(capfd, monkeypatch):
    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)
    before = len(os.listdir("/proc/self/fd"))
    with quiet():
        os.write(2, b"seen at once\n")
        assert capfd.readouterr().err == "seen at once\n"
    assert len(os.listdir("/proc/self/fd")) == before
