"""How each operation shards: Shardy's factor mappings, and those that it lacks."""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from autoshard.compat.stablehlo import (
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
