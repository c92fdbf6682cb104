"""Optimized, scheduled HLO as plain records: module -> computations -> instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from autoshard.errors import HloError as HloError

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)".* source_line=(\d+)')


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array as a device holds it.

    Attributes:
      dtype: XLA's name, such as `bf16`; `token` and `opaque` take no bytes.
      dims: extents, major to minor as the program sees them; a bounded dimension has its bound.
      space: the memory space `S(n)` of the layout; 0 is the main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, without the padding of tiled layouts."""
        return -(-self.size * _bits(self.dtype) // 8)


@functools.cache
def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    if not found:
        raise HloError(f"expected a dtype with its width in bits, such as bf16; got {dtype!r}")
    return int(found[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
      elements: the result, a tuple of leaves for each top-level element; one element where the
        result is an array.
      operands: names of the operands in order.
      literal: what stands in the brackets of a `parameter` or `constant`, else "".
      called: (role, computation) in printed order; roles are to_apply, calls, body, condition,
        branch_computations, true_computation, false_computation, called_computations, select and
        scatter.
      attributes: every attribute behind the brackets as (name, text).
    """

    name: str
    opcode: str
    elements: tuple[tuple[Shape, ...], ...]
    operands: tuple[str, ...]
    root: bool
    literal: str
    called: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, str], ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All leaves of the result."""
        return tuple(shape for element in self.elements for shape in element)

    @property
    def shape(self) -> Shape:
        """The first leaf of the result: the result itself where it is an array."""
        for element in self.elements:
            for shape in element:
                return shape
        raise HloError(f"%{self.name}: expected a result with an array in it, got an empty tuple")

    @property
    def bytes(self) -> int:
        """Size of the whole result, bytes."""
        return sum(shape.bytes for shape in self.shapes)

    def attribute(self, name: str) -> str:
        """The text of an attribute, "" where it is absent."""
        for key, value in self.attributes:
            if key == name:
                return value
        return ""

    def ints(self, name: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1,2}` as numbers; () where it is absent."""
        return tuple(int(x) for x in re.findall(r"-?\d+", self.attribute(name)))

    def calls(self, *roles: str) -> tuple[str, ...]:
        """Names of the computations called in these roles."""
        return tuple(name for role, name in self.called if role in roles)

    @property
    def custom_call_target(self) -> str:
        return self.attribute("custom_call_target").strip('"')

    @property
    def op_name(self) -> str:
        """JAX's path to the operation, such as `jit(step)/while/body/dot_general`, or ""."""
        found = _OP_NAME.search(self.attribute("metadata"))
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def channel_id(self) -> int | None:
        text = self.attribute("channel_id")
        return int(text) if text else None

    @property
    def known_trip_count(self) -> int | None:
        """Iterations of a `while` where the compiler printed them (TPU does not: see trips.py)."""
        found = _TRIPS.search(self.attribute("backend_config"))
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A list of instructions in the order they run; the root is the result."""

    name: str
    instructions: tuple[Instruction, ...]
    _index: Mapping[str, Instruction] = dataclasses.field(repr=False, compare=False)

    def find(self, name: str) -> Instruction:
        """The instruction of that name.

        Raises:
          HloError: there is none.
        """
        try:
            return self._index[name]
        except KeyError:
            raise HloError(f"%{self.name}: expected an instruction %{name}, got none") from None

    @property
    def root(self) -> Instruction:
        for instruction in reversed(self.instructions):
            if instruction.root:
                return instruction
        return self.instructions[-1]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters by number."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return tuple(sorted(found, key=lambda i: int(i.literal)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HloModule:
    """A whole program, as one device runs it.

    Attributes:
      entry: name of the computation that runs.
      device_count: partitions times replicas.
      partition_count: num_partitions.
      tiled: whether layouts are tiled, as they are on TPU only; memory spaces 1-4 are on chip then.
      frames: `file:line` of each stack frame id.
    """

    name: str
    entry: str
    computations: tuple[Computation, ...]
    device_count: int
    partition_count: int
    tiled: bool
    frames: tuple[tuple[int, str], ...]
    _index: Mapping[str, Computation] = dataclasses.field(repr=False, compare=False)
    _frames: Mapping[int, str] = dataclasses.field(repr=False, compare=False)

    def find(self, name: str) -> Computation:
        """The computation of that name.

        Raises:
          HloError: there is none.
        """
        try:
            return self._index[name]
        except KeyError:
            raise HloError(f"{self.name}: expected a computation %{name}, got none") from None

    def source(self, instruction: Instruction) -> str:
        """`file:line` the instruction comes from, "" where the module does not say."""
        metadata = instruction.attribute("metadata")
        if found := _FRAME_ID.search(metadata):
            return self._frames.get(int(found[1]), "")
        if found := _SOURCE.search(metadata):
            return f"{found[1]}:{found[2]}"
        return ""
