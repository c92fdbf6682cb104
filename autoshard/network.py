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

from autoshard.catalogue import Link
from autoshard.compat.device_order import device_order
from autoshard.layout import MeshShape
from autoshard.subaxes import places_of_axes
from autoshard.topology import Position, Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a group that one level of links joins.

    Attributes:
      ways: how many members the level joins; what it joins is one member of the next level.
      bandwidth: bytes/s that one member can receive over this level, all its links together.
      hop_bandwidth: bytes/s to one neighbour.
      latency_s: of one step.
      steps: hops from end to end.
      crossing: of an all-to-all, seconds at the busiest cut for each byte a member holds.
    """

    ways: int
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
    """
    if not spans:
        return 0.0
    latency = sum(s.latency_s * s.steps for s in spans)
    if kind == "collective_permute":
        return max(bytes_ / s.hop_bandwidth + s.latency_s for s in spans)
    if kind == "all_to_all":
        return max(bytes_ * s.crossing for s in spans) + latency
    # A hierarchical ring: what a level carries has been divided by the levels below it.
    below, busiest = 1, 0.0
    for span in spans:
        busiest = max(busiest, bytes_ * (1 - 1 / span.ways) / (span.bandwidth * below))
        below *= span.ways
    return (2.0 if kind == "all_reduce" else 1.0) * (busiest + latency)


class Network:
    """The links between the places of a mesh on one topology."""

    def __init__(self, topology: Topology):
        self._topology = topology
        self._known: dict[object, tuple[Span, ...]] = {}

    def spans(
        self, axes: tuple[str, ...], size: int, mesh: MeshShape, members: tuple[int, ...] = ()
    ) -> tuple[Span, ...]:
        """The levels of links that a group runs over, innermost first.

        Args:
          axes: mesh axes, or parts of them, the group runs over; () where it is no product of axes.
          size: devices of the group.
          mesh: (mesh axis, size) pairs, major to minor; they decide which device stands where.
          members: places in the mesh of one group that is no product of axes; without them such a
            group is taken to be spread evenly over all devices.
        """
        key = (axes, size, mesh, members)
        if key not in self._known:
            count = self._topology.device_count
            if axes:
                group = places_of_axes(axes, mesh)
            else:
                group = members or tuple(k * count // size for k in range(size))
            self._known[key] = self._levels([self._order(mesh)[place] for place in group])
        return self._known[key]

    def _order(self, mesh: MeshShape) -> tuple[int, ...]:
        topology = self._topology
        return device_order(
            topology.positions,
            topology.chip.device_kind,
            topology.chip.platform,
            tuple(n for _, n in mesh),
        )

    def _levels(self, devices: Sequence[int]) -> tuple[Span, ...]:
        """Reads the levels off the positions; what a level joins is one member of the next."""
        found: list[Span] = []
        units: list[object] = list(devices)  # what the levels so far have joined, per device
        for link in self._topology.chip.links:
            joined = [self._domain(link, i) for i in devices]
            members = len(set(units)) // len(set(joined))
            if members > 1 and link.kind == "torus":
                first = [i for i, part in zip(devices, joined, strict=True) if part == joined[0]]
                at = [self._topology.positions[i] for i in first]
                found.append(self._torus(link, at, members))
            elif members > 1:
                found.append(_switch(link, members))
            units = joined
        return tuple(found)

    def _domain(self, link: Link, device: int) -> object:
        """Which of a level's parts a device is in: its chip, its slice, its switch."""
        topology = self._topology
        position = topology.positions[device]
        if link.level == "chip":
            return (position.slice, position.coords)
        if link.kind == "torus":
            return position.slice
        # Of all levels only the outermost one joins slices.
        scope, host = 0, position.host
        if link.level != "dcn":
            hosts = math.prod(topology.shape) // math.prod(topology.host_shape)
            scope, host = position.slice, position.host % hosts
        if link.domain is None:
            return scope
        # Domains are of whole hosts, or parts of one: a target may use a part of each.
        per_host = math.prod(topology.chip.host_shape) * topology.chip.devices_per_chip
        inside = position.coords[-1] if topology.chip.platform == "cuda" else 0
        return scope, (host * per_host + inside) // link.domain

    def _torus(self, link: Link, at: Sequence[Position], members: int) -> Span:
        """The chips of one slice; those of the group's first slice stand for all."""
        topology = self._topology
        # All devices of a chip use its links at the same time, in this group or in others.
        one_way = link.bandwidth.value / topology.chip.devices_per_chip
        bandwidth = crossing = hop = 0.0
        steps = 0
        for d, wrap in enumerate(topology.wraps):
            line = sorted({p.coords[d] for p in at})
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
        return Span(
            ways=members,
            bandwidth=bandwidth,
            hop_bandwidth=hop,
            latency_s=link.latency.value,
            steps=steps,
            crossing=crossing,
        )


def _switch(link: Link, ways: int) -> Span:
    """A level of switches that joins `ways` parts."""
    return Span(
        ways=ways,
        bandwidth=link.bandwidth.value,
        hop_bandwidth=link.bandwidth.value,
        latency_s=link.latency.value,
        steps=math.ceil(math.log2(ways)),
        crossing=(1 - 1 / ways) / link.bandwidth.value,
    )
