"""The digest of a rung's code: an estimate in a journal holds for the code that made it.

The digest is of syntax trees without docstrings, so that words, comments and line breaks change no
key. A measurement depends on no code of autoshard but the race's protocol (`measuring.PROTOCOL`).
"""

import ast
import functools
import hashlib
import pathlib

_ROOT = pathlib.Path(__file__).parents[1]
_JUDGED = ("records", "compat", "target", "program", "space", "lowering")
_CODE = {
    "propagate": (*_JUDGED, "rungs/propagate"),
    "compile": (*_JUDGED, "rungs/propagate", "rungs/compile"),
}
"""By rung: packages whose code its estimates depend on. Rung 2 compiles the constraints that rung 1
finds to be enough."""


@functools.cache
def code_digest(rung: str) -> str:
    """Hex digest of the code of a rung.

    Args:
      rung: "propagate" or "compile".
    """
    whole = hashlib.sha256()
    for package in _CODE[rung]:
        for path in sorted((_ROOT / package).rglob("*.py")):
            whole.update(f"{path.relative_to(_ROOT).as_posix()}\n".encode())
            whole.update(tree_text(path.read_text(encoding="utf-8")).encode())
    return whole.hexdigest()[:16]


def tree_text(source: str) -> str:
    """A module's syntax tree without docstrings and positions, as text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # strings alone in a line are docstrings, of attributes too
            node.body = [one for one in body if not _is_docstring(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
