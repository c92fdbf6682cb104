"""What the user's own manual regions (`shard_map`) send."""

from autoshard.hlo.groups import groups_of_axes, partners_in_groups, partners_in_pairs
from autoshard.layout import MeshShape
from autoshard.operations import OwnSend
from autoshard.trial import Collective


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
