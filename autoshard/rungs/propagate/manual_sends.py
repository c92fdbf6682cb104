"""The collectives of the user's own manual regions (`shard_map`)."""

from autoshard.records.groups import groups_of_axes, partners_in_groups, partners_in_pairs
from autoshard.records.layout import MeshShape
from autoshard.records.subaxes import ways
from autoshard.records.trial import Collective
from autoshard.rungs.propagate.local_shapes import LocalShapes
from autoshard.rungs.propagate.operations import ManualSend


def manual_collectives(local: LocalShapes) -> list[Collective]:
    """Those of a step under one layout, without branches that are not taken."""
    judged, ops = local.judged, local.operations
    if judged is None:
        return []
    mesh = tuple(local.sizes.items())
    found = []
    for send in ops.sent:
        parts = judged.shards.get(send.tag)
        if ops.trips[send.tag] and parts:
            divided = ways(parts[0], local.sizes)
            found.append(collective_of(send, mesh, ops.trips[send.tag], divided))
    return [one for one in found if one is not None]


def collective_of(send: ManualSend, mesh: MeshShape, trips: float, parts: int) -> Collective | None:
    """One of them; None where each device is alone with itself.

    Args:
      mesh: that the step names.
      trips: how often it runs in a step.
      parts: into how many the partitioner divides what is sent, over axes not of the region.
    """
    devices = tuple(group for group in send.partners if isinstance(group, tuple))
    if send.kind == "collective_permute":
        partners = partners_in_pairs([(source, to) for source, to in devices], mesh)
    else:
        axes = [axis for axis in send.partners if isinstance(axis, str)]
        partners = partners_in_groups(devices or groups_of_axes(mesh, axes), mesh)
    if partners.size == 1:
        return None
    return Collective(
        # As rung 2 counts it: a broadcast is one permutation.
        kind="collective_permute" if send.kind == "collective_broadcast" else send.kind,
        group_size=partners.size,
        mesh_axes=partners.axes,
        bytes=int(send.bytes / parts),
        count=int(trips),
        source=send.source,
        members=partners.members,
    )
