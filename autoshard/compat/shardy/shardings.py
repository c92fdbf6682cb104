"""Shardings as Shardy writes them: made of mesh axes, and read back."""

import functools
import re
from collections.abc import Sequence

from jaxlib.mlir import ir

from autoshard.compat.shardy.stablehlo import MESH_NAME, Attribute

Dims = tuple[tuple[tuple[str, ...], bool], ...]
"""For each dimension the mesh axes that shard it and whether the partitioner may add more."""


def sharding_text(dims: Dims) -> str:
    """The Shardy attribute for one tensor, as text."""
    parts = []
    for axes, is_open in dims:
        names = ", ".join(a if ":(" in a else f'"{a}"' for a in axes)
        parts.append("{" + names + (", ?" if names and is_open else "?" if is_open else "") + "}")
    return f"#sdy.sharding<@{MESH_NAME}, [{', '.join(parts)}]>"


class Attributes:
    """Parses attributes of one context, each text once."""

    def __init__(self, context: ir.Context):
        self._context = context
        self._memo: dict[str, Attribute] = {}

    def __call__(self, text: str) -> Attribute:
        found = self._memo.get(text)
        if found is None:
            found = self._memo[text] = ir.Attribute.parse(text, context=self._context)
        return found


def mesh_text(mesh: Sequence[tuple[str, int]]) -> str:
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh)
    return f"#sdy.mesh<[{axes}]>"


@functools.lru_cache(maxsize=65536)
def parse_sharding(text: str) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of each dimension in a printed `#sdy.sharding<@mesh, [{"x"}, {}]>`.

    A part of an axis is printed `"x":(1)4`; it is kept in that form.
    """
    body = text[text.index("[") + 1 : text.rindex("]")] if "[" in text else ""
    if "replicated" in text:
        body = text[text.index("[") + 1 : text.index("]")]
    dims = []
    for part in re.findall(r"\{([^}]*)\}", body):
        dims.append(tuple(re.findall(r'"[^"]+"(?::\(\d+\)\d+)?', part)))
    return tuple(tuple(a.strip('"') if ":" not in a else a for a in dim) for dim in dims)
