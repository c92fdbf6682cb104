"""Reshards put into a module after propagation: how a value is divided, and bringing it elsewhere.

Between propagation and explicit reshards of the Shardy partitioner.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jaxlib.mlir import ir

from autoshard.compat.shardy.shardings import Attributes, parse_sharding, sharding_text
from autoshard.compat.shardy.stablehlo import MANUAL, Operation, Value, shape_of
from autoshard.records.subaxes import axis_name, ways

Division: TypeAlias = tuple[tuple[str, ...], ...]
"""Mesh axes of each dimension."""


def division(value: Value) -> Division:
    """How propagation divided a value; later, how its collectives did."""
    text = _sharding_text(value)
    return parse_sharding(text) if text else ((),) * len(shape_of(value))


def without(axes: Division, names: set[str]) -> Division:
    """Without some mesh axes and parts of them."""
    return tuple(tuple(axis for axis in dim if axis_name(axis) not in names) for dim in axes)


def parts(divided: Iterable[Iterable[str]], sizes: Mapping[str, int]) -> int:
    """Into how many parts the mesh axes of some dimensions divide a value."""
    return math.prod(ways(axes, sizes) for axes in divided)


def bring_operand(
    op: Operation, index: int, steps: Sequence[Division], attributes: Attributes
) -> None:
    """Brings an operand from one division to the next before the operation."""
    at = ir.InsertionPoint(op)
    op.operands[index] = _resharded(op.operands[index], steps, attributes, at)


def make_result(op: Operation, to: Division, attributes: Attributes) -> None:
    """Gives the one result a division of its own, and those that use it the one that it had."""
    result = op.results[0]
    used = division(result)
    per_value = f"<[{_text(to).removeprefix('#sdy.sharding')}]>"
    op.attributes["sdy.sharding"] = attributes(f"#sdy.sharding_per_value{per_value}")
    back = _resharded(result, [used], attributes, ir.InsertionPoint.after(op))
    result.replace_all_uses_except(back, back.owner.operation)


def _sharding_text(value: Value) -> str:
    """The printed sharding of a value; "" where it has none."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        owner = owner.owner
        if owner.name == MANUAL:
            return ""
        if "arg_attrs" in owner.attributes:
            named = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[number])
            return str(named["sdy.sharding"]) if "sdy.sharding" in named else ""
    else:
        number = ir.OpResult(value).result_number
    for name in ("sharding", "out_sharding"):  # of a reshard, of a collective
        if owner.name.startswith("sdy.") and name in owner.attributes:
            return str(owner.attributes[name])
    name = "out_shardings" if owner.name == MANUAL else "sdy.sharding"
    if name not in owner.attributes:
        return ""
    return "<@" + str(owner.attributes[name]).split("<@")[1:][number]


def _text(to: Division) -> str:
    return sharding_text(tuple((axes, False) for axes in to))


def _resharded(
    value: Value, steps: Sequence[Division], attributes: Attributes, at: ir.InsertionPoint
) -> Value:
    """A value brought from one division to the next."""
    location = ir.Location.unknown() if isinstance(value.owner, ir.Block) else value.owner.location
    for to in steps:
        operation = ir.Operation.create(
            "sdy.reshard",
            results=[value.type],
            operands=[value],
            attributes={"sharding": attributes(_text(to))},
            loc=location,
            ip=at,
        )
        value = operation.results[0]
    return value
