"""What one device does in one step of a compiled program, counted from its HLO.

The walk starts at the entry computation and multiplies by trip counts. Loops of unknown length
count once and a conditional counts as its largest branch; both are named in `assumptions`.
"""

import dataclasses
import math
import re
from collections import Counter

from autoshard.hlo.collectives import collective, continues_another, is_collective
from autoshard.hlo.flops import TRANSCENDENTAL, matmul_flops, plain_flops
from autoshard.hlo.groups import MeshShape
from autoshard.hlo.records import Computation, HloModule, Instruction
from autoshard.hlo.traffic import FREE, FREE_CALLS, Traffic
from autoshard.hlo.trips import trip_count
from autoshard.trial import Collective

_MEMORY_BOUND = re.compile("TopK|threefry2x32|__cub\\$|RadixSort")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HloCounts:
    """What one device does in one step, loop trips included.

    Attributes:
      flops: floating-point operations: 2 a multiply-add in matrix products and convolutions, 1 an
        element elsewhere.
      matmul_flops: the part of `flops` that matrix products and convolutions take.
      matmul_flops_by_dtype: the same by the dtype of the left operand, sorted by name.
      transcendentals: the part of `flops` that are exp, tanh, sqrt and their like.
      bytes_accessed: bytes read from and written to the main memory.
      op_count: kernels launched, collectives and copies included.
      estimated_cycles: the compiler's own estimate for its fusions, clock cycles (TPU; else 0).
      collectives: communicating operations, alike ones together, in order of first appearance.
      unmodelled: (target, executions) of custom calls whose work is not counted; their operands
        and results are in `bytes_accessed`.
      assumptions: sentences on what had to be assumed.
    """

    flops: float
    matmul_flops: float
    matmul_flops_by_dtype: tuple[tuple[str, float], ...]
    transcendentals: float
    bytes_accessed: float
    op_count: int
    estimated_cycles: int
    collectives: tuple[Collective, ...]
    unmodelled: tuple[tuple[str, int], ...]
    assumptions: tuple[str, ...]


class _Total:
    """Sums over a computation, for one execution of it."""

    def __init__(self) -> None:
        self.plain = 0.0
        self.matmul: dict[str, float] = {}
        self.transcendentals = 0.0
        self.bytes = 0
        self.ops = 0
        self.cycles = 0
        self.collectives: Counter[Collective] = Counter()
        self.unmodelled: Counter[str] = Counter()
        self.assumptions: dict[str, None] = {}

    def add(self, other: "_Total", times: int = 1) -> None:
        self.plain += other.plain * times
        self.transcendentals += other.transcendentals * times
        self.bytes += other.bytes * times
        self.ops += other.ops * times
        self.cycles += other.cycles * times
        for dtype, flops in other.matmul.items():
            self.add_matmul(dtype, flops * times)
        for target, calls in other.unmodelled.items():
            self.unmodelled[target] += calls * times
        for one, executions in other.collectives.items():
            self.collectives[one] += executions * times
        self.assumptions.update(other.assumptions)

    def add_matmul(self, dtype: str, flops: float) -> None:
        self.matmul[dtype] = self.matmul.get(dtype, 0.0) + flops

    @property
    def size(self) -> float:
        """How branches compare: operations and bytes moved, one a unit."""
        payload = sum(one.bytes * times for one, times in self.collectives.items())
        return self.plain + sum(self.matmul.values()) + self.bytes + payload


def count(module: HloModule, mesh: MeshShape) -> HloCounts:
    """Counts what one device does in one execution of `module`.

    Args:
      module: an optimized, scheduled module; all devices run the same.
      mesh: (mesh axis, size) pairs, major to minor over the device order; () for one device.

    Raises:
      ValueError: the mesh has another number of devices than the module.
      HloError: the module holds something that cannot be read, such as a new group notation.
    """
    devices = math.prod(size for _, size in mesh)
    if devices != module.device_count:
        raise ValueError(
            f"expected the mesh that {module.name} was compiled for, with {module.device_count} "
            f"devices; got {mesh} with {devices}"
        )
    total = _Walk(module, mesh).launched(module.find(module.entry))
    matmul = sum(total.matmul.values())
    return HloCounts(
        flops=total.plain + matmul,
        matmul_flops=matmul,
        matmul_flops_by_dtype=tuple(sorted(total.matmul.items())),
        transcendentals=total.transcendentals,
        bytes_accessed=float(total.bytes),
        op_count=total.ops,
        estimated_cycles=total.cycles,
        collectives=tuple(
            dataclasses.replace(one, count=times)
            for one, times in total.collectives.items()
            if times
        ),
        unmodelled=tuple(sorted((t, n) for t, n in total.unmodelled.items() if n)),
        assumptions=tuple(total.assumptions),
    )


class _Walk:
    """Totals of each computation, computed once."""

    def __init__(self, module: HloModule, mesh: MeshShape) -> None:
        self._module = module
        self._mesh = mesh
        self._traffic = Traffic(module)
        self._launched: dict[str, _Total] = {}
        self._fused: dict[str, _Total] = {}

    def launched(self, computation: Computation) -> _Total:
        """Totals of a computation whose instructions are kernels of their own."""
        if computation.name not in self._launched:
            total = _Total()
            for instruction in computation.instructions:
                self._launch(total, instruction, computation)
            self._launched[computation.name] = total
        return self._launched[computation.name]

    def fused(self, computation: Computation, source: str) -> _Total:
        """Totals of a computation inside of one kernel: its work, but no traffic of its own.

        Args:
          source: where the kernel comes from, for collectives in it that do not say.
        """
        if computation.name not in self._fused:
            total = _Total()
            for instruction in computation.instructions:
                if instruction.opcode == "fusion" or instruction.opcode == "call":
                    inner = instruction.calls("calls", "to_apply")[0]
                    total.add(self.fused(self._module.find(inner), source))
                else:
                    self._work(total, instruction, computation, fused_from=source)
            self._fused[computation.name] = total
        return self._fused[computation.name]

    def _launch(self, total: _Total, instruction: Instruction, computation: Computation) -> None:
        if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
            return
        opcode, find = instruction.opcode.removesuffix("-start"), self._module.find
        if opcode == "while":
            trips = trip_count(self._module, computation, instruction)
            if trips is None:
                total.assumptions[f"while %{instruction.name}: trip count unknown, taken as 1"] = (
                    None
                )
            for name in instruction.calls("condition", "body"):
                total.add(self.launched(find(name)), 1 if trips is None else trips)
        elif opcode == "conditional":
            names = instruction.calls(
                "branch_computations", "true_computation", "false_computation"
            )
            total.assumptions[
                f"conditional %{instruction.name}: the largest of {len(names)} branches taken"
            ] = None
            total.add(max((self.launched(find(n)) for n in names), key=lambda t: t.size))
        elif opcode in ("call", "async"):
            for name in instruction.calls("to_apply", "calls", "called_computations"):
                total.add(self.launched(find(name)))
        elif not (opcode == "custom-call" and instruction.custom_call_target in FREE_CALLS):
            if opcode == "fusion":
                source = self._module.source(instruction) or instruction.op_name
                total.add(self.fused(find(instruction.calls("calls")[0]), source))
            else:
                self._work(total, instruction, computation)
            total.ops += 1
            total.bytes += self._traffic.bytes_of(instruction, computation)
            cycles = _CYCLES.search(instruction.attribute("backend_config"))
            total.cycles += int(cycles[1]) if cycles else 0

    def _work(
        self,
        total: _Total,
        instruction: Instruction,
        computation: Computation,
        fused_from: str | None = None,
    ) -> None:
        """Adds the operations and the communication of one instruction."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in FREE:
            return
        if is_collective(instruction):
            users = None if fused_from is None else self._traffic.users(computation)
            if users is not None and continues_another(instruction, users):
                return
            if opcode == "ragged-all-to-all":
                total.assumptions[f"{opcode} %{instruction.name}: counted as a full one"] = None
            one = collective(self._module, computation, instruction, self._mesh, users)
            if one is not None:
                one = dataclasses.replace(one, source=one.source or fused_from or "")
                total.collectives[one] += 1
            return
        flops = matmul_flops(instruction, computation)
        if flops is not None:
            total.add_matmul(computation.find(instruction.operands[0]).shape.dtype, flops)
            return
        if opcode == "custom-call":
            target = instruction.custom_call_target
            if _MEMORY_BOUND.search(target):
                total.plain += float(sum(s.size for s in instruction.shapes))
            elif target not in FREE_CALLS:
                total.unmodelled[target] += 1
            return
        flops = plain_flops(instruction, computation)
        total.plain += flops
        if opcode in TRANSCENDENTAL:
            total.transcendentals += flops
