"""Memory traffic of one instruction: what it reads from and writes to the main memory.

Everything is read once and written once, as in XLA's HloCostAnalysis; in particular nothing stays
in a cache from one instruction to the next. Slices read, and in-place updates write, the slice.
Not modelled: padding of tiled layouts, several passes of a sort or a reduction.
"""

from autoshard.rungs.compile.hlo.collectives import Users, continues_another, users_of
from autoshard.rungs.compile.hlo.records import Computation, HloModule, Instruction, Shape

FREE = frozenset(
    (
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-dimension-size",
        "get-tuple-element",
        "opt-barrier",
        "optimization-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    )
)
"""Opcodes that run no kernel and move no byte."""

FREE_CALLS = frozenset(
    (
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
        "LayoutConstraint",
        "PrepareAsyncCallDone",
        "PrepareAsyncCallStart",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "annotate_device_placement",
    )
)
"""Targets of custom calls that only mark something."""

_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_WORKSPACE = ("s8", "u8")
_FOLLOWED = frozenset(("bitcast", "convert", "copy", "reshape", "reverse", "transpose"))
_GIVEN = ("parameter", "get-tuple-element")
_ON_CHIP = (1, 2, 3, 4, 6)
HOST = 5
"""The memory space of the host, on TPU and GPU."""


class Traffic:
    """Bytes moved by the instructions of one module.

    On TPU, whose layouts are tiled, the memory spaces 1 to 4 and 6 lie on the chip and cost
    nothing.
    """

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._users: dict[str, Users] = {}

    def users(self, computation: Computation) -> Users:
        """Who reads each value of `computation`; computed once."""
        if computation.name not in self._users:
            self._users[computation.name] = users_of(computation)
        return self._users[computation.name]

    def bytes_of(self, instruction: Instruction, computation: Computation) -> int:
        """Bytes an instruction that stands outside of fusions reads and writes."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "fusion":
            return self._fusion_bytes(instruction, computation)
        results = self._results(instruction, opcode)
        written = sum(self._outside(shape, shape.bytes) for shape in results)
        operands = [computation.find(name) for name in dict.fromkeys(instruction.operands)]
        if opcode in _SLICES:
            read = self._outside(operands[0].shape, sum(shape.bytes for shape in results))
            return read + written + sum(self._whole(index) for index in operands[1:])
        if opcode == "dynamic-update-slice":
            update = computation.find(instruction.operands[1])
            return self._whole(update) + self._outside(instruction.shape, update.bytes)
        if opcode == "scatter":
            updates = _updates(instruction, computation)
            inputs = [computation.find(instruction.operands[len(updates)]), *updates]
            touched = sum(update.bytes for update in updates)
            return sum(map(self._whole, inputs)) + 2 * self._outside(instruction.shape, touched)
        return written + sum(map(self._whole, operands))

    def passed(self, call: Instruction, computation: Computation) -> int:
        """Bytes of all operands and results of a custom call, wherever they lie."""
        operands = (computation.find(name) for name in dict.fromkeys(call.operands))
        written = sum(shape.bytes for shape in self._results(call, "custom-call"))
        return written + sum(operand.bytes for operand in operands)

    def _outside(self, where: Shape, amount: int) -> int:
        """`amount` bytes of the array `where`, or 0 where it lies on the chip."""
        return 0 if self._module.tiled and where.space in _ON_CHIP else amount

    def _whole(self, value: Instruction) -> int:
        return sum(self._outside(shape, shape.bytes) for shape in value.shapes)

    def _results(self, instruction: Instruction, opcode: str) -> tuple[Shape, ...]:
        """The leaves an instruction writes; a start also lists its operands and a context."""
        started = opcode != instruction.opcode and len(instruction.elements) > 1
        nested = len(instruction.shapes) != len(instruction.operands)  # jax 0.12 on GPU
        if started and (opcode != "all-reduce" or nested):
            # copy-start alone lists its result first.
            return instruction.elements[0 if opcode == "copy" else 1]
        if opcode == "custom-call" and instruction.custom_call_target.startswith("__cu"):
            # What cuBLAS and cuDNN return beside arrays is their workspace.
            return tuple(s for s in instruction.shapes if s.dtype not in _WORKSPACE or s.dims[1:])
        return instruction.shapes

    def _fusion_bytes(self, fusion: Instruction, computation: Computation) -> int:
        body = self._module.find(fusion.calls("calls")[0])
        outputs = self._outputs(body)
        shapes = fusion.shapes if len(fusion.shapes) == len(outputs) else body.root.shapes
        total = 0
        in_place: set[str] = set()
        for value, shape in zip(outputs, shapes, strict=False):
            origin = self._origin(value, body)
            total += self._outside(shape, self._written(origin, shape, body))
            if self._is_in_place(origin, body):
                in_place.add(origin.name)
        seen: set[str] = set()
        for parameter, name in zip(body.parameters, fusion.operands, strict=True):
            operand = computation.find(name)
            if name in seen or not operand.shapes:
                continue
            seen.add(name)
            total += self._outside(operand.shape, self._read(parameter, body, in_place))
        return total

    def _outputs(self, body: Computation) -> list[Instruction]:
        root = body.root
        return [body.find(name) for name in root.operands] if root.opcode == "tuple" else [root]

    def _origin(self, value: Instruction, body: Computation) -> Instruction:
        while value.opcode == "bitcast":
            value = body.find(value.operands[0])
        return value

    def _written(self, origin: Instruction, shape: Shape, body: Computation) -> int:
        """Bytes of a fusion's output that are written rather than passed on."""
        if origin.opcode == "parameter" or continues_another(origin, self.users(body)):
            return 0
        if origin.custom_call_target == "AsyncCollectiveStart":
            return body.find(origin.operands[0]).bytes
        if origin.opcode == "custom-call" and origin.custom_call_target in FREE_CALLS:
            return 0
        in_place = self._is_in_place(origin, body)
        if in_place and origin.opcode == "dynamic-update-slice":
            return body.find(origin.operands[1]).bytes
        if in_place:
            return 2 * sum(update.bytes for update in _updates(origin, body))
        if origin.opcode == "fusion":
            inner = self._module.find(origin.calls("calls")[0])
            outputs = self._outputs(inner)
            if len(outputs) == 1:
                return self._written(self._origin(outputs[0], inner), shape, inner)
        return shape.bytes

    def _read(self, value: Instruction, body: Computation, in_place: set[str]) -> int:
        """Bytes of a fused parameter, or of a value that is only it, that are read."""
        whole, total = value.bytes, 0
        for user in self.users(body)[value.name]:
            total += self._read_by(user, value, body, in_place)
            if total >= whole:
                return whole
        return total

    def _read_by(
        self, user: Instruction, value: Instruction, body: Computation, in_place: set[str]
    ) -> int:
        whole = value.bytes
        first_only = user.operands[0] == value.name and value.name not in user.operands[1:]
        if user.opcode in _SLICES and first_only:
            return user.bytes
        if user.name in in_place and first_only:
            return 0
        if user.opcode in _FOLLOWED and user.bytes:
            inner = self._read(user, body, in_place) if not user.root else user.bytes
            return inner * whole // user.bytes
        if user.opcode == "tuple":  # what is given is passed on, what is made of it written anew
            return 0 if self._origin(value, body).opcode in _GIVEN else whole
        if continues_another(user, self.users(body)):
            return 0
        if user.opcode == "custom-call" and user.custom_call_target in FREE_CALLS:
            return 0
        if user.opcode == "fusion":
            inner_body = self._module.find(user.calls("calls")[0])
            pairs = zip(inner_body.parameters, user.operands, strict=True)
            return sum(
                self._read(
                    parameter, inner_body, self._updated_in_place(inner_body, user, in_place)
                )
                for parameter, name in pairs
                if name == value.name
            )
        return whole

    def _updated_in_place(
        self, inner: Computation, fusion: Instruction, in_place: set[str]
    ) -> set[str]:
        """The in-place updates of a nested fusion that is itself the root of its fusion."""
        if not fusion.root:
            return set()
        origins = (self._origin(value, inner) for value in self._outputs(inner))
        return {o.name for o in origins if self._is_in_place(o, inner)}

    def _is_in_place(self, value: Instruction, body: Computation) -> bool:
        """Whether a fused value overwrites a part of what the fusion is given, and no more.

        What the fusion makes itself, as a fill, it writes as a whole.
        """
        if value.opcode not in ("dynamic-update-slice", "scatter"):
            return False
        return self._origin(body.find(value.operands[0]), body).opcode in _GIVEN


def _updates(scatter: Instruction, computation: Computation) -> list[Instruction]:
    count = len(scatter.operands) // 2
    return [computation.find(name) for name in scatter.operands[count + 1 :]]
