"""What the compilers write to descriptor 2 goes to the log, all else stays where it belongs."""

import concurrent.futures
import logging
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from autoshard.compat.xla.stderr_capture import quiet

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


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_import_of_the_package_leaves_descriptor_2_alone():
    """A user's other threads may be writing."""
    code = "import os; os.dup2 = None; import autoshard; print(autoshard.__all__)"
    done = run(code)
    assert done.returncode == 0 and "search" in done.stdout, done.stderr


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_the_message_of_an_abort_inside_reaches_the_terminal(tmp_path, end):
    fatal = "F1121 01:18:17.223898  27997 layout.cc:263] Check failed: rank == 2"
    code = "import os, tempfile; from autoshard.compat.xla.stderr_capture import quiet\n"
    code += f"tempfile.tempdir = {str(tmp_path)!r}\n"
    code += f"with quiet():\n os.write(2, {fatal!r}.encode())\n {end}\n"
    done = run(code)
    assert done.returncode != 0 and fatal in done.stderr
    assert not list(tmp_path.iterdir()), "no file is left"


def test_threads_that_overlap_leave_descriptor_2_as_it_was(capfd):
    terminal = os.fstat(2).st_ino
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with quiet():
            first_is_in.set()
            assert second_is_in.wait(10)
            os.write(2, b"of the first\n")
        first_is_out.set()

    def second():
        assert first_is_in.wait(10)
        with quiet():
            second_is_in.set()
            assert first_is_out.wait(10)
            assert os.fstat(2).st_ino != terminal, "still held back"
            os.write(2, b"of the second\n")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result(timeout=20)
    assert os.fstat(2).st_ino == terminal
    assert capfd.readouterr().err == "of the first\nof the second\n"


def test_many_threads_at_once_lose_nothing(capfd):
    terminal = os.fstat(2).st_ino

    def write(i):
        with quiet():
            os.write(2, f"{i}\n".encode())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    assert os.fstat(2).st_ino == terminal
    assert sorted(map(int, capfd.readouterr().err.split())) == list(range(40))


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
    def nowhere(**_):
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkstemp", nowhere)
    before = len(os.listdir("/proc/self/fd"))
    with quiet():
        os.write(2, b"seen at once\n")
        assert capfd.readouterr().err == "seen at once\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_plugins_without_devices_go_to_the_log(tmp_path):
    """JAX logs a traceback for such a plugin when its backends start."""
    module = tmp_path / "jax_plugins" / "absent"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("def initialize():\n    raise RuntimeError('no device')\n")
    code = "\n".join(
        [
            "import logging, sys",
            f"sys.path.insert(0, {str(tmp_path)!r})",
            "from autoshard.compat.xla.stderr_capture import start_jax",
            "import jax",
            "logging.getLogger('autoshard').setLevel(logging.DEBUG)",
            "logging.getLogger('autoshard').addHandler(logging.StreamHandler(sys.stdout))",
            "start_jax()",
        ]
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "no device" not in done.stderr
    assert "Traceback" in done.stdout and "no device" in done.stdout
