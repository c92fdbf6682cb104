"""A parser of optimized, scheduled HLO text, as `compiled.as_text()` prints it.

It reads what the counts need and keeps every other attribute as text. Read on XLA:CPU, XLA:TPU
(libtpu 0.0.42 and 0.0.50) and XLA:GPU text; on jax 0.10.2 and 0.12.0. Not read: inline computations
(`to_apply={...}`), which scheduled modules do not hold.
"""

import functools
import re
from collections.abc import Iterator

from autoshard.rungs.compile.hlo.records import Computation, HloError, HloModule, Instruction, Shape

_LINE = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][a-z0-9\-]*)\((.*)", re.DOTALL
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[{}()]|, ([\w.\-]+)=')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"%([\w.\-]+)")
_LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TABLE = re.compile(
    r'^(\d+) (?:"(.*)"|\{file_name_id=(\d+) .*?\bline=(\d+).*\}|\{file_location_id=(\d+).*\})$',
    re.MULTILINE,
)
_ROLES = frozenset(
    (
        "to_apply",
        "calls",
        "body",
        "condition",
        "branch_computations",
        "true_computation",
        "false_computation",
        "called_computations",
        "select",
        "scatter",
    )
)


def parse(text: str) -> HloModule:
    """Reads the text of an optimized, scheduled HLO module.

    Args:
      text: what `jax.stages.Compiled.as_text()` returned.

    Raises:
      HloError: a line that is no HLO this version knows; the message holds it.
    """
    header = text[: text.find("\n")]
    found = re.match(r"HloModule ([^\s,]+)", header)
    if not found:
        raise HloError(f"expected text that begins with `HloModule`, got {header[:80]!r}")
    computations: dict[str, Computation] = {}
    entry = name = ""
    lines: list[Instruction] = []
    for number, line in _logical_lines(text):
        if line[0] in " \t":
            if not name:
                raise HloError(f"line {number}: expected a computation first, got {line[:160]!r}")
            lines.append(_instruction(line, number))
        elif line[0] == "}" and name:
            index = {i.name: i for i in lines}
            computations[name] = Computation(name=name, instructions=tuple(lines), _index=index)
            name, lines = "", []
        elif line[-1] == "{" and (head := _HEAD.match(line)):
            name = head[2]
            entry = name if head[1] else entry
    if name or not entry:
        raise HloError(
            f"{found[1]}: expected an ENTRY computation and a closing brace, got neither"
        )
    partitions = _header_int(header, "num_partitions")
    frames = _frames(text[: text.find("\n%")])
    return HloModule(
        name=found[1],
        entry=entry,
        computations=tuple(computations.values()),
        device_count=partitions * _header_int(header, "replica_count"),
        partition_count=partitions,
        tiled=re.search(r"\{[\d,]*:T\(", header) is not None,
        frames=tuple(frames.items()),
        _index=computations,
        _frames=frames,
    )


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; an instruction printed over several lines comes as one.

    Constants are printed so, and kernels whose `kernel_metadata` holds JSON.
    """
    start, held, depth = 0, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if held:
            held += "\n" + line
            depth += _opened(line)
        elif line and line[0] == " " and line.count("{") != line.count("}"):
            start, held, depth = number, line, _opened(line)
        elif line:
            yield number, line
        if held and depth <= 0:
            yield start, held
            held = ""


def _opened(line: str) -> int:
    """How many braces a line opens beyond those it closes, quoted ones not counted."""
    bare = _QUOTED.sub("", line)
    return bare.count("{") - bare.count("}")


def _instruction(line: str, number: int) -> Instruction:
    found = _LINE.match(line)
    if not found:
        raise HloError(f"line {number}: expected `%name = shape opcode(...)`, got {line[:160]!r}")
    root, name, shape, opcode, rest = found.groups()
    end = _closing(rest)
    if end < 0:
        raise HloError(f"line {number}: expected a closing bracket, got {line[:160]!r}")
    inside, attributes = rest[:end], _attributes(rest[end + 1 :])
    literal = opcode in ("parameter", "constant")
    called = tuple((k, c) for k, v in attributes if k in _ROLES for c in _names(v.strip("{}")))
    return Instruction(
        name=name,
        opcode=opcode,
        elements=_elements(shape),
        operands=() if literal else _names(inside),
        root=root is not None,
        literal=inside if literal else "",
        called=called,
        attributes=attributes,
    )


def _closing(text: str) -> int:
    """Where the bracket that is open at the start of `text` closes, or -1."""
    end = text.find(")")
    if text.find("(", 0, end) < 0:
        return end
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return -1


def _names(text: str) -> tuple[str, ...]:
    """Names in a list such as `%a, f32[2]{0} %b`; the percent signs may be missing."""
    if "%" in text or not text:
        return tuple(_NAME.findall(text))
    text = re.sub(r"/\*.*?\*/", "", text)
    while (bare := re.sub(r"[\[({][^\[\](){}]*[\])}]", "", text)) != text:
        text = bare
    return tuple(part.split()[-1] for part in text.split(",") if part.strip())


def _attributes(text: str) -> tuple[tuple[str, str], ...]:
    """Splits `, a=1, b={x, y=2}` at the commas that stand in no bracket and no string."""
    found: list[tuple[str, str]] = []
    key, start, depth = "", 0, 0
    for token in _TOKEN.finditer(text):
        if token[1] is None:
            depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(token[0], 0)
        elif depth == 0 and not (token[1] == "device_ids" and key == "replica_groups"):
            if key:
                found.append((key, text[start : token.start()]))
            key, start = token[1], token.end()
    if key:
        found.append((key, text[start:]))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _elements(text: str) -> tuple[tuple[Shape, ...], ...]:
    """The leaves of each top-level element of a printed shape."""
    if not text.startswith("("):
        return (_leaves(text),)
    elements, depth, start = [], 0, 1
    for found in re.finditer(r"[(){}\[\],]", text):
        if found[0] in "({[":
            depth += 1
        elif found[0] in ")}]":
            depth -= 1
        if (found[0] == "," and depth == 1) or depth == 0:
            if part := text[start : found.start()].strip():
                elements.append(_leaves(part))
            start = found.end()
    return tuple(elements)


@functools.lru_cache(maxsize=4096)
def _leaves(text: str) -> tuple[Shape, ...]:
    leaves = []
    for dtype, dims, layout in _LEAF.findall(text):
        space = _SPACE.search(layout)
        extents = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        leaves.append(Shape(dtype, extents, int(space[1]) if space else 0))
    if not leaves and text.strip("() "):
        raise HloError(f"expected a shape such as f32[8,128]{{1,0}}, got {text[:80]!r}")
    return tuple(leaves)


def _header_int(header: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", header)
    return int(found[1]) if found else 1


def _frames(head: str) -> dict[int, str]:
    """`file:line` by stack frame id, from the tables in front of the computations."""
    files: dict[int, str] = {}
    lines: dict[int, str] = {}
    frames: dict[int, str] = {}
    table = head.find("FileNames")
    for key, text, file, line, location in _TABLE.findall(head[table:] if table >= 0 else ""):
        if file:
            lines[int(key)] = f"{files.get(int(file), '?')}:{line}"
        elif location:
            frames[int(key)] = lines.get(int(location), "")
        elif int(key) not in lines and not lines:
            # FunctionNames have the same form as FileNames and follow them.
            files.setdefault(int(key), text)
    return frames
