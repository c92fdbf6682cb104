"""The documents: their examples run, their links resolve, the API reference is up to date.

A block that is marked `python` runs, after the blocks above it on the same page. A block marked
`python no-run: reason` is compiled only. A block marked `python needs-compilers` runs where the
compilers of hardware that is not here are installed.
"""

import importlib.machinery
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from autoshard.records.layout import Constraints, Gather, Layout
from autoshard.records.words import rules_in_words
from tests.hardware import needs

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
_FENCE = re.compile(r"^```(\w+)?[ \t]*([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAMED = re.compile(r"`((?:autoshard|docs|experiments|models|results|scripts|tests)/[\w./-]*)`")
_FAKE = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'


class Block(NamedTuple):
    """A fenced block: its language, what stands beside it, and its text."""

    language: str
    mark: str
    text: str


def blocks(page: pathlib.Path) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(page.read_text(encoding="utf-8"))]


def python(page: pathlib.Path, *marks: str) -> list[str]:
    return [b.text for b in blocks(page) if b.language == "python" and b.mark in marks]


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def with_blocks(*marks: str) -> list[pathlib.Path]:
    """The pages with such blocks, without the README, which has a test of its own."""
    return [p for p in PAGES if p.name != "README.md" and python(p, *marks)]


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_are_there(page: pathlib.Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(link)
    missing += [name for name in _NAMED.findall(text) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_is_marked_and_compiles(page: pathlib.Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        known = block.mark in ("", "needs-compilers") or re.match(r"no-run: \w+", block.mark)
        assert known, f"unknown mark {block.mark!r}"
        compile(block.text, name_of(page), "exec")


def run(code: str, folder: pathlib.Path) -> str:
    """Runs code in a process of its own, in a folder of its own."""
    script = folder / "page.py"
    script.write_text(_FAKE + code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "XLA_"))},
            "JAX_PLATFORMS": "cpu",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks(""), ids=name_of)
def test_examples_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run("\n".join(python(page, "")), tmp_path)


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("page", with_blocks("needs-compilers"), ids=name_of)
def test_examples_for_other_hardware_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    needs("cuda")
    run("\n".join(python(page, "", "needs-compilers")), tmp_path)


def test_code_names_documents_that_are_there() -> None:
    missing = []
    for folder in ("autoshard", "models", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if not path.is_file() or path.suffix == ".pyc":
                continue
            for name in re.findall(r"docs/[\w./-]*\w", path.read_text(encoding="utf-8")):
                if not (ROOT / name).exists() and not [*ROOT.glob(f"{name}-*.md")]:
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_every_package_has_its_job_in_the_table() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    table = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    there = {
        path.stem
        for path in (ROOT / "autoshard").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert table == there - {"__init__"}


def test_the_page_about_the_table_explains_every_phrase_of_a_layout() -> None:
    text = (ROOT / "docs" / "table.md").read_text(encoding="utf-8")
    layouts = [
        *(Layout(mesh=(("x", 8),), gather=gather) for gather in Gather),
        *(Layout(mesh=(("x", 8),), constraints=density) for density in Constraints),
        Layout(mesh=(("x", 8),), small_replicated=True),
        Layout(mesh=(("x", 8),), gather_loop_inputs=True),
        Layout(mesh=(("x", 8),), as_annotated=True),
        Layout(mesh=(("x", 8),), conflict_losers=("mlp",)),
    ]
    phrases = {rules_in_words(layout) for layout in layouts} - {"everything replicated"}
    assert {
        p for p in phrases if f"`{p}`" not in text and f"`{p.split(': ')[-1]}`" not in text
    } == set()


def test_the_api_reference_is_what_the_script_writes() -> None:
    path = str(ROOT / "scripts" / "api_reference")
    loader = importlib.machinery.SourceFileLoader("api_reference", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "docs/api.md is out of date: run scripts/api_reference"
    )
