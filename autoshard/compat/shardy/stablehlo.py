"""StableHLO modules in process: made, copied, numbered, read (jaxlib.mlir; 0.10 to 0.12)."""

import functools
import hashlib
import io
import math
import re
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

import jax
import jax.interpreters.mlir as jax_mlir
import numpy as np
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo as dialect

from autoshard.compat.jaxpr import jaxprs
from autoshard.errors import LoweringError

# jaxlib's type stubs lack much of what its MLIR objects have, and differ between versions.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any
Block: TypeAlias = Any
Attribute: TypeAlias = Any

MESH_NAME = "mesh"
"""Every module here names one mesh, so."""

RAGGED_DOT = "chlo.ragged_dot"
PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.convolution", RAGGED_DOT})
"""Operations that multiply and sum."""

MANUAL = "sdy.manual_computation"
"""A `shard_map`: inside, types are those of one device's parts."""

SENDS = frozenset(
    f"stablehlo.{kind}"
    for kind in (
        *("all_reduce", "all_gather", "all_to_all", "reduce_scatter"),
        *("collective_permute", "collective_broadcast"),
    )
)
"""Collectives that the user's own manual regions ask for."""

_PRECISION = re.compile(r"precision (\w+)")
_ALGORITHM = re.compile(
    r"lhs_precision_type = (\w+), rhs_precision_type = (\w+), accumulation_type = (\w+),"
    r".*num_primitive_operations = (\d+)"
)
_GROUPS = "replica_groups"
_MESH_AXIS = re.compile(r'axis_ref<name = "([^"]+)"')  # of replica_group_mesh_axes (jax 0.12)
_SOURCE = re.compile(r'"([^"]+\.py)":(\d+)')


def lower_abstract(
    closed: jaxprs.ClosedJaxpr, shapes: Sequence[jax.ShapeDtypeStruct], platform: str
) -> Module:
    """Lowers a flat step for a platform without any device; no argument is dropped.

    Raises:
      LoweringError: JAX cannot lower it for that platform.
    """
    jitted = jax.jit(jaxprs.as_function(closed), keep_unused=True)
    return lower(jitted.trace(*shapes), platform).compiler_ir("stablehlo")


def lower(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered:
    """Has JAX lower a program for a platform.

    Raises:
      LoweringError: JAX cannot. A kernel of another platform is an example.
    """
    try:
        return traced.lower(lowering_platforms=(platform,))
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is one of these
        raise LoweringError(str(error)) from error


def run_passes(operation: Operation, pipeline: str) -> None:
    manager = passmanager.PassManager.parse(pipeline)
    manager.enable_verifier(False)  # halves the time; the compiler verifies the real program
    manager.run(operation)


def clone(module: Module) -> Operation:
    return module.operation.clone()


def bytecode(operation: Operation, strip_locations: bool = True) -> bytes:
    """The module as bytecode; without locations equal programs have equal bytes."""
    with operation.context:
        if strip_locations:
            operation = operation.clone()
            run_passes(operation, "builtin.module(strip-debuginfo)")
        buffer = io.BytesIO()
        operation.write_bytecode(buffer)
    return buffer.getvalue()


def from_bytecode(data: bytes) -> Operation:
    """The module that `bytecode` wrote, in a context of its own."""
    return ir.Module.parse(data, jax_mlir.make_ir_context()).operation


TAG = "autoshard.op"


def tag(module: Operation) -> None:
    """Numbers the operations of main in walking order; the numbers survive propagation."""
    with module.context:
        kind = ir.IntegerType.get_signless(32)
        for i, op in enumerate(walk(main_function(module).regions[0].blocks[0])):
            op.attributes[TAG] = ir.IntegerAttr.get(kind, i)


def constraint_locations(module: Operation) -> list[tuple[int, str]]:
    """(tag, location) of every sharding constraint in a tagged module."""
    return [
        (op.attributes[TAG].value, str(op.location))
        for op in walk(main_function(module).regions[0].blocks[0])
        if op.name == "sdy.sharding_constraint"
    ]


def text(module: Operation) -> str:
    """The module as text, without locations; large constants are written whole."""
    return str(module.get_asm(enable_debug_info=False))


_LARGE = 4096
"""Elements of a constant above which its bytes are hashed, and not its text."""
_ELIDED = "__elided__"
"""What MLIR writes for a constant that it leaves out."""


def digest_without(
    module: Operation, tags: Container[int], more: str = "", *, hash_text: bool = False
) -> str:
    """SHA-256 of a tagged module, without the constraints of these tags and without tags.

    It is the digest of the module's text and of `more`. Large constants are left out of the text,
    and their bytes are hashed after it: as text they take four times as long.

    Args:
      hash_text: large constants are text too, as in digests of 0.1.
    """
    with module.context:
        copy = module.clone()
        for op in walk(main_function(copy).regions[0].blocks[0]):
            if op.attributes[TAG].value in tags:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
            else:
                del op.attributes[TAG]
        found = hashlib.sha256()
        large = [] if hash_text else _large_constants(copy)
        if large:
            short = str(copy.get_asm(enable_debug_info=False, large_elements_limit=_LARGE))
            if short.count(_ELIDED) == len(large):
                found.update(f"{short}{more}".encode())
                for constant in large:
                    found.update(_bytes_of(constant))
                return found.hexdigest()
        found.update(f"{text(copy)}{more}".encode())
        return found.hexdigest()


def _large_constants(module: Operation) -> list[Operation]:
    """The large constants in the order of the text. A splat is short as text."""
    return [
        op
        for function in module.regions[0].blocks[0].operations
        if function.operation.name == "func.func"
        for op in walk(function.operation.regions[0].blocks[0])
        if op.name == "stablehlo.constant"
        and math.prod(shape_of(op.results[0])) > _LARGE
        and _ELIDED in str(op.get_asm(use_local_scope=True, large_elements_limit=_LARGE))
    ]


def _bytes_of(constant: Operation) -> bytes | memoryview:
    """What tells a constant from others of its type; text for types that NumPy does not have."""
    try:
        return np.ascontiguousarray(constant.attributes["value"]).reshape(-1).view(np.uint8).data
    except (TypeError, ValueError, BufferError):
        return literal(constant).encode()


def main_function(module: Operation) -> Operation:
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func" and op.operation.attributes["sym_name"].value == "main":
            return op.operation
    raise ValueError("the module has no main function")


def mesh_operation(module: Operation) -> Operation:
    """The one mesh of a flattened module."""
    for op in module.regions[0].blocks[0].operations:
        operation = op.operation
        if operation.name == "sdy.mesh" and operation.attributes["sym_name"].value == MESH_NAME:
            return operation
    raise ValueError("the module has no mesh")


def shape_of(value: Value) -> tuple[int, ...]:
    return shape_and_bits(str(value.type))[0]


def dtype_of(value: Value) -> str:
    """The element type in MLIR's words, such as `bf16`."""
    return str(ir.RankedTensorType(value.type).element_type)


def precision_of(product: Operation) -> tuple[list[str], str]:
    """What a product or convolution asks for: precision of each operand, and the dot algorithm.

    Returns:
      Words such as `HIGHEST`; the algorithm as HLO names it, `dot_bf16_bf16_f32_x3`, "" for none.
    """
    attributes = product.attributes
    asked = str(attributes["precision_config"]) if "precision_config" in attributes else ""
    named = _ALGORITHM.search(str(attributes["algorithm"])) if "algorithm" in attributes else None
    if named is None:
        return _PRECISION.findall(asked), ""
    lhs, rhs, sums, count = named.groups()
    times = f"_x{count}" if int(count) > 1 else ""
    return _PRECISION.findall(asked), f"dot_{lhs}_{rhs}_{sums}{times}"


def strides(operation: Operation) -> list[int]:
    """How many elements of the larger side lie between two of a slice's or a pad's smaller one."""
    if operation.name == "stablehlo.slice":
        return integers(operation, "strides")
    if operation.name == "stablehlo.pad":
        return [n + 1 for n in integers(operation, "interior_padding")]
    return []


def product_dimensions(product: Operation) -> tuple[tuple[list[int], list[int]], ...]:
    """(batch, contracted) dimensions of both operands of a `dot_general`."""
    numbers = dialect.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    return (
        (list(numbers.lhs_batching_dimensions), list(numbers.lhs_contracting_dimensions)),
        (list(numbers.rhs_batching_dimensions), list(numbers.rhs_contracting_dimensions)),
    )


def is_ragged_exchange(operation: Operation) -> bool:
    """Whether it is a `jax.lax.ragged_all_to_all`, which JAX lowers to a custom call."""
    return (
        operation.name == "stablehlo.custom_call"
        and ir.StringAttr(operation.attributes["call_target_name"]).value == "ragged_all_to_all"
    )


def partners_of(send: Operation) -> tuple[tuple[int, ...], ...] | tuple[str, ...]:
    """Who takes part in one of `SENDS` or a ragged exchange: groups of devices by their place in
    the mesh, or mesh axes.

    Of a permutation the groups are its pairs (source, target).
    """
    attributes = send.attributes
    if is_ragged_exchange(send):
        attributes = ir.DictAttr(attributes["backend_config"])
    held = attributes["source_target_pairs" if "source_target_pairs" in attributes else _GROUPS]
    if isinstance(held, ir.DenseIntElementsAttr):
        # jax fills up the smaller ones of unequal groups with -1.
        return tuple(tuple(int(d) for d in row if d >= 0) for row in np.asarray(held))
    if not (axes := tuple(_MESH_AXIS.findall(str(held)))):
        raise ValueError(f"{send.name} is among devices that are not understood: {held}")
    return axes


def literal(constant: Operation) -> str:
    """The value of a `constant` with its type, as MLIR writes them."""
    try:
        return str(constant.attributes["value"])
    except TypeError:  # MLIR's Python has no type for complex elements
        whole = str(constant.get_asm(use_local_scope=True))
        return whole[whole.index("dense") :]


def integers(operation: Operation, name: str) -> list[int]:
    """An attribute that is a list of integers, such as `fft_length` or `window_dimensions`."""
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


def sorted_dimension(sort: Operation) -> int:
    """Along which dimension a `sort` sorts."""
    return int(ir.IntegerAttr(sort.attributes["dimension"]).value)


def source_of(location: str) -> str:
    """`file.py:line` of the user's step that an operation's location names; "" if it names none.

    >>> source_of('loc("jit(f)/while"(callsite("f"("/home/me/step.py":12:4 to :9) at "g")))')
    'step.py:12'
    """
    found = _SOURCE.search(location)
    return f"{found[1].rpartition('/')[2]}:{found[2]}" if found else ""


@functools.lru_cache(maxsize=4096)
def shape_and_bits(type_text: str) -> tuple[tuple[int, ...], int]:
    """(dimensions, bits an element) of a printed tensor type such as `tensor<8x4xbf16>`.

    Tokens and tuples have no elements: ((0,), 0).
    """
    found = re.fullmatch(r"tensor<((?:\d+x)*)([^,>]+(?:<[^>]*>)?)(?:,.*)?>", type_text)
    if not found:
        return (0,), 0
    dims = tuple(int(d) for d in found.group(1).split("x") if d)
    element = found.group(2)
    if element == "i1":
        return dims, 8
    if element.startswith("complex"):
        return dims, 2 * int(re.search(r"f(\d+)", element).group(1))  # type: ignore[union-attr]
    bits = re.search(r"(\d+)", element)
    return dims, int(bits.group(1)) if bits else 0


def bytes_of(value: Value) -> float:
    """Of the whole array; types narrower than a byte count in parts."""
    dims, bits = shape_and_bits(str(value.type))
    return math.prod(dims) * bits / 8


def walk(block: Block) -> list[Operation]:
    """Every operation of a block and of the regions inside, in order, outer before inner.

    As they are now: what is put in or taken out later changes nothing in the list.
    """
    found: list[Operation] = []

    def visit(block: Block) -> None:
        for op in block.operations:
            operation = op.operation
            found.append(operation)
            if operation.name in _REGIONS:
                for region in operation.regions:
                    for inner in region.blocks:
                        visit(inner)

    visit(block)
    return found


def in_manual(operation: Operation) -> bool:
    """Whether an operation stands in a manual region."""
    while (around := operation.parent) is not None:
        operation = around.operation
        if operation.name == MANUAL:
            return True
    return False


_REGIONS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if", MANUAL})
