"""What can be named as a target here, as plain text."""

import dataclasses
import os
import textwrap
from collections.abc import Iterator, Mapping

from autoshard.compat.xla.compilers import compiler_version, require_compiler
from autoshard.errors import TargetError
from autoshard.target.catalogue.chips import Chip, Figure, Link, Shapes
from autoshard.target.catalogue.loading import catalogue

WIDTH = 110
_PLATFORMS = {"tpu": "TPU", "cuda": "GPU"}
_HOPS = {"torus": ("a link", "a hop"), "switch": ("a device", "a step")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The compiler for one platform.

    Attributes:
      version: package and version; None where none is installed.
      problem: why it cannot be used, with the command that puts it right; "" where it can.
    """

    platform: str
    version: str | None
    problem: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The hardware that can be planned for. `str()` lists it.

    Attributes:
      chips: by name.
      compilers: what compiles for each platform in this environment.
    """

    chips: Mapping[str, Chip]
    compilers: tuple[Compiler, ...]

    def sources(self, name: str) -> str:
        """Where each figure of a chip comes from, one a paragraph.

        Raises:
          TargetError: no chip of that name.
        """
        if name not in self.chips:
            raise TargetError(f"got chip {name!r}, expected one of {', '.join(self.chips)}")
        chip = self.chips[name]
        told: list[tuple[str, str, Figure | Shapes]] = [
            (field, _amount(figure), figure) for field, figure in figures(chip)
        ]
        if chip.shapes is not None:
            shapes = ", ".join("x".join(map(str, shape)) for shape in chip.shapes.value)
            told.append(("shapes", shapes, chip.shapes))
        return "\n".join(
            _wrapped(f"{field}: ", f"{amount}. {of.source} ({of.date or 'no date'})")
            for field, amount, of in told
        )

    def __str__(self) -> str:
        lines = ['A target is named "chip:shape" or, with several slices, "chip:shape*slices".']
        for compiler in self.compilers:
            chips = [c for c in self.chips.values() if c.platform == compiler.platform]
            ready = compiler.problem or f"compiled by {compiler.version}, which is installed"
            lines += ["", _wrapped(f"{_PLATFORMS[compiler.platform]}: ", ready)]
            for chip in chips:
                lines += ["", *_described(chip)]
        return "\n".join(lines)


def targets(path: str | os.PathLike[str] | None = None) -> Targets:
    """Lists the hardware that `mesh` can name, and whether its compiler is installed.

    Args:
      path: your own catalogue file, merged over the built-in catalogue.

    Returns:
      A record. `str()` lists chips, examples of names, figures and compilers.

    Raises:
      CatalogueError: the file cannot be read or has a wrong figure.
    """
    return Targets(chips=catalogue(path), compilers=tuple(map(_compiler, _PLATFORMS)))


def examples(chip: Chip) -> tuple[str, ...]:
    """Names of targets with this chip: one host, more of them, two slices."""
    if chip.platform == "tpu":
        shapes = [chip.host_shape, (4,) * chip.dims]
        if chip.shapes is not None and not set(shapes) <= set(chip.shapes.value):
            shapes = [chip.shapes.value[0], chip.shapes.value[-1]]
    else:
        shapes = [(1, *chip.host_shape), (4, *chip.host_shape)]
    names = [f"{chip.name}:{'x'.join(map(str, shape))}" for shape in shapes]
    return (*names, f"{names[1]}*2") if chip.link("dcn") else tuple(names)


def figures(chip: Chip) -> Iterator[tuple[str, Figure]]:
    """All figures of a chip with the names of their fields, as a catalogue file has them."""
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, Figure):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from ((f"{field.name}.{key}", figure) for key, figure in value.items())
    for link in chip.links:
        yield f"links.{link.level}.bandwidth", link.bandwidth
        yield f"links.{link.level}.latency", link.latency


def _compiler(platform: str) -> Compiler:
    try:
        version: str | None = require_compiler(platform)
        problem = ""
    except TargetError as error:
        version, problem = compiler_version(platform), str(error)
    return Compiler(platform=platform, version=version, problem=problem)


def _described(chip: Chip) -> list[str]:
    tpu = chip.platform == "tpu"
    shape = "x".join(map(str, chip.host_shape))
    parts = [
        chip.device_kind,
        "1 device a chip"
        if chip.devices_per_chip == 1
        else f"{chip.devices_per_chip} devices a chip",
        f"hosts of {shape} {'chips' if tpu else 'devices'}",
    ]
    if chip.shapes is not None:
        parts.append(f"slices of {', '.join('x'.join(map(str, s)) for s in chip.shapes.value)}")
    elif chip.max_shape:
        parts.append(f"slices up to {'x'.join(map(str, chip.max_shape))}")
    rates = ", ".join(f"{dtype} {_amount(figure)}" for dtype, figure in chip.flops.items())
    memory = f"{_amount(chip.memory_bytes)}, usable {_amount(chip.usable_bytes)}"
    fixed = f"{_amount(chip.launch_s)} a kernel"
    if chip.clock_hz is not None:
        fixed += f"; compiler's cycles at {_amount(chip.clock_hz)}"
    return [
        _wrapped(f"{chip.name}: ", ", ".join(parts), indent=0),
        _wrapped("e.g. ", "  ".join(f'"{name}"' for name in examples(chip))),
        _wrapped("matrix products: ", rates),
        _wrapped("other arithmetic: ", f"{_amount(chip.element_flops)}; {fixed}"),
        _wrapped("memory: ", f"{memory}, {_amount(chip.memory_bandwidth)}"),
        *(_wrapped(f"{link.level}: ", _joined(link)) for link in chip.links),
    ]


def _joined(link: Link) -> str:
    sender, hop = _HOPS[link.kind]
    text = f"{link.kind}, {_amount(link.bandwidth)} {sender} and direction, "
    text += f"{_amount(link.latency)} {hop}"
    if link.kind == "switch":
        joins = "all devices" if link.domain is None else f"{link.domain} devices"
        return f"{text}, joins {joins}"
    if link.wraps_at is None:
        return f"{text}, wraps around nowhere"
    where = "where all extents are multiples" if link.cubes else "where the extent is a multiple"
    return f"{text}, wraps around {where} of {link.wraps_at}"


def _amount(figure: Figure) -> str:
    """A figure to four digits with an SI prefix; memory in GiB."""
    value, unit = figure.value, figure.unit
    if unit == "bytes":
        return f"{value / 2**30:.4g} GiB"
    small = ((1e-9, "n"), (1e-6, "u"), (1e-3, "m"))
    large = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
    for scale, prefix in large:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit.replace('bytes', 'B')}"
    if unit == "s" and 0 < value < 1:
        scale, prefix = next(s for s in reversed(small) if value >= s[0] or s is small[0])
        return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit.replace('bytes', 'B')}"


def _wrapped(head: str, text: str, indent: int = 2) -> str:
    """A paragraph of at most `WIDTH` columns with a hanging indent."""
    return textwrap.fill(
        head + text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
