"""Reads catalogue files: TOML with one table a chip; see docs/targets.md.

Everything is checked when it is read: a figure that is missing, negative, not finite, of the wrong
type or unknown is an error that names file, chip and field. Nothing is guessed.
"""

import dataclasses
import difflib
import importlib.resources
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Never

from autoshard.errors import TargetError
from autoshard.target.catalogue.chips import DTYPES, LEVELS, Chip, Figure, Link, Shapes

FILES = ("tpu.toml", "gpu.toml")
"""The built-in catalogue."""

PLATFORMS = ("tpu", "cuda")

UNITS = {
    "flops": "FLOP/s",
    "element_flops": "FLOP/s",
    "memory_bytes": "bytes",
    "usable_bytes": "bytes",
    "memory_bandwidth": "bytes/s",
    "clock_hz": "Hz",
    "launch_s": "s",
    "bandwidth": "bytes/s",
    "latency": "s",
}
"""Unit of each figure, by field."""

MAY_BE_ZERO = ("launch_s", "latency")

CHIP_FIELDS = (
    *("platform", "device_kind", "flops", "element_flops", "memory_bytes", "usable_bytes"),
    *("memory_bandwidth", "clock_hz", "launch_s", "devices_per_chip", "host_shape", "max_shape"),
    *("max_extent", "shapes", "links", "target_config", "libtpu_name", "chip_config"),
)
OPTIONAL = (
    *("clock_hz", "max_shape", "max_extent", "shapes"),
    *("target_config", "libtpu_name", "chip_config"),
)
LIMITS = ("max_shape", "max_extent", "shapes")
"""What bounds a slice: a chip that says one of them, or other hosts, inherits none."""

FIGURE_FIELDS = ("value", "unit", "source", "date")
LINK_FIELDS = ("kind", "bandwidth", "latency", "domain", "wraps_at", "cubes")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_DATE = re.compile(r"\d{4}(-\d{2}(-\d{2})?)?")
_Table = dict[str, object]


class CatalogueError(TargetError):
    """A catalogue file that cannot be read, or that has a figure missing, wrong or unknown."""


def catalogue(path: str | os.PathLike[str] | None = None) -> Mapping[str, Chip]:
    """The chips that targets can name.

    Args:
      path: a TOML file of one's own, merged over the built-in catalogue: it may add a chip, add
        one that inherits another's figures, or correct a figure of a built-in one.

    Returns:
      Chips by name.

    Raises:
      CatalogueError: the file cannot be read, or a figure is missing, negative, not finite, of the
        wrong type or unknown; the message names file, chip and field.
    """
    folder = importlib.resources.files("autoshard.target.catalogue")
    raw: dict[str, _Table] = {}
    files: dict[str, str] = {}
    for name in FILES:
        own = _parse(folder.joinpath(name).read_bytes(), name)
        raw |= _resolved(own, raw, name)
        files |= dict.fromkeys(own, name)
    if path is not None:
        label = os.fspath(path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise CatalogueError(f"cannot read the catalogue file {label}: {error}") from error
        own = _parse(data, label)
        raw |= _resolved(own, raw, label)
        files |= dict.fromkeys(own, label)
    return {name: _chip(table, _Where(files[name], name)) for name, table in raw.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Where:
    """Where in which file a value stands, for messages."""

    file: str
    chip: str
    field: str = ""

    def at(self, field: str) -> "_Where":
        return _Where(self.file, self.chip, f"{self.field}.{field}" if self.field else field)

    def fail(self, got: object, expected: str) -> Never:
        field = f"{self.field}: " if self.field else ""
        raise CatalogueError(
            f"{self.file}: chip {self.chip!r}: {field}got {got}, expected {expected}"
        )


def _parse(data: bytes, label: str) -> dict[str, _Table]:
    """The chip tables of a file, not yet checked."""
    try:
        parsed = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{label} is not a TOML file: {error}") from error
    unknown = [key for key in parsed if key != "chip"]
    if unknown:
        raise CatalogueError(f"{label}: got {unknown[0]!r}, expected tables [chip.NAME] alone")
    chips = parsed.get("chip")
    if not isinstance(chips, dict) or not chips:
        raise CatalogueError(f"{label}: got no chip, expected at least one table [chip.NAME]")
    for name, table in chips.items():
        where = _Where(label, name)
        if not _NAME.fullmatch(name):
            where.fail(repr(name), "a name of lower-case letters, digits, '.', '_' and '-'")
        if not isinstance(table, dict):
            where.fail(repr(table), f"a table [chip.{name}]")
        _known(table, ("inherits", *CHIP_FIELDS), where)
    return chips


def _resolved(
    own: Mapping[str, _Table], base: Mapping[str, _Table], label: str
) -> dict[str, _Table]:
    """The chips of a file with all that they inherit."""
    done: dict[str, _Table] = {}

    def resolve(name: str, children: tuple[str, ...]) -> _Table:
        if name in done:
            return done[name]
        where = _Where(label, name)
        table = dict(own[name])
        parent = table.pop("inherits", name if name in base else None)
        if parent is None:
            done[name] = table
            return table
        if not isinstance(parent, str):
            where.at("inherits").fail(repr(parent), "the name of a chip, in quotes")
        if parent in children or (parent == name and name not in base):
            chain = " -> ".join([*children, name, parent])
            where.at("inherits").fail(chain, "a chain that ends at a chip that inherits nothing")
        if parent != name and parent in own:
            inherited = resolve(parent, (*children, name))
        elif parent in base:
            inherited = base[parent]
        else:
            where.at("inherits").fail(
                repr(parent), f"a chip: {_near(parent, [*own, *base])}{', '.join([*base, *own])}"
            )
        if any(field in table for field in ("host_shape", *LIMITS)):
            inherited = {field: v for field, v in inherited.items() if field not in LIMITS}
        done[name] = _merged(inherited, table)
        return done[name]

    return {name: resolve(name, ()) for name in own}


def _merged(base: _Table, over: _Table) -> _Table:
    """`over` laid over `base`, table by table. A figure is replaced whole: never a new value with
    an old source."""
    result = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and "value" not in {**value, **old}:
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


def _chip(table: _Table, where: _Where) -> Chip:
    missing = [field for field in CHIP_FIELDS if field not in table and field not in OPTIONAL]
    if missing:
        where.at(missing[0]).fail("nothing", f"a value{_of(missing[0])}: a chip needs all figures")
    platform = _text(table["platform"], where.at("platform"))
    if platform not in PLATFORMS:
        where.at("platform").fail(repr(platform), " or ".join(map(repr, PLATFORMS)))
    tpu = platform == "tpu"
    if tpu != ("clock_hz" in table):
        at = where.at("clock_hz")
        at.fail(*(("nothing", "a figure in Hz (TPU)") if tpu else ("a figure", "none (GPU)")))
    if tpu == ("target_config" in table):
        at = where.at("target_config")
        at.fail(*(("a text", "none (TPU)") if tpu else ("nothing", "XLA's GpuTargetConfigProto")))
    if tpu != ("libtpu_name" in table):
        wanted = "what libtpu calls the chip, such as 'v5p' (TPU), or a chip that it inherits"
        at = where.at("libtpu_name")
        at.fail(*(("nothing", wanted) if tpu else ("a text", "none (GPU)")))
    if not tpu and "chip_config" in table:
        where.at("chip_config").fail("a text", "none (GPU)")
    host_shape = _shape(table["host_shape"], where.at("host_shape"), (2, 3) if tpu else (1,))
    dims = len(host_shape) if tpu else 2
    max_shape: tuple[int, ...] = ()
    if table.get("max_shape"):
        max_shape = _shape(table["max_shape"], where.at("max_shape"), (dims,))
    shapes = table.get("shapes") or None
    if not tpu and (shapes or table.get("max_extent")):
        where.at("shapes" if shapes else "max_extent").fail("a value", "none (GPU)")
    chip = Chip(
        name=where.chip,
        platform=platform,
        device_kind=_text(table["device_kind"], where.at("device_kind")),
        flops=_rates(table["flops"], where.at("flops")),
        element_flops=_figure(table["element_flops"], where.at("element_flops")),
        memory_bytes=_figure(table["memory_bytes"], where.at("memory_bytes")),
        usable_bytes=_figure(table["usable_bytes"], where.at("usable_bytes")),
        memory_bandwidth=_figure(table["memory_bandwidth"], where.at("memory_bandwidth")),
        clock_hz=_figure(table["clock_hz"], where.at("clock_hz")) if tpu else None,
        launch_s=_figure(table["launch_s"], where.at("launch_s")),
        devices_per_chip=_count(table["devices_per_chip"], where.at("devices_per_chip")),
        host_shape=host_shape,
        dims=dims,
        max_shape=max_shape,
        links=_links(table["links"], where.at("links")),
        target_config="" if tpu else _text(table["target_config"], where.at("target_config")),
        libtpu_name=_text(table["libtpu_name"], where.at("libtpu_name")) if tpu else "",
        chip_config=(
            _text(table["chip_config"], where.at("chip_config")) if "chip_config" in table else ""
        ),
        max_extent=_count_or(table.get("max_extent", "any"), "any", where.at("max_extent")),
        shapes=_shapes(shapes, where.at("shapes"), dims) if shapes else None,
    )
    if chip.usable_bytes.value > chip.memory_bytes.value:
        where.at("usable_bytes").fail(
            f"{chip.usable_bytes.value:g}", f"at most memory_bytes {chip.memory_bytes.value:g}"
        )
    _check_links(chip, where.at("links"))
    return chip


def _check_links(chip: Chip, where: _Where) -> None:
    """Any two devices of a target must be joined by a link of some level."""
    needed = ["ici"] if chip.platform == "tpu" else ["nvlink", "network"]
    if chip.devices_per_chip > 1:
        needed.insert(0, "chip")
    missing = [level for level in needed if chip.link(level) is None]
    if missing:
        where.fail(", ".join(link.level for link in chip.links), f"a link of level {missing[0]!r}")
    inner = chip.link("chip")
    if inner is not None and inner.domain != chip.devices_per_chip:
        where.at("chip.domain").fail(inner.domain, f"devices_per_chip {chip.devices_per_chip}")
    host = math.prod(chip.host_shape) * chip.devices_per_chip
    for link in chip.links:
        divides = link.level == "nvlink"
        if link.level == "chip" or link.domain is None or link.domain % host == 0:
            continue
        if not (divides and host % link.domain == 0):
            part = ", or a divisor of it" if divides else ""
            where.at(f"{link.level}.domain").fail(
                link.domain, f"a multiple of the {host} devices of a host{part}"
            )


def _rates(value: object, where: _Where) -> dict[str, Figure]:
    table = _mapping(value, where)
    _known(table, DTYPES, where)
    for dtype in ("f32", "bf16"):
        if dtype not in table:
            where.at(dtype).fail("nothing", "a figure in FLOP/s")
    return {dtype: _figure(table[dtype], where.at(dtype)) for dtype in DTYPES if dtype in table}


def _links(value: object, where: _Where) -> tuple[Link, ...]:
    table = _mapping(value, where)
    _known(table, LEVELS, where)
    return tuple(_link(level, table[level], where.at(level)) for level in LEVELS if level in table)


def _link(level: str, value: object, where: _Where) -> Link:
    table = _mapping(value, where)
    _known(table, LINK_FIELDS, where)
    for field in ("kind", "bandwidth", "latency"):
        if field not in table:
            where.at(field).fail("nothing", f"a value{_of(field)}")
    kind = _text(table["kind"], where.at("kind"))
    if kind not in ("torus", "switch"):
        where.at("kind").fail(repr(kind), "'torus' or 'switch'")
    foreign = ("domain",) if kind == "torus" else ("wraps_at", "cubes")
    for field in foreign:
        if field in table:
            where.at(field).fail(table[field], f"nothing: a {kind} has none")
    cubes = table.get("cubes", False)
    if not isinstance(cubes, bool):
        where.at("cubes").fail(repr(cubes), "true or false")
    return Link(
        level=level,
        kind=kind,
        bandwidth=_figure(table["bandwidth"], where.at("bandwidth")),
        latency=_figure(table["latency"], where.at("latency")),
        domain=_count_or(table.get("domain", "all"), "all", where.at("domain")),
        wraps_at=_count_or(table.get("wraps_at", "never"), "never", where.at("wraps_at")),
        cubes=cubes,
    )


def _figure(value: object, where: _Where) -> Figure:
    """A figure: a table of value, source and date, or a number that the file alone vouches for."""
    unit = _unit(where.field)
    source, date = f"a number in {where.file}", ""
    if isinstance(value, dict):
        _known(value, FIGURE_FIELDS, where)
        for field in ("value", "source", "date"):
            if field not in value:
                where.at(field).fail("nothing", "value, source and date, or a plain number")
        if value.get("unit", unit) != unit:
            where.at("unit").fail(repr(value["unit"]), repr(unit))
        source = _text(value["source"], where.at("source"))
        date = _date(value["date"], where.at("date"))
        value, where = value["value"], where.at("value")
    may_be_zero = any(part in MAY_BE_ZERO for part in where.field.split("."))
    expected = f"a finite number {'of at least' if may_be_zero else 'above'} zero, in {unit}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        where.fail(repr(value), expected)
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        where.fail(value, expected)
    return Figure(value=float(value), unit=unit, source=source, date=date)


def _unit(field: str) -> str:
    """Of "links.ici.bandwidth" that of bandwidth, of "flops.bf16" that of flops."""
    return next(UNITS[part] for part in reversed(field.split(".")) if part in UNITS)


def _of(field: str) -> str:
    return f" in {UNITS[field]}" if field in UNITS else ""


def _mapping(value: object, where: _Where) -> _Table:
    if not isinstance(value, dict):
        where.fail(repr(value), "a table")
    return value


def _text(value: object, where: _Where) -> str:
    if not isinstance(value, str) or not value.strip():
        where.fail(repr(value), "a text, not empty")
    return value


def _count(value: object, where: _Where) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        where.fail(repr(value), "a whole number of at least 1")
    return value


def _count_or(value: object, word: str, where: _Where) -> int | None:
    """A count, or None for the word that stands for no limit."""
    if value == word:
        return None
    if isinstance(value, str):
        where.fail(repr(value), f"a whole number of at least 1, or {word!r}")
    return _count(value, where)


def _shape(value: object, where: _Where, sizes: Sequence[int]) -> tuple[int, ...]:
    wanted = f"a list of {' or '.join(map(str, sizes))} whole numbers of at least 1"
    if not isinstance(value, list) or len(value) not in sizes:
        where.fail(repr(value), wanted)
    return tuple(_count(extent, where) for extent in value)


def _shapes(value: object, where: _Where, dims: int) -> Shapes:
    """Shapes of slices: a table of value, source and date, or a list the file alone vouches for."""
    source, date = f"a list in {where.file}", ""
    if isinstance(value, dict):
        _known(value, ("value", "source", "date"), where)
        for field in ("value", "source", "date"):
            if field not in value:
                where.at(field).fail("nothing", "value, source and date, or a plain list")
        source = _text(value["source"], where.at("source"))
        date = _date(value["date"], where.at("date"))
        value, where = value["value"], where.at("value")
    if not isinstance(value, list):
        where.fail(repr(value), "a list of shapes, such as [[1, 1], [2, 2]]")
    if not value:
        where.fail("[]", "at least one shape, or no field 'shapes' where hosts and limits say them")
    return Shapes(
        value=tuple(_shape(shape, where, (dims,)) for shape in value), source=source, date=date
    )


def _date(value: object, where: _Where) -> str:
    date = _text(value, where)
    if not _DATE.fullmatch(date):
        where.fail(repr(date), "'YYYY', 'YYYY-MM' or 'YYYY-MM-DD', in quotes")
    return date


def _known(table: Iterable[str], fields: Sequence[str], where: _Where) -> None:
    for key in table:
        if key not in fields:
            where.at(key).fail(
                "an unknown field", f"one of: {_near(key, fields)}{', '.join(fields)}"
            )


def _near(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"{close[0]}? " if close else ""
