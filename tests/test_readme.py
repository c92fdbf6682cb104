"""The README's example runs as it is printed."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests import noise

README = pathlib.Path(__file__).parents[1] / "README.md"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found, "the README has no Python example"
    return found.group(1)


@pytest.mark.slow
def test_the_example_runs_and_leaves_a_plan(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(example(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=tmp_path,
        # As a reader's: it names no platform.
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Plan for 8 fake cpu devices" in done.stdout
    assert "Numerics: agrees with the unsharded step" in done.stdout
    assert noise.others(done.stderr) == [], "compilers' noise reached the terminal"
    assert (tmp_path / "plan.json").exists()
