"""Targets that are not here: "v5p:4x4x4*2" -> chips, shape and where each device stands.

No JAX devices and no compiler are needed: the order of devices is the one in which JAX's own
topologies list them (libtpu 0.0.42 and 0.0.50, CUDA plugin 0.10.2 and 0.12.0; held by the tests
marked deviceless): by slice, by host, and on a host by chip, the first dimension fastest.

Not modelled: twisted tori, which some slices of v4 and v5p can be had as.
"""

import contextlib
import dataclasses
import difflib
import functools
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from autoshard.errors import TargetError
from autoshard.records.positions import Position
from autoshard.target.catalogue import Chip, Link
from autoshard.target.catalogue.listing import examples

MAX_DEVICES = 65536
"""More than any machine has; a slip of the pen should not fill the memory."""

_LONGEST = 200
_NAME = re.compile(r"(?P<chip>[^:*\s]+):(?P<shape>[^:*\s]+)(?:\*(?P<slices>[^:*\s]+))?")
_Fail = Callable[[str, str], TargetError]
_EXTENT = re.compile(r"[0-9]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hardware that a target names. Made by `parse_topology`.

    Attributes:
      shape: TPU: chips along each dimension of the torus of one slice; GPU: hosts, devices a host.
      slices: how many of these, joined by the datacenter network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int

    @property
    def name(self) -> str:
        """The canonical name: what `parse_topology` reads; equal for equal topologies."""
        several = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.chip.name}:{_joined(self.shape)}{several}"

    @property
    def device_count(self) -> int:
        return self.slices * math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of one host along the dimensions of the torus (TPU); (1, devices of it) (GPU)."""
        if self.chip.platform == "tpu":
            return tuple(map(min, self.shape, self.chip.host_shape))
        return (1, self.shape[1])

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where each device stands, in the order in which the compiler lists the devices."""
        return _positions(self)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dimension of the torus closes to a ring; () where there is no torus."""
        torus = next((link for link in self.chip.links if link.kind == "torus"), None)
        if torus is None:
            return ()
        at = torus.wraps_at
        rings = tuple(at is not None and extent % at == 0 for extent in self.shape)
        return rings if all(rings) or not torus.cubes else (False,) * len(rings)

    def part(self, link: Link, position: Position) -> object:
        """Which of the parts that a link joins a device is in: its chip, its slice, its switch."""
        if link.level == "chip":
            return (position.slice, position.coords)
        if link.kind == "torus":
            return position.slice
        # Of all levels only the outermost one joins slices.
        scope, host = 0, position.host
        if link.level != "dcn":
            hosts = math.prod(self.shape) // math.prod(self.host_shape)
            scope, host = position.slice, position.host % hosts
        if link.domain is None:
            return scope
        # Domains are of whole hosts, or parts of one: a target may use a part of each.
        per_host = math.prod(self.chip.host_shape) * self.chip.devices_per_chip
        inside = position.coords[-1] if self.chip.platform == "cuda" else 0
        return scope, (host * per_host + inside) // link.domain

    @property
    def compiler_name(self) -> str:
        """What the platform's compiler calls this: `topology_name` of JAX's `get_topology_desc`.

        TPU: one slice, "v5p:4x4x4", also of a chip of another name that inherits v5p. CUDA:
        "1x8x8", slices x hosts x devices of a host.
        """
        if self.chip.platform == "tpu":
            return f"{self.chip.libtpu_name}:{_joined(self.shape)}"
        return _joined((self.slices, *self.shape))

    @property
    def compiler_options(self) -> dict[str, object]:
        """What else `get_topology_desc` must be told, beside platform and name.

        libtpu takes every slice for a mesh without wraparound, every host for 2x2 chips and, on v4,
        the cores of a chip for two devices, unless told otherwise.
        """
        if self.chip.platform != "tpu":
            return {"target_config": self.chip.target_config, "topology": self.compiler_name}
        options: dict[str, object] = {
            "chips_per_host_bounds": _padded(self.host_shape, 1),
            "wrap": _padded(self.wraps, False),
        }
        if self.chip.chip_config:
            options["chip_config_name"] = self.chip.chip_config
        if self.slices > 1:
            options["num_slices"] = self.slices
        return options


def arrangement(positions: Sequence[Position], tpu: bool) -> dict[str, list[int]]:
    """How devices stand, as far as links depend on it, for comparing and as JSON.

    Returns:
      "hosts", and of TPUs "slices" and "torus": numbers of them, and the extents of a slice above
      one, rising, because which way a torus is turned says nothing. Of GPUs jax says other slices
      than names do: left out.
    """
    found = {"hosts": [len({p.host for p in positions})]}
    if tpu:
        first = [p.coords for p in positions if p.slice == positions[0].slice]
        extents = (max(along) - min(along) + 1 for along in zip(*first, strict=True))
        found["slices"] = [len({p.slice for p in positions})]
        found["torus"] = sorted(n for n in extents if n > 1)
    return found


@functools.lru_cache(maxsize=8)
def _positions(topology: Topology) -> tuple[Position, ...]:
    host_shape, shape = topology.host_shape, topology.shape
    hosts = tuple(n // m for n, m in zip(shape, host_shape, strict=True))
    places = [
        (number, tuple(h * m + c for h, m, c in zip(host, host_shape, chip, strict=True)), core)
        for number, host in enumerate(_grid(hosts))
        for chip in _grid(host_shape)
        for core in range(topology.chip.devices_per_chip)
    ]
    return tuple(
        Position(slice=index, host=index * math.prod(hosts) + host, coords=coords, core=core)
        for index in range(topology.slices)
        for host, coords, core in places
    )


def _grid(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All coordinates in a shape, the first dimension fastest."""
    return (point[::-1] for point in itertools.product(*map(range, shape[::-1])))


def parse_topology(name: str, chips: Mapping[str, Chip]) -> Topology:
    """Reads a target's name.

    Args:
      name: "chip:shape", or "chip:shape*slices" for several slices. The shape of a TPU slice is
        its chips along each dimension of the torus ("v5e:16x16", "v5p:4x4x4*2"); that of a GPU
        target is hosts x devices of a host ("h100:4x8").
      chips: what can be named, from `autoshard.catalogue.catalogue`.

    Raises:
      TargetError: an unknown chip, a malformed shape, or one that the chip cannot have; the message
        says what was got, what was expected and what to do next.
    """
    if len(name) > _LONGEST:
        raise TargetError(
            f"got a target name of {len(name)} characters, {name[:40]!r}..., expected at most"
            f" {_LONGEST}, such as 'v5p:4x4x4'"
        )
    match = _NAME.fullmatch(name.strip())
    head = name.strip().partition(":")[0]
    if match is None and head in chips:
        raise TargetError(
            f"target {name!r}: got no readable shape, expected e.g. {_examples(chips[head])}"
        )
    if match is None:
        raise TargetError(
            f"target {name!r}: expected 'chip:shape' or 'chip:shape*slices', e.g."
            " 'v5p:4x4x4' or 'h100:4x8'; print(autoshard.targets()) lists what can be named"
        )
    chip = chips.get(match["chip"])
    if chip is None:
        close = difflib.get_close_matches(match["chip"].lower(), chips, n=3, cutoff=0.5)
        near = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise TargetError(
            f"target {name!r}: got unknown chip {match['chip']!r}; {near}Known are"
            f" {', '.join(chips)}; a chip of your own can be given in a catalogue file"
            " (docs/targets.md)"
        )

    def fail(got: str, expected: str) -> TargetError:
        return TargetError(
            f"target {name!r}: got {got}, expected {expected}; e.g. {_examples(chip)}"
        )

    shape = tuple(_number(text, fail) for text in match["shape"].split("x"))
    slices = _number(match["slices"], fail) if match["slices"] else 1
    if len(shape) != chip.dims:
        meaning = "hosts x devices of a host"
        if chip.platform == "tpu":
            meaning = "chips along each dimension of the torus"
        raise fail(f"{len(shape)} extents", f"{chip.dims} for {chip.name}: {meaning}")
    if chip.platform == "tpu":
        _check_slice(chip, shape, fail)
    elif shape[1] > chip.host_shape[0]:
        raise fail(f"{shape[1]} devices a host", f"at most {chip.host_shape[0]} of {chip.name}")
    if slices > 1 and chip.link("dcn") is None:
        raise fail(
            f"{slices} slices",
            f"none: {chip.name} has no link of level 'dcn' between slices; give more hosts",
        )
    topology = Topology(chip=chip, shape=shape, slices=slices)
    if topology.device_count > MAX_DEVICES:
        raise fail(f"{topology.device_count} devices", f"at most {MAX_DEVICES}")
    _check_joined(topology, fail)
    return topology


def at_least(topology: Topology, device_count: int) -> Topology | None:
    """The smallest target that this one can grow to and that has so many devices; None: none has.

    TPU: slices that can be had, of the same number as long as they can grow; of equally many
    devices the most cubic. GPU: whole hosts.
    """
    chip = topology.chip

    def read(shape: Sequence[int], slices: int) -> Topology | None:
        name = Topology(chip=chip, shape=tuple(shape), slices=slices).name
        with contextlib.suppress(TargetError):
            return parse_topology(name, {chip.name: chip})
        return None

    if topology.device_count >= device_count:
        return topology
    if chip.platform != "tpu":
        (each,) = chip.host_shape
        return read((-(-device_count // (each * topology.slices)), each), topology.slices)
    whole = read(tuple(map(max, topology.shape, chip.host_shape)), topology.slices)
    queue = [] if whole is None else [_by_size(whole)]
    seen = {whole}
    while queue:
        *_, found = heapq.heappop(queue)
        if found.device_count >= device_count:
            return found
        grown = [t for i in range(chip.dims) if (t := _grown(found, i, read)) is not None]
        more = None if grown else read(found.shape, found.slices + 1)
        for other in {*grown, *([more] if more else [])} - seen:
            seen.add(other)
            heapq.heappush(queue, _by_size(other))
    return None


_Read = Callable[[Sequence[int], int], Topology | None]


def _grown(topology: Topology, dimension: int, read: _Read) -> Topology | None:
    """The next larger slice that there is along one dimension of the torus."""
    shape = list(topology.shape)
    edge = max((link.wraps_at or 1 for link in topology.chip.links), default=1)
    for extent in range(shape[dimension] + 1, shape[dimension] + max(edge, shape[dimension]) + 1):
        shape[dimension] = extent
        if (found := read(shape, topology.slices)) is not None:
            return found
    return None


def _by_size(topology: Topology) -> tuple[int, int, tuple[int, ...], Topology]:
    return topology.device_count, sum(topology.shape), topology.shape, topology


def _check_joined(topology: Topology, fail: _Fail) -> None:
    """Refuses devices that no link joins: what they send each other would cost nothing."""
    outermost = topology.chip.links[-1]
    if outermost.domain is None:  # it joins all there are
        return
    apart = min(
        len({topology.part(link, position) for position in topology.positions})
        for link in topology.chip.links
    )
    if apart > 1:
        raise fail(
            f"{topology.device_count} devices in {apart} parts that no link joins (the domain of"
            f" {outermost.level!r}, the outermost, is {outermost.domain})",
            "links between all of them: name fewer hosts, or correct"
            f" links.{outermost.level}.domain of chip {topology.chip.name!r} in the catalogue file,"
            " or add a link of level 'dcn'",
        )


def _check_slice(chip: Chip, shape: tuple[int, ...], fail: _Fail) -> None:
    """Refuses shapes that no slice of this kind of TPU has.

    Where the catalogue lists the shapes, all others; else one chip alone is taken, but of those
    whose slices are made of cubes: their hosts are not divided.
    """
    got, host = f"a slice of {_joined(shape)} chips", chip.host_shape
    if chip.shapes is not None:
        if shape not in chip.shapes.value:
            raise fail(got, f"one of {', '.join(map(_joined, chip.shapes.value))}")
        return
    torus = next((link for link in chip.links if link.kind == "torus"), None)
    edge = torus.wraps_at if torus is not None and torus.cubes else None
    if math.prod(shape) == 1 and edge is None:
        return
    if any(n % m for n, m in zip(shape, host, strict=True)):
        alone = "" if edge else "one chip or "
        raise fail(got, f"{alone}multiples of a host's {_joined(host)}")
    if edge is not None:
        _check_cubes(chip, shape, edge, fail)
    elif chip.max_shape:
        for n, limit in zip(sorted(shape), sorted(chip.max_shape), strict=True):
            if limit % n:
                largest = _joined(chip.max_shape)
                raise fail(f"an extent of {n}", f"a part of the largest slice, {largest}")


def _check_cubes(chip: Chip, shape: tuple[int, ...], edge: int, fail: _Fail) -> None:
    """Refuses what is neither whole cubes nor a part of one, or larger than any slice."""
    within = all(edge % n == 0 for n in shape)
    if not within and any(n % edge for n in shape):
        raise fail(
            f"a slice of {_joined(shape)} chips",
            f"whole cubes, all extents multiples of {edge}, or a part of one cube,"
            f" all extents divisors of {edge}",
        )
    largest = chip.max_shape
    if largest and math.prod(shape) > math.prod(largest):
        raise fail(
            f"a slice of {math.prod(shape)} chips",
            f"at most {math.prod(largest)} ({_joined(largest)})",
        )
    if chip.max_extent is not None and max(shape) > chip.max_extent:
        raise fail(
            f"an extent of {max(shape)}",
            f"multiples of {edge} up to {chip.max_extent}, the longest that is offered (max_extent"
            " in a catalogue file of yours lifts it)",
        )


def _number(text: str, fail: _Fail) -> int:
    if not _EXTENT.fullmatch(text):
        raise fail(repr(text), "a whole number")
    if int(text) == 0:
        raise fail("0", "a number of at least 1")
    return int(text)


def _examples(chip: Chip) -> str:
    return ", ".join(map(repr, examples(chip)))


def _joined(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """Three extents: libtpu counts every torus as of three dimensions."""
    return (*values, *[fill] * (3 - len(values)))
