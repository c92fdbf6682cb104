"""StableHLO modules and the Shardy partitioner in process (jaxlib.mlir; 0.10 to 0.12)."""

import functools
import io
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from autoshard.compat import jaxprs

# jaxlib's type stubs lack much of what its MLIR objects have, and differ between versions.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any
Block: TypeAlias = Any
Attribute: TypeAlias = Any

_PROPAGATE = (
    "builtin.module(sdy-propagation-pipeline,sdy-close-shardings,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)
_RULES = (
    "builtin.module(sdy-flatten-call-graph,symbol-dce,func.func(sdy-populate-op-sharding-rules))"
)
MESH_NAME = "mesh"


def lower_abstract(
    closed: jaxprs.ClosedJaxpr, shapes: Sequence[jax.ShapeDtypeStruct], platform: str
) -> Module:
    """Lowers a flat step for a platform without any device; no argument is dropped."""
    jitted = jax.jit(jaxprs.as_function(closed), keep_unused=True)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=(platform,))
    return lowered.compiler_ir("stablehlo")


def run_passes(operation: Operation, pipeline: str) -> None:
    manager = passmanager.PassManager.parse(pipeline)
    manager.enable_verifier(False)  # halves the time; the compiler verifies the real program
    manager.run(operation)


def clone(module: Module) -> Operation:
    return module.operation.clone()


def flatten(module: Module) -> Operation:
    """A copy of the module's main function with every call inlined, loop bodies included."""
    with module.context, ir.Location.unknown(module.context):
        copy = clone(module)
        functions = {
            op.operation.attributes["sym_name"].value: op.operation
            for op in copy.regions[0].blocks[0].operations
            if op.operation.name == "func.func"
        }
        _inline(functions["main"].regions[0].blocks[0], functions, set())
        _keep_one_mesh(copy)
        _give_rules(copy)
        run_passes(copy, "builtin.module(symbol-dce)")
    return copy


def _keep_one_mesh(module: Operation) -> None:
    """Sees to `@mesh` and no other: Shardy ends the process where a sharding names an unknown axis.

    JAX puts constraints on a mesh without axes on PRNG keys (0.10, 0.12); they say nothing. A step
    without sites has no mesh. Sums in a manual region name the same mesh once more (0.12).
    """
    block = module.regions[0].blocks[0]
    meshes = {
        op.operation.attributes["sym_name"].value: str(op.operation.attributes["mesh"])
        for op in block.operations
        if op.operation.name == "sdy.mesh"
    }
    full = [name for name, text in meshes.items() if '"=' in text]
    if not full:
        mesh = ir.Operation.parse(f'sdy.mesh @{MESH_NAME} = <["_"=2]>')
        ir.InsertionPoint.at_block_begin(block).insert(mesh)
    elif MESH_NAME not in full or len({meshes[n] for n in full}) > 1:
        raise ValueError(f"the step names several meshes: {', '.join(meshes[n] for n in full)}")
    for op in list(walk(main_function(module).regions[0].blocks[0])):
        if op.name != "sdy.sharding_constraint":
            continue
        text = str(op.attributes["sharding"])
        if not any(f"@{name}," in text for name in full):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def _give_rules(module: Operation) -> None:
    """Tells Shardy how CHLO operations (erf, square, top_k ...) shard: it knows StableHLO's only.

    The compilers expand CHLO before they partition; no pass that does is in jaxlib (0.10, 0.12).
    """
    for op in walk(main_function(module).regions[0].blocks[0]):
        if not op.name.startswith("chlo."):
            continue
        shapes = [shape_of(v) for v in (*op.operands, *op.results)]
        rank = len(shapes[0])
        sizes = list(shapes[0])
        names = _SYMBOLS[:rank]
        alone = ""
        if op.name == "chlo.top_k":  # (values, indices): the last dimension is taken whole
            last = _SYMBOLS[rank]
            within, outside = names, [*names[:-1], last]
            names, sizes = [*names, last], [*sizes, shapes[-1][-1]]
            alone = f" need_replication={{{within[-1]}, {last}}}"
        elif all(shape == shapes[0] for shape in shapes):
            within = outside = names
        else:
            continue
        ins = ", ".join(_mapping(within) for _ in op.operands)
        outs = ", ".join(_mapping(outside) for _ in op.results)
        table = ", ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))
        op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(
            f"#sdy.op_sharding_rule<({ins})->({outs}) {{{table}}}{alone}, custom>"
        )


_SYMBOLS = [*"ijklmnopqrstuvwxyz", *(f"z_{i + 1}" for i in range(16))]
"""Shardy's names of factors, in its order."""


def _mapping(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


def _inline(block: Block, functions: dict[str, Operation], done: set[str]) -> None:
    """Inlines every call in a block (MLIR's own inliner leaves calls in StableHLO loops alone)."""
    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                _inline(inner, functions, done)
        if operation.name != "func.call":
            continue
        name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        callee = functions[name].regions[0].blocks[0]
        if name not in done:
            done.add(name)
            _inline(callee, functions, done)
        values = dict(zip(callee.arguments, operation.operands, strict=True))
        point = ir.InsertionPoint(operation)
        body = list(callee.operations)
        for inner in body[:-1]:
            new = inner.operation.clone(point)
            _remap(new, values)
            values.update(zip(inner.operation.results, new.results, strict=True))
        for result, returned in zip(operation.results, body[-1].operation.operands, strict=True):
            result.replace_all_uses_with(values[returned])
        operation.erase()


def _remap(operation: Operation, values: dict[Value, Value]) -> None:
    """Points an operation, and what it holds inside, at the values that replace its operands."""
    for i, operand in enumerate(operation.operands):
        if operand in values:
            operation.operands[i] = values[operand]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, values)


def with_rules(operation: Operation) -> Operation:
    """A copy whose operations carry the partitioner's factor mapping, `sdy.sharding_rule`."""
    with operation.context:
        copy = operation.clone()
        run_passes(copy, _RULES)
    return copy


def propagate(operation: Operation) -> None:
    """Runs the partitioner in place, up to explicit collectives."""
    run_passes(operation, _PROPAGATE)


def bytecode(operation: Operation, strip_locations: bool = True) -> bytes:
    """The module as bytecode; without locations equal programs have equal bytes."""
    with operation.context:
        if strip_locations:
            operation = operation.clone()
            run_passes(operation, "builtin.module(strip-debuginfo)")
        buffer = io.BytesIO()
        operation.write_bytecode(buffer)
    return buffer.getvalue()


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


def text_without(module: Operation, tags: Container[int]) -> str:
    """The same of a tagged module, without the constraints of these tags and without tags."""
    with module.context:
        copy = module.clone()
        for op in list(walk(main_function(copy).regions[0].blocks[0])):
            if op.attributes[TAG].value in tags:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
            else:
                del op.attributes[TAG]
        return text(copy)


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


def strides(operation: Operation) -> list[int]:
    """How many elements of the larger side lie between two of a slice's or a pad's smaller one."""
    attributes = operation.attributes
    if operation.name == "stablehlo.slice":
        return list(ir.DenseI64ArrayAttr(attributes["strides"]))
    if operation.name == "stablehlo.pad":
        return [n + 1 for n in ir.DenseI64ArrayAttr(attributes["interior_padding"])]
    return []


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


class Factors:
    """One operation's factor mapping: which dimensions of operands and results go together.

    Attributes:
      sizes: of each factor.
      operands, results: for each value, for each dimension, the factors major to minor.
      replicated: factors that the partitioner can only replicate.
    """

    __slots__ = ("operands", "replicated", "results", "sizes")

    def __init__(self, attribute: Attribute):
        rule = sdy.OpShardingRuleAttr(attribute)
        self.sizes = list(rule.factor_sizes)
        self.operands = [_dimensions(m) for m in rule.operand_mappings]
        self.results = [_dimensions(m) for m in rule.result_mappings]
        self.replicated = set(rule.need_replication_factors)


def _dimensions(mapping: Attribute) -> list[list[int]]:
    dims = sdy.TensorMappingAttr(mapping).dim_mappings
    return [list(sdy.DimMappingAttr(d).factor_indices) for d in dims]


def factors_of(operation: Operation) -> Factors | None:
    """The factor mapping of an operation after `with_rules`, None where it has none."""
    attributes = operation.attributes
    if "sdy.sharding_rule" not in attributes:
        return None
    return Factors(attributes["sdy.sharding_rule"])


def walk(block: Block) -> Iterator[Operation]:
    """Every operation of a block and of the regions inside, in order, outer before inner."""
    for op in block.operations:
        operation = op.operation
        yield operation
        if operation.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
            for region in operation.regions:
                for inner in region.blocks:
                    yield from walk(inner)


Dims = tuple[tuple[tuple[str, ...], bool], ...]
"""For each dimension the mesh axes that shard it and whether the partitioner may add more."""


def sharding_text(dims: Dims) -> str:
    """The Shardy attribute for one tensor, as text."""
    parts = []
    for axes, is_open in dims:
        names = ", ".join(f'"{a}"' for a in axes)
        parts.append("{" + names + (", ?" if names and is_open else "?" if is_open else "") + "}")
    return f"#sdy.sharding<@{MESH_NAME}, [{', '.join(parts)}]>"


class Attributes:
    """Parses attributes of one context, each text once."""

    def __init__(self, context: ir.Context):
        self._context = context
        self._memo: dict[str, Attribute] = {}

    def __call__(self, text: str) -> Attribute:
        found = self._memo.get(text)
        if found is None:
            found = self._memo[text] = ir.Attribute.parse(text, context=self._context)
        return found


def mesh_text(mesh: Sequence[tuple[str, int]]) -> str:
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh)
    return f"#sdy.mesh<[{axes}]>"


@functools.lru_cache(maxsize=65536)
def parse_sharding(text: str) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of each dimension in a printed `#sdy.sharding<@mesh, [{"x"}, {}]>`.

    A part of an axis is printed `"x":(1)4`; it is kept in that form.
    """
    body = text[text.index("[") + 1 : text.rindex("]")] if "[" in text else ""
    if "replicated" in text:
        body = text[text.index("[") + 1 : text.index("]")]
    dims = []
    for part in re.findall(r"\{([^}]*)\}", body):
        dims.append(tuple(re.findall(r'"[^"]+"(?::\(\d+\)\d+)?', part)))
    return tuple(tuple(a.strip('"') if ":" not in a else a for a in dim) for dim in dims)


def axis_size(axis: str, sizes: dict[str, int]) -> int:
    """Size of a mesh axis, or of a part of one (`"x":(1)4`)."""
    if ":(" in axis:
        return int(axis.rsplit(")", 1)[1])
    return sizes[axis]


def distinct(axes: Iterable[str]) -> tuple[str, ...]:
    """The same mesh axes with none named twice: where a whole axis is there its parts go, and parts
    that overlap or follow each other become one. Sorted.

    >>> distinct(['"x":(1)2', '"x":(2)2', "y"])
    ('"x":(1)4', 'y')
    >>> distinct(['"x":(1)2', "x"])
    ('x',)
    """
    names = set(axes)
    if not any(":(" in axis for axis in names):
        return tuple(sorted(names))
    whole = {axis for axis in names if ":(" not in axis}
    parts: dict[str, list[tuple[int, int]]] = {}  # (major to it, major to what follows it)
    for axis in names - whole:
        name, _, part = axis.partition(":(")
        before, _, size = part.partition(")")
        if name.strip('"') not in whole:
            parts.setdefault(name, []).append((int(before), int(before) * int(size)))
    for name, spans in parts.items():
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        whole |= {f"{name}:({start}){end // start}" for start, end in merged}
    return tuple(sorted(whole))


Communication = tuple[str, tuple[str, ...], float, float, int, int, tuple[str, ...], str]


class Judged:
    """What the partitioner made of one layout, as plain data.

    Attributes:
      shards: tag -> for each result the set of mesh axes (or parts) that divide it.
      contracted: tag of a product or reduction -> mesh axes that divide its work.
      operands: tag of the same -> for each operand the mesh axes that divide what is read, which is
        less than what was made where the partitioner gathers in between.
      communication: (operation, mesh axes, local bytes in, local bytes out, a tag of its block, tag
        of the operation before it, axes sliced right after it, location).
      argument_axes: mesh axes of each argument of main.
      argument_dims, result_dims: mesh axes of each dimension of the arguments and results of main.
    """

    __slots__ = (
        "argument_axes",
        "argument_dims",
        "communication",
        "contracted",
        "operands",
        "result_dims",
        "shards",
    )

    def __init__(self) -> None:
        self.shards: dict[int, tuple[frozenset[str], ...]] = {}
        self.contracted: dict[int, frozenset[str]] = {}
        self.operands: dict[int, tuple[frozenset[str], ...]] = {}
        self.communication: list[Communication] = []
        self.argument_axes: list[frozenset[str]] = []
        self.argument_dims: list[tuple[tuple[str, ...], ...]] = []
        self.result_dims: list[tuple[tuple[str, ...], ...]] = []


def _before_cast(value: Value) -> Value:
    """What is sent of a value: where a cast has just widened it, the narrow one.

    Shardy reshards the result of a cast; XLA's partitioner gives every elementwise operation its
    operands as the result is sharded, so that the cast comes after (seen with bf16 scores that are
    cast to f32, jaxlib 0.10.2 for H100).
    """
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.convert":
        return value
    narrow = owner.operands[0]
    bits = [shape_and_bits(str(v.type))[1] for v in (narrow, value)]
    return narrow if bits[0] < bits[1] else value


_CONTRACTING = frozenset({"stablehlo.dot_general", "stablehlo.convolution", "stablehlo.reduce"})


def judge(
    module: Operation,
    mesh: Sequence[tuple[str, int]],
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    sites: dict[int, Dims],
    site_of_tag: dict[int, int],
    attributes: Attributes,
) -> Judged:
    """Puts one layout into a copy of a tagged module, runs the partitioner, reads the result."""
    sizes = dict(mesh)
    with module.context:
        copy = module.clone()
        mesh_operation(copy).attributes["mesh"] = attributes(mesh_text(mesh))
        main = main_function(copy)
        main.attributes["arg_attrs"] = attributes(_attribute_list(inputs))
        main.attributes["res_attrs"] = attributes(_attribute_list(outputs))
        for op in walk(main.regions[0].blocks[0]):
            if op.name == "sdy.sharding_constraint":
                dims = sites.get(site_of_tag.get(op.attributes[TAG].value, -1))
                if dims is not None:
                    op.attributes["sharding"] = attributes(sharding_text(dims))
        propagate(copy)
        return _read(main_function(copy), sizes)


def _attribute_list(tensors: Sequence[Dims]) -> str:
    return "[" + ", ".join("{sdy.sharding = " + sharding_text(d) + "}" for d in tensors) + "]"


def _dims_of(named: Any) -> tuple[tuple[str, ...], ...]:
    return parse_sharding(str(named["sdy.sharding"])) if "sdy.sharding" in named else ()


def _read(main: Operation, sizes: dict[str, int]) -> Judged:
    judged = Judged()
    memo: dict[Attribute, tuple[frozenset[str], ...]] = {}

    def axes_of(attribute: Attribute) -> tuple[frozenset[str], ...]:
        found = memo.get(attribute)
        if found is None:
            parts = str(attribute).split("<@")[1:]
            found = tuple(
                frozenset(a for dim in parse_sharding("<@" + part) for a in dim) for part in parts
            )
            memo[attribute] = found
        return found

    of_value: dict[Value, frozenset[str]] = {}
    # Sums over devices that nothing has used yet, by value: where they stand in `communication`.
    sums: dict[Value, int] = {}
    merged: set[int] = set()
    gathered: set[tuple[Value, Attribute]] = set()
    empty: frozenset[str] = frozenset()
    block = main.regions[0].blocks[0]
    for argument, attribute in zip(block.arguments, main.attributes["arg_attrs"], strict=True):
        named = ir.DictAttr(attribute)
        axes = axes_of(named["sdy.sharding"])[0] if "sdy.sharding" in named else empty
        of_value[argument] = axes
        judged.argument_dims.append(_dims_of(named))
        judged.argument_axes.append(axes)
    judged.result_dims = [_dims_of(ir.DictAttr(a)) for a in main.attributes["res_attrs"]]

    def bytes_of(value: Value, axes: frozenset[str]) -> float:
        dims, bits = shape_and_bits(str(value.type))
        size = float(bits) / 8
        for n in dims:
            size *= n
        for a in axes:
            size /= axis_size(a, sizes)
        return size

    def visit(block: Block) -> None:
        # Collectives take the trip count of the block they stand in: that of its first operation.
        own_tag = next(
            (o.attributes[TAG].value for o in block.operations if TAG in o.attributes), -1
        )
        last_tag = own_tag
        for o in block.operations:
            op = o.operation
            held = op.attributes
            name = op.name
            if TAG in held:
                last_tag = held[TAG].value
                shards: tuple[frozenset[str], ...] = ()
                if "sdy.sharding" in held:
                    shards = axes_of(held["sdy.sharding"])
                results = op.results
                shards += (empty,) * (len(results) - len(shards))
                judged.shards[last_tag] = shards
                for result, axes in zip(results, shards, strict=False):
                    of_value[result] = axes
                if name == "stablehlo.add" and all(v in sums for v in op.operands):
                    first, second = (sums.pop(v) for v in op.operands)
                    if _alike(judged.communication[first], judged.communication[second]):
                        merged.add(second)
                        if _used_once(op.results[0]):
                            sums[op.results[0]] = first
                if name in _CONTRACTING:
                    every = set(shards[0])
                    given = tuple(of_value.get(operand, empty) for operand in op.operands)
                    every.update(*given)
                    judged.operands[last_tag] = given
                    judged.contracted[last_tag] = frozenset(distinct(every))
                if name == "stablehlo.while":
                    for region in op.regions:
                        inner = region.blocks[0]
                        for argument, axes in zip(inner.arguments, shards, strict=True):
                            of_value[argument] = axes
                        visit(inner)
                elif name in ("stablehlo.case", "stablehlo.if"):
                    for region in op.regions:
                        for inner in region.blocks:
                            visit(inner)
            elif name.startswith("sdy.") and "out_sharding" in held:
                out = axes_of(held["out_sharding"])[0]
                result = op.results[0]
                of_value[result] = out
                if name == "sdy.all_slice":
                    if op.operands[0] in sums and _used_once(result):
                        sums[result] = sums.pop(op.operands[0])
                    continue
                before = of_value.get(op.operands[0], empty)
                sliced: tuple[str, ...] = ()
                if name == "sdy.all_reduce":
                    involved = tuple(dict.fromkeys(_AXIS.findall(str(held["reduction_axes"]))))
                    users = list(result.uses)
                    if len(users) == 1 and users[0].owner.name == "sdy.all_slice":
                        after = axes_of(users[0].owner.attributes["out_sharding"])[0]
                        sliced = tuple(sorted(after - out))
                elif name == "sdy.all_gather":
                    involved = tuple(dict.fromkeys(_AXIS.findall(str(held["gathering_axes"]))))
                elif name == "sdy.all_to_all":
                    involved = tuple(dict.fromkeys(_AXIS.findall(str(held["params"]))))
                else:
                    involved = distinct(out | before)
                if name == "sdy.all_gather":
                    # XLA's common-subexpression elimination: the same value is gathered once.
                    if (same := (op.operands[0], held["out_sharding"])) in gathered:
                        continue
                    gathered.add(same)
                sent = op.operands[0] if name == "sdy.all_reduce" else _before_cast(op.operands[0])
                judged.communication.append(
                    (
                        name.removeprefix("sdy."),
                        tuple(a.strip('"') if ":" not in a else a for a in involved),
                        bytes_of(sent, before),
                        bytes_of(sent, out),
                        own_tag,
                        last_tag,
                        sliced,
                        str(op.location)[:200],
                    )
                )
                if name == "sdy.all_reduce" and _used_once(result):
                    sums[result] = len(judged.communication) - 1

    visit(block)
    judged.communication = [c for i, c in enumerate(judged.communication) if i not in merged]
    return judged


def _used_once(value: Value) -> bool:
    return len(list(itertools.islice(value.uses, 2))) == 1


def _alike(one: Communication, other: Communication) -> bool:
    """Whether two sums over devices run over the same ones and are cut alike afterwards: XLA adds
    first, and sends once (its passes all-reduce-reassociate and reduce-scatter-reassociate)."""
    return (one[1], one[4], one[6]) == (other[1], other[4], other[6])


_AXIS = re.compile(r'"[^"]+"(?::\(\d+\)\d+)?')
