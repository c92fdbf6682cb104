"""What the user's own manual regions (`shard_map`) send."""

from autoshard.analysis import Analysis
from autoshard.hlo.groups import groups_of_axes, partners_in_groups, partners_in_pairs
from autoshard.layout import MeshShape
from autoshard.operations import OwnSend
from autoshard.rungs.shares import Shares
from autoshard.subaxes import ways
from autoshard.trial import Collective


def own_collectives(analysis: Analysis, shares: Shares) -> list[Collective]:
    """Those of a step under one layout, but for branches that are not taken."""
    judged, trips = shares.judged, analysis.kernels.trips
    if judged is None:
        return []
    mesh = tuple(shares.sizes.items())
    found = []
    for send in analysis.kernels.sent:
        parts = judged.shards.get(send.tag)
        if not trips[send.tag] or not parts:
            continue
        found.append(collective_of(send, mesh, trips[send.tag], ways(parts[0], shares.sizes)))
    return [one for one in found if one is not None]


def collective_of(sent: OwnSend, mesh: MeshShape, trips: float, parts: int) -> Collective | None:
    """One of them; None where each device is alone with itself.

    Args:
      mesh: that the step names.
      trips: how often it runs in a step.
      parts: in how many the partitioner divides what is sent, over axes that are not the region's.
    """
    devices = tuple(group for group in sent.partners if isinstance(group, tuple))
    if sent.kind == "collective_permute":
        partners = partners_in_pairs([(source, to) for source, to in devices], mesh)
    else:
        axes = [axis for axis in sent.partners if isinstance(axis, str)]
        partners = partners_in_groups(devices or groups_of_axes(mesh, axes), mesh)
    if partners.size == 1:
        return None
    return Collective(
        # As rung 2 counts it: a broadcast is one permutation.
        kind="collective_permute" if sent.kind == "collective_broadcast" else sent.kind,
        group_size=partners.size,
        mesh_axes=partners.axes,
        bytes=int(sent.bytes / parts),
        count=int(trips),
        source=sent.source,
        members=partners.members,
    )
