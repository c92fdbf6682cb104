"""What one device does in one step of a compiled program, counted from its HLO.

The walk starts at the entry computation and multiplies by trip counts. Loops of unknown length
count once and a conditional counts as its largest branch; both are named in `assumptions`.
"""

import dataclasses
from collections import Counter

from autoshard.records.layout import MeshShape
from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo.records import HloModule
from autoshard.rungs.compile.hlo.steps import Branch, Call, Launch, Loop, Steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HloCounts:
    """What one device does in one step, loop trips included.

    Attributes:
      flops: floating-point operations: 2 a multiply-add in matrix products and convolutions, 1 an
        element elsewhere.
      matmul_flops: the part of `flops` that matrix products and convolutions take.
      matmul_flops_by_dtype: the same by the dtype of the left operand, sorted by name; f32
        with how precisely it is multiplied (`precision.effective_matmul_dtype`).
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
        self.bytes = 0.0
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

    def add_launch(self, launch: Launch) -> None:
        work = launch.work
        self.ops += 1
        self.plain += work.element_flops
        self.transcendentals += work.transcendentals
        self.bytes += work.bytes
        self.cycles += work.cycles or 0
        for dtype, flops in work.matmul_flops:
            self.add_matmul(dtype, flops)
        self.collectives.update(exchange.collective for exchange in launch.exchanges)
        self.unmodelled.update(launch.unmodelled)
        self.assumptions.update(dict.fromkeys(launch.assumptions))

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
    total = _Walk(Steps(module, mesh)).total(module.entry)
    matmul = sum(total.matmul.values())
    return HloCounts(
        flops=total.plain + matmul,
        matmul_flops=matmul,
        matmul_flops_by_dtype=tuple(sorted(total.matmul.items())),
        transcendentals=total.transcendentals,
        bytes_accessed=total.bytes,
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

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._totals: dict[str, _Total] = {}

    def total(self, name: str) -> _Total:
        if name not in self._totals:
            total = _Total()
            for step in self._steps.of(name):
                match step:
                    case Launch():
                        total.add_launch(step)
                    case Call():
                        for called in step.called:
                            total.add(self.total(called))
                    case Branch():
                        total.assumptions.update(dict.fromkeys(step.assumptions))
                        total.add(max(map(self.total, step.called), key=lambda t: t.size))
                    case Loop():
                        total.assumptions.update(dict.fromkeys(step.assumptions))
                        for called in step.called:
                            total.add(self.total(called), step.turns)
            self._totals[name] = total
        return self._totals[name]
