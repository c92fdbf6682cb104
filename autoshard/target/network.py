"""What a collective costs on the links it runs over: torus dimensions, switches, levels of them.

A mesh axis runs over whatever links its devices are joined by: their positions say which torus
dimensions, hosts and slices a group spans. Costs are those of bandwidth-optimal algorithms on each
level, bottleneck over levels, latencies added; after "How to Scale Your Model" (Austin et al.,
2025), chapter 3 (torus), and Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), section 4 (ring and tree).

Not modelled: congestion between different collectives, in-network reduction (SHARP), and message
sizes at which a library changes protocol.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard.compat.xla.device_order import device_order
from autoshard.errors import HloError, TargetError
from autoshard.records.layout import MeshShape
from autoshard.records.subaxes import groups_along
from autoshard.records.trial import COLLECTIVE_KINDS
from autoshard.target.catalogue import Link
from autoshard.target.topology import Topology

_Numbers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one level of links joins of a group.

    Attributes:
      ways: how many members the level joins; what it joins is one member of the next level. Where
        members differ in size, how many there would be of the smallest.
      below: devices of a member, of the smallest one: so many have links of this level.
      bandwidth: bytes/s that one member can receive over this level, all its links together.
      hop_bandwidth: bytes/s to one neighbour.
      latency_s: of one step.
      steps: hops from end to end.
      crossing: of an all-to-all, seconds at the busiest cut for each byte a member holds.
    """

    ways: int
    below: int
    bandwidth: float
    hop_bandwidth: float
    latency_s: float
    steps: int
    crossing: float


def collective_s(kind: str, spans: Sequence[Span], bytes_: float) -> float:
    """Seconds of one execution of a collective over some levels of links.

    Args:
      kind: as in `trial.Collective`.
      bytes_: the larger of the local operand and the local result.

    Raises:
      HloError: the kind is unknown.
    """
    if kind not in COLLECTIVE_KINDS:
        raise HloError(
            f"got a collective of kind {kind!r}, expected one of {sorted(COLLECTIVE_KINDS)}"
        )
    if not spans:
        return 0.0
    latency = sum(s.latency_s * s.steps for s in spans)
    if kind == "collective_permute":
        return max(bytes_ / s.hop_bandwidth + s.latency_s for s in spans)
    if kind == "all_to_all":
        return max(bytes_ * s.crossing for s in spans) + latency
    # A hierarchical ring: what a level carries has been divided by the levels below it.
    busiest = max(bytes_ * (1 - 1 / s.ways) / (s.bandwidth * s.below) for s in spans)
    return (2.0 if kind == "all_reduce" else 1.0) * (busiest + latency)


class Network:
    """The links between the places of a mesh on one topology."""

    def __init__(self, topology: Topology):
        self._topology = topology
        self._known: dict[object, tuple[Span, ...]] = {}
        self._orders: dict[MeshShape, _Numbers] = {}
        self._known_parts: dict[str, _Numbers] = {}
        self._coords: _Numbers | None = None

    def spans(
        self, axes: tuple[str, ...], size: int, mesh: MeshShape, members: tuple[int, ...] = ()
    ) -> tuple[Span, ...]:
        """The levels of links that groups run over, innermost first; of all groups the dearest.

        Args:
          axes: mesh axes, or parts of them, the group runs over; () where it is no product of axes.
          size: devices of the group.
          mesh: (mesh axis, size) pairs, major to minor; they decide which device stands where.
          members: places in the mesh of one group that is no product of axes; without them such a
            group is taken to be spread evenly over all devices.

        Returns:
          () of groups of one device alone.

        Raises:
          TargetError: no link joins the devices of a group, so there is no cost either.
        """
        key = (axes, size, mesh, members)
        if key not in self._known:
            count = self._topology.device_count
            if axes:
                groups = groups_along(axes, mesh)
            else:
                groups = np.array([members or [k * count // size for k in range(size)]])
            spans, joined = self._levels(self._order(mesh)[groups])
            if not joined:
                raise TargetError(
                    f"no link of {self._topology.name} joins the devices of groups of"
                    f" {groups.shape[1]} over {axes} of the mesh {dict(mesh)}, expected one that"
                    " does: correct the domains of the chip's links (docs/targets.md)"
                )
            self._known[key] = spans
        return self._known[key]

    def _order(self, mesh: MeshShape) -> _Numbers:
        if mesh not in self._orders:
            topology = self._topology
            self._orders[mesh] = np.array(
                device_order(
                    topology.positions,
                    topology.chip.device_kind,
                    topology.chip.platform,
                    tuple(n for _, n in mesh),
                )
            )
        return self._orders[mesh]

    def _levels(self, groups: _Numbers) -> tuple[tuple[Span, ...], bool]:
        """Reads the levels off where the devices of some groups, one a row, stand.

        Levels do not join the same everywhere: a group may lie in one domain and the next across
        two, and of those it may have few devices in one and many in the other. All groups run at
        the same time and the last one counts, so every figure is the dearest that any group has;
        and a level is priced as if all that it joins were as small as the smallest: that has the
        fewest links to receive the most over. For each kind of collective this is an upper bound
        of what any group costs; where all groups and all their parts are alike it is exact.

        Returns:
          The levels, and whether they join every group.
        """
        found: list[Span] = []
        count, size = groups.shape
        group = np.repeat(np.arange(count), size)
        devices = groups.reshape(-1)
        units = np.arange(len(devices))  # what the levels so far have joined, by device
        joined = size == 1
        for link in self._topology.chip.links:
            level = _joined(group, units, self._parts(link)[devices])
            if level.most > 1:
                found.append(
                    self._torus(link, level, devices)
                    if link.kind == "torus"
                    else _switch(link, level)
                )
            units = level.part
            joined |= int(units.max()) + 1 == count
        return tuple(found), joined

    def _parts(self, link: Link) -> _Numbers:
        """For each device the number of the level's part it is in."""
        if link.level not in self._known_parts:
            topology = self._topology
            parts = [topology.part(link, position) for position in topology.positions]
            number = {part: k for k, part in enumerate(dict.fromkeys(parts))}
            self._known_parts[link.level] = np.array([number[part] for part in parts])
        return self._known_parts[link.level]

    def _torus(self, link: Link, level: "_Level", devices: _Numbers) -> Span:
        """The chips of a group in one slice; of all groups and slices the dearest figures."""
        topology = self._topology
        # All devices of a chip use its links at the same time, in this group or in others.
        one_way = link.bandwidth.value / topology.chip.devices_per_chip
        found = [_lines(topology, one_way, at) for at in self._arranged(level, devices)]
        found = [lines for lines in found if lines.steps]
        return Span(
            ways=level.ways,
            below=level.fewest,
            bandwidth=min(lines.bandwidth for lines in found),
            hop_bandwidth=min(lines.hop_bandwidth for lines in found),
            latency_s=link.latency.value,
            steps=max(lines.steps for lines in found),
            crossing=max(lines.crossing for lines in found),
        )

    def _arranged(self, level: "_Level", devices: _Numbers) -> list[list[list[int]]]:
        """How the chips of a group can lie in a slice, each way once: places on each dimension.

        Where in the slice that is makes no difference.
        """
        if self._coords is None:
            self._coords = np.array([p.coords for p in self._topology.positions])
        at = self._coords[devices]
        parts, dims = level.part.max() + 1, at.shape[1]
        lowest = np.full((parts, dims), max(self._topology.shape))
        np.minimum.at(lowest, level.part, at)
        lies = np.zeros((parts, dims, max(self._topology.shape)), dtype=bool)
        lies[level.part[:, None], np.arange(dims), at - lowest[level.part]] = True
        alike = {row.tobytes(): row for row in lies}
        return [[np.flatnonzero(along).tolist() for along in row] for row in alike.values()]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """What one level of links joins of some groups.

    Attributes:
      part: by device of the groups, the number of the part of its group that the level joins.
      most: units of the level below in the part that has most of them.
      ways: how many units a part would have if all were as small as its smallest; of all parts.
      fewest: devices of the smallest unit.
    """

    part: _Numbers
    most: int
    ways: int
    fewest: int


def _joined(group: _Numbers, units: _Numbers, domains: _Numbers) -> _Level:
    """What a level joins: devices of one group in one domain.

    Args:
      group, units, domains: numbers, by device of the groups; a unit is what the levels below have
        joined.
    """
    _, part, devices = np.unique(
        group * (domains.max() + 1) + domains, return_inverse=True, return_counts=True
    )
    pairs, sizes = np.unique(part * (units.max() + 1) + units, return_counts=True)
    of = pairs // (units.max() + 1)  # the part of each unit
    most = np.bincount(of)
    smallest = np.full(len(devices), len(group))
    np.minimum.at(smallest, of, sizes)
    several = most > 1  # elsewhere the level carries nothing
    if not several.any():
        return _Level(part=part, most=1, ways=1, fewest=int(smallest.min()))
    return _Level(
        part=part,
        most=int(most.max()),
        ways=int((-(-devices // smallest))[several].max()),
        fewest=int(smallest[several].min()),
    )


class _Lines(NamedTuple):
    """What the links of a torus give to the chips of a group; fields as in `Span`."""

    bandwidth: float
    hop_bandwidth: float
    steps: int
    crossing: float


def _lines(topology: Topology, one_way: float, at: Sequence[Sequence[int]]) -> _Lines:
    """Adds up the links along the dimensions over which chips lie.

    Args:
      one_way: bytes/s that one device can send over one link.
      at: on each dimension, where chips lie, rising.
    """
    bandwidth = crossing = hop = 0.0
    steps = 0
    for d, wrap in enumerate(topology.wraps):
        line = at[d]
        n = len(line)
        if n == 1:
            continue
        stride = min(b - a for a, b in itertools.pairwise(line))
        ring = n > 2 and wrap and n * stride == topology.shape[d]
        # Groups whose members lie between this one's share its links.
        mine = one_way / stride
        bandwidth += mine * (2 if ring else 1)
        steps += (n // 2 if ring else n - 1) * stride
        # Half of the members send half of what they hold across the middle of each line.
        crossing = max(crossing, n / (mine * (8 if ring else 4)))
        hop = min(hop or mine, mine)
    return _Lines(bandwidth, hop, steps, crossing)


def _switch(link: Link, level: _Level) -> Span:
    """A level of switches."""
    return Span(
        ways=level.ways,
        below=level.fewest,
        bandwidth=link.bandwidth.value,
        hop_bandwidth=link.bandwidth.value,
        latency_s=link.latency.value,
        steps=math.ceil(math.log2(level.most)),
        crossing=(1 - 1 / level.ways) / link.bandwidth.value,
    )
