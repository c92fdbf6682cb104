"""Imports go one way, and unstable parts of JAX are used in one place."""

import ast
import graphlib
import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import autoshard

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "autoshard"

PACKAGES = (
    "errors",
    "records",
    "compat",
    "target",
    "workload",
    "program",
    "space",
    "lowering",
    "rungs.worker",
    "rungs.propagate",
    "rungs.compile",
    "rungs.profile",
    "tuner",
    "report",
    "plan",
    "integrations",
    "api",
)
"""Each imports only what stands before it."""

UNSTABLE = ("jax._src", "jaxlib", "jax.extend", "jax.experimental", "jax.interpreters")
OWN = {"jax", "numpy", "scipy", "autoshard"}


def imports(path: pathlib.Path) -> set[str]:
    """Full names of what a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(name: str) -> str | None:
    """`autoshard.rungs.worker.child` -> `rungs.worker`; None for what is no part of autoshard."""
    words = name.split(".")
    if words[0] != "autoshard" or len(words) == 1:
        return None
    return ".".join(words[1:3]) if words[1] == "rungs" else words[1]


FILES = sorted(PACKAGE.rglob("*.py"))
assert all(any((ROOT / folder).rglob("*.py")) for folder in ("autoshard", "models", "experiments"))
every_file = pytest.mark.parametrize(
    "path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES]
)


def module_name(path: pathlib.Path) -> str:
    words = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def own_part(path: pathlib.Path) -> str:
    return part(module_name(path)) or "__init__"


def test_every_file_belongs_to_a_package() -> None:
    parts = {own_part(p) for p in FILES} - {"__init__"}
    assert parts - {"rungs"} == set(PACKAGES)


@every_file
def test_imports_go_one_way(path: pathlib.Path) -> None:
    rank = {name: i for i, name in enumerate(PACKAGES)}
    me = own_part(path)
    if me not in rank:
        return
    for name in imports(path):
        other = part(name)
        if other in rank:
            assert rank[other] <= rank[me], f"{path} imports {name}"
        if me == "integrations":  # makes workloads, and knows nothing else of autoshard
            assert other in (None, me, "workload", "errors", "compat"), f"{path} imports {name}"


def test_no_import_is_part_of_a_circle() -> None:
    """Imports within functions count too."""
    modules = {module_name(path): path for path in FILES}
    graph = {
        name: {other for other in imports(path) if other in modules and other != name}
        for name, path in modules.items()
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@every_file
def test_unstable_names_are_used_in_compat_only(path: pathlib.Path) -> None:
    if own_part(path) == "compat":
        return
    for name in imports(path):
        assert not any(name == u or name.startswith(u + ".") for u in UNSTABLE), f"{path}: {name}"
    text = path.read_text()
    for unstable in ("jax._src", "jax.extend", "jax.experimental", "jax.interpreters"):
        assert f"{unstable}." not in text, f"{path} reaches into {unstable}"


@every_file
def test_only_jax_and_what_it_brings_is_needed(path: pathlib.Path) -> None:
    allowed = {
        "integrations": OWN | {"flax"},
        "report": OWN | {"rich"},  # where it is installed
        "compat": OWN | {"jaxlib"},
    }.get(own_part(path), OWN)
    for name in imports(path):
        top = name.split(".")[0]
        assert top in allowed or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_models_import_nothing_from_autoshard() -> None:
    for path in (ROOT / "models").rglob("*.py"):
        assert not any(name.split(".")[0] == "autoshard" for name in imports(path)), path


def test_handwritten_baselines_import_nothing_from_autoshard() -> None:
    for path in (ROOT / "experiments" / "handwritten").rglob("*.py"):
        assert not any(name.split(".")[0] == "autoshard" for name in imports(path)), path


def test_type_checkers_are_told_of_all_that_is_exported_and_nothing_else() -> None:
    tree = ast.parse((ROOT / "autoshard" / "__init__.py").read_text())
    told = {
        (node.module, name.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if name.asname == name.name
    }
    assert told == {(f"autoshard.{home}", name) for name, home in autoshard._HOME.items()}
    for home, name in told:
        assert getattr(autoshard, name) is getattr(importlib.import_module(home), name)
        assert name in dir(autoshard)
    with pytest.raises(AttributeError, match="'autoshard' has no attribute 'serach'"):
        autoshard.serach  # noqa: B018


def test_a_worker_begins_with_little() -> None:
    code = (
        "import sys, autoshard.rungs.worker.child;"
        "print(*(name for name in sys.modules if name.startswith('autoshard')))"
    )
    asked = [sys.executable, "-P", "-c", code]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=True)
    assert "autoshard.rungs.worker.process" in done.stdout.split()
    assert not {"autoshard.api", "autoshard.program.analysis", "autoshard.plan.plan"} & set(
        done.stdout.split()
    )
