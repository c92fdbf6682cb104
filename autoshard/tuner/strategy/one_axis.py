"""Layouts of one rule: what each logical axis brings by itself.

One factor at a time, as a first look at many factors. Baselines divide the batch, or all that
tensor parallelism can; of a model in which one axis alone does better neither says so.
"""

import math
from collections.abc import Iterator

from autoshard.records.layout import Candidate
from autoshard.space.space import Space


def one_axis_layouts(space: Space) -> Iterator[Candidate]:
    """Each axis divided over as many devices as it can be, where it is used and where it is stored.

    On the mesh of the fewest axes; in the order of the space's axes.
    """
    mesh = min(space.meshes, key=len)
    sizes = dict(mesh)
    for axis in space.shardable():
        to = max(space.options(axis, mesh), key=lambda names: math.prod(sizes[n] for n in names))
        rule = {axis.name: to}
        layout = space.layout(mesh, rule, {} if axis.is_data else rule)
        candidate = space.candidate(layout)
        if to and space.contains(candidate) is None:
            yield candidate
