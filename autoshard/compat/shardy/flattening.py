"""One function without calls, on one mesh: the form in which modules are analysed and judged."""

from jaxlib.mlir import ir

from autoshard.compat.shardy.factor_rules import give_rules
from autoshard.compat.shardy.stablehlo import (
    MESH_NAME,
    Block,
    Module,
    Operation,
    Value,
    clone,
    main_function,
    run_passes,
    walk,
)


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
        give_rules(copy)
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
    for op in walk(main_function(module).regions[0].blocks[0]):
        if op.name != "sdy.sharding_constraint":
            continue
        text = str(op.attributes["sharding"])
        if not any(f"@{name}," in text for name in full):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


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
