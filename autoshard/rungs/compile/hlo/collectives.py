"""Collectives of a module as records: kind, group, mesh axes, payload, source.

XLA:TPU hides two kinds of them in fusions. An all-reduce of which only a slice is kept is a
reduce-scatter. An asynchronous collective is repeated in every fusion that runs while it is under
way; only the fusion with the custom call `AsyncCollectiveStart` is counted.
"""

from collections.abc import Mapping, Sequence

from autoshard.records.groups import partners_in_groups, partners_in_pairs
from autoshard.records.layout import MeshShape
from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo.groups import parse_groups, parse_pairs
from autoshard.rungs.compile.hlo.records import Computation, HloError, HloModule, Instruction

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_permute",
}
"""Opcode -> kind. A ragged all-to-all counts as a full one, a broadcast as one permute."""

Users = Mapping[str, Sequence[Instruction]]
"""Instruction name -> the instructions of the same computation that read it."""


def users_of(computation: Computation) -> Users:
    """Who reads each value of a computation."""
    users: dict[str, list[Instruction]] = {i.name: [] for i in computation.instructions}
    for instruction in computation.instructions:
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    return users


def is_collective(instruction: Instruction) -> bool:
    """Whether it communicates; of an asynchronous pair only the start does."""
    return instruction.opcode.removesuffix("-start") in KINDS


def continues_another(instruction: Instruction, users: Users) -> bool:
    """Whether a fused collective only continues one that another fusion started (TPU)."""
    return (
        is_collective(instruction)
        and "async_collective_fusion_config" in instruction.attribute("backend_config")
        and not any(u.custom_call_target == "AsyncCollectiveStart" for u in users[instruction.name])
    )


def _keeps_only_a_slice(instruction: Instruction, users: Users) -> bool:
    """Whether every use of a value, seen through bitcasts, is a dynamic slice of it."""
    found = users[instruction.name]
    return bool(found) and all(
        _keeps_only_a_slice(user, users)
        if user.opcode in ("bitcast", "reshape")
        else user.opcode == "dynamic-slice" and instruction.name not in user.operands[1:]
        for user in found
    )


def collective(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    mesh: MeshShape,
    fused_users: Users | None = None,
) -> Collective | None:
    """One execution of a communicating instruction, or None if no byte leaves the device.

    Args:
      mesh: (mesh axis, size) pairs, major to minor over the device order; `members` are places in
        it.
      fused_users: for an instruction inside a fusion, who reads what there.

    Raises:
      HloError: its groups cannot be read.
    """
    opcode = instruction.opcode.removesuffix("-start")
    kind = KINDS[opcode]
    if fused_users and opcode == "all-reduce" and _keeps_only_a_slice(instruction, fused_users):
        kind = "reduce_scatter"
    if pairs_text := instruction.attribute("source_target_pairs"):
        partners = partners_in_pairs(parse_pairs(pairs_text), mesh)
    elif opcode == "collective-permute":
        raise HloError(f"%{instruction.name}: expected source_target_pairs, got none")
    else:
        text = _group_text(module, instruction, opcode)
        partners = partners_in_groups(parse_groups(text, module.device_count), mesh)
    if partners.size == 1:
        return None
    return Collective(
        kind=kind,
        group_size=partners.size,
        mesh_axes=partners.axes,
        bytes=_payload_bytes(computation, instruction, kind),
        count=1,
        source=module.source(instruction) or instruction.op_name,
        members=partners.members,
        # The operands of an all-to-all are the parts of one array.
        arrays=1 if kind == "all_to_all" else len(instruction.operands),
    )


def _group_text(module: HloModule, instruction: Instruction, opcode: str) -> str:
    """The groups, brought to device numbers; jax runs either one replica or one partition."""
    text = instruction.attribute("replica_groups") or "{}"
    replicas = module.device_count // module.partition_count
    global_ids = instruction.attribute("use_global_device_ids") == "true"
    if replicas > 1 and module.partition_count > 1 and not global_ids:
        raise HloError(
            f"%{instruction.name}: expected one replica or one partition, "
            f"got {replicas} replicas of {module.partition_count} partitions"
        )
    reduces = opcode in ("all-reduce", "all-gather", "reduce-scatter")
    if reduces and replicas == 1 and instruction.channel_id is not None and not global_ids:
        # With a channel but without global ids the groups name replicas: all partitions take part.
        return "{}"
    return text


def _payload_bytes(computation: Computation, instruction: Instruction, kind: str) -> int:
    """The larger of the local operand and the local result, bytes."""
    if instruction.opcode.startswith("ragged-all-to-all"):
        return computation.find(instruction.operands[0]).bytes  # then come result and offsets
    if kind != "all_gather":
        return sum(computation.find(name).bytes for name in instruction.operands)
    if instruction.opcode.endswith("-start") and len(instruction.elements) > 1:
        return sum(shape.bytes for shape in instruction.elements[1])
    return instruction.bytes
