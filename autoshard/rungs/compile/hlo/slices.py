"""Programs of several TPU slices: what one slice runs, and what goes to the others through hosts.

libtpu compiles such a program for one slice: its groups number the devices of a slice, and what
crosses slices is a `send` and a `recv` to the host, where the megascale runtime makes a collective
of them (attributes `_xla_megascale_*`, libtpu 0.0.42).
"""

import math
import re

from autoshard.records.layout import MeshShape
from autoshard.records.positions import over_slices
from autoshard.records.subaxes import named_part, ways
from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo.records import Computation, HloError, HloModule, Instruction

_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_GROUP = re.compile(r"_xla_megascale_target=\{\{([\d,]+)\}")
_KINDS = {
    "ALL_GATHER": "all_gather",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "collective_permute",
    "REDUCE_SCATTER": "reduce_scatter",
}


def mesh_of_slice(module: HloModule, mesh: MeshShape) -> tuple[MeshShape, tuple[str, ...]]:
    """The mesh whose devices a module's groups number, and the mesh axes that run across slices.

    Both name parts of axes as Shardy does: `"x":(2)8` is what lies inside of two slices. For a
    program of one slice the mesh is the whole, and nothing runs across.

    Raises:
      ValueError: the mesh has a number of devices that the module cannot be a part of.
    """
    devices = math.prod(size for _, size in mesh)
    if devices == module.device_count:
        return mesh, ()
    if not module.tiled or devices % module.device_count:
        raise ValueError(
            f"expected the mesh that {module.name} was compiled for, with {module.device_count} "
            f"devices; got {mesh} with {devices}"
        )
    sizes = [n for _, n in mesh]
    inner: list[tuple[str, int]] = []
    outer: list[str] = []
    parts = over_slices(devices // module.device_count, sizes)
    for (name, size), part in zip(mesh, parts, strict=True):
        if part == 1:
            inner.append((name, size))
            continue
        outer.append(named_part(name, size, 1, part))
        if part < size:
            inner.append((named_part(name, size, part, size // part), size // part))
    return tuple(inner), tuple(outer)


def rendezvous(instruction: Instruction) -> str | None:
    """What names a transfer between slices on both of its sides, None for all else."""
    attributes = instruction.attribute("frontend_attributes")
    found = _RENDEZVOUS.search(attributes)
    return found[1] if found and _TYPE.search(attributes) else None


def crossing(
    instruction: Instruction, computation: Computation, mesh: MeshShape, outer: tuple[str, ...]
) -> Collective:
    """The collective between slices that a `send` begins.

    Args:
      mesh: the whole.
      outer: the mesh axes that run across slices.

    Raises:
      HloError: a kind of transfer that is not known.
    """
    attributes = instruction.attribute("frontend_attributes")
    found = _TYPE.search(attributes)
    if found is None or found[1] not in _KINDS:
        raise HloError(
            f"%{instruction.name}: got a transfer between slices of type"
            f" {found[1] if found else 'none'}, expected one of {', '.join(_KINDS)}"
        )
    name = rendezvous(instruction)
    received = [
        i.shape.bytes
        for i in computation.instructions
        if i.opcode == "recv" and rendezvous(i) == name
    ]
    group = _GROUP.search(attributes)
    if group is None:  # "{1,2}x{0:7}": each device with those in its place on the other slices
        size, axes = ways(outer, dict(mesh)), outer
    else:
        size = group[1].count(",") + 1
        every = math.prod(n for _, n in mesh)
        axes = tuple(axis for axis, _ in mesh) if size == every else ()
    return Collective(
        kind=_KINDS[found[1]],
        group_size=size,
        mesh_axes=axes,
        bytes=max(sum(computation.find(o).bytes for o in instruction.operands), *received, 0),
        count=1,
        source=instruction.op_name,
    )
