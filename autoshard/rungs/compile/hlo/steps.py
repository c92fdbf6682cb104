"""A computation as the steps that one device takes, in order.

`counts` adds the steps up, `timeline` replays them against clocks; what an instruction does is
decided here, once, for both.
"""

import dataclasses
import re
from collections.abc import Iterator

from autoshard.errors import HloError
from autoshard.records.layout import MeshShape
from autoshard.records.precision import effective_matmul_dtype
from autoshard.records.subaxes import places_of_axes
from autoshard.records.trial import Collective
from autoshard.records.work import Work
from autoshard.rungs.compile.hlo.collectives import (
    KINDS,
    collective,
    continues_another,
    is_collective,
)
from autoshard.rungs.compile.hlo.custom_calls import call_cost
from autoshard.rungs.compile.hlo.flops import (
    ELEMENTWISE,
    TRANSCENDENTAL,
    matmul_flops,
    plain_flops,
    precision_of,
)
from autoshard.rungs.compile.hlo.records import Computation, HloModule, Instruction
from autoshard.rungs.compile.hlo.slices import crossing, mesh_of_slice, rendezvous
from autoshard.rungs.compile.hlo.traffic import FREE, FREE_CALLS, HOST, Traffic
from autoshard.rungs.compile.hlo.trips import trip_count

_CYCLES = re.compile(r'"estimated_cycles":"?(-?\d+)')
_CHAIN = re.compile(r'chain_id="(\w+)"')
_IS_SYNC = re.compile(r'"is_sync":true')
_MOVES = frozenset(("copy", "dynamic-slice", "dynamic-update-slice", "slice"))
_PASSED_ON = frozenset(("bitcast", "copy", "get-tuple-element", "opt-barrier"))
_ENDLESS = 1 << 53
"""Cycles no kernel takes: libtpu prints 2**63-1 for a kernel that runs on the sparse core."""
_HOST_TRAFFIC = "what moves between device and host is priced as traffic of the main memory"
_COUNTED_AS = {
    "ragged-all-to-all": "a full one",
    "collective-broadcast": "one permutation",
}
_COUNTED = (
    "Pallas kernels without a declared cost: the products in their bodies, masked blocks as full"
)
ANY = ""
"""The key of whoever waits for something that was started out of sight."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One execution of a collective.

    Attributes:
      key: names it for the `Wait` that needs its result; None where it is synchronous.
    """

    collective: Collective
    key: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One instruction that runs: a kernel, a copy, collectives, or a kernel with them in it.

    Attributes:
      work: all that it does besides communicating; its bytes are the whole instruction's.
      exchanges: the collectives that begin here.
      copy_key: names an asynchronous copy for its `Wait`; None for everything else.
      scalar: on TPU, arithmetic on single numbers, which the scalar unit does beside everything.
      unmodelled: targets of custom calls of which only the memory traffic is known.
    """

    work: Work
    scalar: bool = False
    exchanges: tuple[Exchange, ...] = ()
    copy_key: str | None = None
    unmodelled: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Kernels go on when what was started under `key` is done; `ANY` waits for everything."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Computations that run in turn, `trips` times over; None is unknown."""

    called: tuple[str, ...]
    trips: int | None
    assumptions: tuple[str, ...]

    @property
    def turns(self) -> int:
        """How many are counted: one where it is unknown."""
        return 1 if self.trips is None else self.trips


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Computations of which one runs."""

    called: tuple[str, ...]
    assumptions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Computations that run in turn, once."""

    called: tuple[str, ...]
    assumptions: tuple[str, ...] = ()


Step = Launch | Wait | Loop | Branch | Call


class _Inside:
    """What happens inside of one kernel; `bytes` is what its custom calls tell of their traffic."""

    def __init__(self) -> None:
        self.matmul: dict[str, float] = {}
        self.elements = 0.0
        self.transcendentals = 0.0
        self.bytes = 0.0
        self.declared = False
        self.exchanges: list[Exchange] = []
        self.ended: list[str] = []
        self.unmodelled: list[str] = []
        self.assumptions: dict[str, None] = {}

    def add(self, other: "_Inside") -> None:
        for dtype, flops in other.matmul.items():
            self.add_matmul(dtype, flops)
        self.elements += other.elements
        self.transcendentals += other.transcendentals
        self.bytes += other.bytes
        self.declared |= other.declared
        self.exchanges += other.exchanges
        self.ended += other.ended
        self.unmodelled += other.unmodelled
        self.assumptions.update(other.assumptions)

    def add_matmul(self, dtype: str, flops: float) -> None:
        self.matmul[dtype] = self.matmul.get(dtype, 0.0) + flops


class Steps:
    """The steps of each computation of a module, read once."""

    def __init__(self, module: HloModule, mesh: MeshShape) -> None:
        self._module = module
        self._whole = mesh
        self._mesh, self._outer = mesh_of_slice(module, mesh)
        self._traffic = Traffic(module)
        self._steps: dict[str, tuple[Step, ...]] = {}
        self._fused: dict[str, _Inside] = {}

    def of(self, name: str) -> tuple[Step, ...]:
        """The steps of the computation of that name."""
        if name not in self._steps:
            computation = self._module.find(name)
            self._steps[name] = tuple(
                step for i in computation.instructions for step in self._read(i, computation)
            )
        return self._steps[name]

    def _read(self, instruction: Instruction, computation: Computation) -> Iterator[Step]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in FREE or opcode.endswith("-update"):
            return
        if opcode in ("send", "recv", "send-done", "recv-done"):
            yield from self._transfer(instruction, computation)
        elif opcode.endswith("-done"):
            yield Wait(key=_started(instruction, computation))
        elif opcode == "while":
            trips = trip_count(self._module, computation, instruction)
            said = f"while %{instruction.name}: trip count unknown, taken as 1"
            yield Loop(
                called=instruction.calls("condition", "body"),
                trips=trips,
                assumptions=() if trips is not None else (said,),
            )
        elif opcode == "conditional":
            names = instruction.calls(
                "branch_computations", "true_computation", "false_computation"
            )
            said = f"conditional %{instruction.name}: the largest of {len(names)} branches taken"
            yield Branch(called=names, assumptions=(said,))
        elif opcode in ("call", "async"):
            names = instruction.calls("to_apply", "calls", "called_computations")
            if instruction.opcode == "async-start":
                for name in names:
                    yield from (_under(step, instruction.name) for step in self.of(name))
            else:
                thread = instruction.attribute("async_execution_thread").strip('"')
                said = f"kernels of the {thread} thread run in turn with all others"
                yield Call(called=names, assumptions=(said,) if thread else ())
        elif not (opcode == "custom-call" and instruction.custom_call_target in FREE_CALLS):
            yield from self._launch(instruction, computation)

    def _transfer(self, instruction: Instruction, computation: Computation) -> Iterator[Step]:
        """What goes through the host: a collective between slices, or a copy."""
        opcode = instruction.opcode
        begun = computation.find(instruction.operands[0]) if "-done" in opcode else instruction
        name = rendezvous(begun)
        if name is None:
            if "-done" in opcode:
                yield Wait(key=ANY)
            else:
                yield from self._launch(instruction, computation)
        elif opcode == "send":
            one = crossing(instruction, computation, self._whole, self._outer)
            said = (
                f"{one.kind} between slices, not of all devices: its group is taken as spread out"
            )
            work = Work(
                opcode=opcode,
                name=name,
                matmul_flops=(),
                element_flops=0.0,
                transcendentals=0.0,
                bytes=float(one.bytes),
                cycles=None,
                declared=False,
            )
            yield Launch(
                work=work,
                exchanges=(Exchange(collective=one, key=name),),
                assumptions=() if one.mesh_axes else (said,),
            )
        elif opcode == "recv-done":
            yield Wait(key=name)

    def _launch(self, instruction: Instruction, computation: Computation) -> Iterator[Step]:
        opcode = instruction.opcode.removesuffix("-start")
        inside = _Inside()
        if opcode == "fusion":
            source = self._module.source(instruction) or instruction.op_name
            inside.add(self._inside(self._module.find(instruction.calls("calls")[0]), source))
        else:
            self._add(inside, instruction, computation)
        started = opcode != instruction.opcode
        yield from (Wait(key=key) for key in inside.ended)
        moved = float(self._traffic.bytes_of(instruction, computation))
        copies = opcode in _MOVES
        if self._touches_host(instruction, computation):
            inside.assumptions[_HOST_TRAFFIC] = None
            copies |= not (inside.matmul or inside.elements)
        cycles = _CYCLES.search(instruction.attribute("backend_config"))
        if cycles and not 0 <= int(cycles[1]) < _ENDLESS:
            said = (
                f"%{instruction.name}: its {cycles[1]} estimated cycles cannot be, and are ignored"
            )
            inside.assumptions[said] = None
            cycles = None
        yield Launch(
            work=Work(
                opcode=opcode,
                name=instruction.custom_call_target or instruction.op_name or instruction.name,
                matmul_flops=tuple(sorted(inside.matmul.items())),
                element_flops=inside.elements,
                transcendentals=inside.transcendentals,
                bytes=max(inside.bytes, moved) if opcode == "fusion" else inside.bytes or moved,
                cycles=int(cycles[1]) if cycles else None,
                declared=inside.declared,
            ),
            scalar=self._is_scalar(instruction, opcode) and cycles is None,
            exchanges=tuple(inside.exchanges),
            copy_key=instruction.name if started and copies else None,
            unmodelled=tuple(inside.unmodelled),
            assumptions=tuple(inside.assumptions),
        )

    def _is_scalar(self, instruction: Instruction, opcode: str) -> bool:
        return (
            self._module.tiled
            and (opcode in ELEMENTWISE or opcode in ("copy", "reshape"))
            and all(shape.size <= 1 for shape in instruction.shapes)
        )

    def _touches_host(self, instruction: Instruction, computation: Computation) -> bool:
        values = (instruction, *(computation.find(name) for name in instruction.operands))
        return any(shape.space == HOST for value in values for shape in value.shapes)

    def _inside(self, computation: Computation, source: str) -> _Inside:
        """What a computation inside of one kernel does.

        Args:
          source: where the kernel comes from, for collectives in it that do not say.
        """
        if computation.name not in self._fused:
            inside = _Inside()
            for instruction in computation.instructions:
                if instruction.opcode in ("fusion", "call"):
                    called = instruction.calls("calls", "to_apply")[0]
                    inside.add(self._inside(self._module.find(called), source))
                else:
                    self._add(inside, instruction, computation, fused_from=source)
            self._fused[computation.name] = inside
        return self._fused[computation.name]

    def _add(
        self,
        inside: _Inside,
        instruction: Instruction,
        computation: Computation,
        fused_from: str | None = None,
    ) -> None:
        """Adds the operations and the communication of one instruction."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in FREE:
            return
        if is_collective(instruction):
            self._add_collective(inside, instruction, computation, fused_from)
            return
        if opcode == "custom-call":
            self._add_call(inside, instruction, computation)
            return
        if opcode in ("send", "recv") and instruction.attribute("is_host_transfer") != "true":
            said = f"{opcode} %{instruction.name}: priced by its memory traffic, not by links"
            inside.assumptions[said] = None
        if any(instruction.attribute(name) for name in ("replica_groups", "source_target_pairs")):
            raise HloError(
                f"%{instruction.name}: got the collective {opcode}, expected one of"
                f" {', '.join(KINDS)}"
            )
        flops = matmul_flops(instruction, computation)
        if flops is not None:
            left = computation.find(instruction.operands[0]).shape.dtype
            inside.add_matmul(effective_matmul_dtype(left, *precision_of(instruction)), flops)
            return
        flops = plain_flops(instruction, computation)
        inside.elements += flops
        if opcode in TRANSCENDENTAL:
            inside.transcendentals += flops

    def _add_collective(
        self,
        inside: _Inside,
        instruction: Instruction,
        computation: Computation,
        fused_from: str | None,
    ) -> None:
        users = None if fused_from is None else self._traffic.users(computation)
        chain = _CHAIN.search(instruction.attribute("frontend_attributes"))
        chained = f"chain {chain[1]}" if chain else f"channel {instruction.channel_id}"
        if users is not None and continues_another(instruction, users):
            if any(u.custom_call_target == "AsyncCollectiveDone" for u in users[instruction.name]):
                inside.ended.append(chained)
            return
        opcode = instruction.opcode.removesuffix("-start")
        if said := _COUNTED_AS.get(opcode):
            inside.assumptions[f"{opcode} %{instruction.name}: counted as {said}"] = None
        one = collective(self._module, computation, instruction, self._mesh, users)
        if one is None:
            return
        if one.members:
            said = f"{one.kind} over groups that follow no mesh axes: one group stands for all"
            inside.assumptions[said] = None
            one = dataclasses.replace(one, members=self._places(one.members))
        key = None
        if users is not None:
            if any(u.custom_call_target == "AsyncCollectiveStart" for u in users[instruction.name]):
                key = chained
        elif instruction.opcode.endswith("-start") and not _IS_SYNC.search(
            instruction.attribute("backend_config")
        ):
            key = instruction.name
        one = dataclasses.replace(one, source=one.source or fused_from or "")
        inside.exchanges.append(Exchange(collective=one, key=key))

    def _places(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Places in the whole mesh of devices that the module numbers."""
        places = places_of_axes([name for name, _ in self._mesh], self._whole)
        return tuple(places[member] for member in members)

    def _add_call(
        self, inside: _Inside, instruction: Instruction, computation: Computation
    ) -> None:
        if instruction.custom_call_target in FREE_CALLS:
            return
        cost = call_cost(instruction, computation)
        if cost is None:
            # Operands on the chip do not make a kernel free of which nothing else is known.
            inside.unmodelled.append(instruction.custom_call_target)
            inside.bytes += self._traffic.passed(instruction, computation)
            return
        if cost.matmul_flops:
            inside.add_matmul(cost.dtype, cost.matmul_flops)
        inside.elements += cost.element_flops
        inside.transcendentals += cost.transcendentals
        inside.bytes += cost.bytes or 0.0
        inside.declared |= cost.declared
        if cost.counted:
            inside.assumptions[_COUNTED] = None
        if cost.remote_bytes:
            said = (
                f"custom call {instruction.custom_call_target} %{instruction.name}: sends "
                f"{cost.remote_bytes:.0f} bytes to other devices by itself, which are not priced"
            )
            inside.assumptions[said] = None


def _started(done: Instruction, computation: Computation) -> str:
    """The name of the start that a `-done` belongs to; `ANY` where it is out of sight."""
    value = done
    while value.operands:
        value = computation.find(value.operands[0])
        if value.opcode.endswith("-start"):
            return value.name
        if not (value.opcode in _PASSED_ON or value.opcode.endswith("-update")):
            break
    return ANY


def _under(step: Step, key: str) -> Step:
    """A step of an asynchronous computation, whose `Wait` has this key."""
    if not isinstance(step, Launch):
        return step
    exchanges = tuple(dataclasses.replace(e, key=key) for e in step.exchanges)
    copied = step.work.opcode in _MOVES
    return dataclasses.replace(step, exchanges=exchanges, copy_key=key if copied else None)
