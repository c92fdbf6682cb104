"""Journal keys of rungs 1 and 2 follow the code, not its words."""

import pathlib

import pytest

from autoshard.tuner import code_digest as module
from autoshard.tuner.code_digest import code_digest, tree_text

SOURCE = '''"""Says."""

RATE = 2
"""Of something."""


def double(x):
    """Doubles."""
    return RATE * x  # plainly
'''


def test_docstrings_comments_and_layout_are_left_out() -> None:
    other = SOURCE.replace("Doubles.", "Multiplies by RATE.").replace("  # plainly", "")
    assert tree_text(other.replace("\n\n\n", "\n\n")) == tree_text(SOURCE)
    assert tree_text(SOURCE.replace("RATE = 2", "RATE = 3")) != tree_text(SOURCE)


@pytest.mark.parametrize(
    ("changed", "rungs"),
    [("rungs/compile/hlo", {"compile"}), ("target", {"propagate", "compile"}), ("tuner", set())],
)
def test_a_change_of_code_changes_the_digests_of_its_rungs(
    changed: str, rungs: set[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("target", "tuner", "rungs/propagate", "rungs/compile/hlo"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "part.py").write_text(SOURCE)
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    fresh = code_digest.__wrapped__
    before = {rung: fresh(rung) for rung in ("propagate", "compile")}
    assert before == {rung: fresh(rung) for rung in before}
    (tmp_path / changed / "part.py").write_text(SOURCE.replace("RATE = 2", "RATE = 3"))
    assert {rung for rung in before if fresh(rung) != before[rung]} == rungs


def test_every_package_that_is_read_is_there() -> None:
    for packages in module._CODE.values():
        for package in packages:
            assert any((module._ROOT / package).rglob("*.py")), package
