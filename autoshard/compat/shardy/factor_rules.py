"""How each operation shards: Shardy's factor mappings, and those that it lacks."""

from collections.abc import Iterable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from autoshard.compat.shardy.ragged import factors_of_ragged
from autoshard.compat.shardy.shardings import Attributes
from autoshard.compat.shardy.stablehlo import (
    RAGGED_DOT,
    Attribute,
    Operation,
    main_function,
    run_passes,
    shape_of,
    walk,
)

_RULES = (
    "builtin.module(sdy-flatten-call-graph,symbol-dce,func.func(sdy-populate-op-sharding-rules))"
)


def give_rules(module: Operation) -> None:
    """Tells Shardy how CHLO operations (erf, top_k, ragged_dot) shard: it knows StableHLO's only.

    The compilers expand CHLO before they partition; no pass that does is in jaxlib (0.10, 0.12).
    """
    for op in walk(main_function(module).regions[0].blocks[0]):
        if not is_given(op.name):
            continue
        shapes = [shape_of(v) for v in (*op.operands, *op.results)]
        dims = list(range(len(shapes[0])))
        rule: str | None = None
        if op.name == RAGGED_DOT:
            found = factors_of_ragged(op)
            rule = _rule(found.sizes, found.operands, [found.result], found.summed, found.whole)
        elif op.name == "chlo.top_k":  # (values, indices): the last dimension is taken whole
            best = len(dims)
            outside = [*dims[:-1], best]
            sizes = [*shapes[0], shapes[-1][-1]]
            rule = _rule(sizes, [dims], [outside] * 2, whole=[dims[-1], best])
        elif all(shape == shapes[0] for shape in shapes):
            rule = _rule(shapes[0], [dims] * len(op.operands), [dims] * len(op.results))
        if rule is not None:
            op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)


def bind_rules(operations: Iterable[Operation], attributes: Attributes) -> None:
    """Has Shardy reshard what does not follow a rule of `give_rules`, as it does for its own.

    It spares operations whose rule is the user's own; that is what keeps the rule until then.

    Args:
      operations: of main, after propagation, before reshards become explicit.
    """
    for op in operations:
        if is_given(op.name) and "sdy.sharding_rule" in op.attributes:
            rule = str(op.attributes["sdy.sharding_rule"])
            op.attributes["sdy.sharding_rule"] = attributes(rule.replace(", custom>", ">"))


def is_given(name: str) -> bool:
    """Whether `give_rules` speaks of operations of a name."""
    return name.startswith("chlo.")


_SYMBOLS = [*"ijklmnopqrstuvwxyz", *(f"z_{i + 1}" for i in range(16))]
"""Shardy's names of factors, in its order."""


def _rule(
    sizes: Sequence[int],
    operands: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]],
    summed: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> str:
    """A rule as Shardy writes it, of the factors that each dimension is."""
    ins, outs = (
        ", ".join(f"[{', '.join(_SYMBOLS[i] for i in dims)}]" for dims in values)
        for values in (operands, results)
    )
    table = ", ".join(f"{_SYMBOLS[i]}={size}" for i, size in enumerate(sizes))
    named = "".join(
        f" {word}={{{', '.join(_SYMBOLS[i] for i in factors)}}}"
        for word, factors in (("reduction", summed), ("need_replication", whole))
        if factors
    )
    return f"#sdy.op_sharding_rule<({ins})->({outs}) {{{table}}}{named}, custom>"


def with_rules(operation: Operation) -> Operation:
    """A copy whose operations carry the partitioner's factor mapping, `sdy.sharding_rule`."""
    with operation.context:
        copy = operation.clone()
        run_passes(copy, _RULES)
    return copy


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
