"""Ragged products: Shardy's rule for them, their operations, and what a layout makes of them.

The rules are those that Shardy gives `mhlo.ragged_dot`.
"""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.shardy import factor_rules, ragged, stablehlo
from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.records.layout import Layout, rules
from autoshard.records.trial import Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.target.target import find_target
from tests.analysed import COST
from tests.programs import normal, shaped, train

ROWS, WIDE, OUT, GROUPS = 32, 64, 8, 4


def product(shapes, contracted, dims, groups_shape):  # type: ignore[no-untyped-def]
    """Rule, and operations on TPUs and GPUs, of the one `chlo.ragged_dot` of a function."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, dims["batch"]),
        lhs_ragged_dimensions=[dims["ragged"]],
        rhs_group_dimensions=dims["groups"],
    )
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    arguments.append(jax.ShapeDtypeStruct(groups_shape, jnp.int32))
    lowered = (
        jax.jit(lambda x, w, g: jax.lax.ragged_dot_general(x, w, g, numbers))
        .trace(*arguments)
        .lower(lowering_platforms=("tpu",))
    )
    module = lowered.compiler_ir("stablehlo").operation
    with module.context:
        factor_rules.give_rules(module)
    (op,) = (
        o
        for o in stablehlo.walk(stablehlo.main_function(module).regions[0].blocks[0])
        if o.name == stablehlo.RAGGED_DOT
    )
    flops = [ragged.ragged_flops(op, platform) for platform in ("tpu", "cuda")]
    return str(op.attributes["sdy.sharding_rule"]), flops


CASES = {
    "rows": (
        [(16, ROWS, WIDE), (GROUPS, 16, WIDE, OUT)], ([2], [2]),
        {"batch": ([0], [1]), "ragged": 1, "groups": [0]}, (16, GROUPS),
        "([i, j, k], [l, i, k, m], [i, l])->([i, j, m])", "reduction={k} need_replication={j, l}",
        16 * ROWS * WIDE * OUT, GROUPS,
    ),
    "contracted": (
        [(16, ROWS, WIDE), (16, WIDE, OUT)], ([2], [1]),
        {"batch": ([0], [0]), "ragged": 2, "groups": []}, (16, GROUPS),
        "([i, j, k], [i, k, m], [i, l])->([l, i, j, m])", "need_replication={k, l}",
        GROUPS * 16 * ROWS * WIDE * OUT, 1,
    ),
    "batch": (
        [(16, ROWS, WIDE), (16, WIDE, OUT)], ([2], [1]),
        {"batch": ([0], [0]), "ragged": 0, "groups": []}, (GROUPS,),
        "([i, j, k], [i, k, m], [l])->([i, j, m])", "reduction={k} need_replication={i, l}",
        16 * ROWS * WIDE * OUT, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", list(CASES))
def test_the_three_modes_shard_and_compute_as_the_compilers_have_it(mode: str) -> None:
    shapes, contracted, dims, groups, mapping, named, products, masked = CASES[mode]
    rule, flops = product(shapes, contracted, dims, groups)
    assert mapping in rule and f"}} {named}, custom" in rule
    assert flops == [2 * products, 2 * products * masked]


def routed():  # type: ignore[no-untyped-def]
    """Rows in groups, each through the two matrices of its group; what is sorted stays in place."""
    groups, wide, out = 4, 64, 128

    def loss(params, batch):  # type: ignore[no-untyped-def]
        sizes = jnp.full((groups,), batch["x"].shape[0] // groups, jnp.int32)
        hidden = jnp.tanh(jax.lax.ragged_dot(batch["x"], params["up"], sizes))
        found = jax.lax.ragged_dot(hidden, params["down"], sizes)
        return jnp.mean((found - batch["x"]) ** 2)

    def init():  # type: ignore[no-untyped-def]
        return {"up": normal(0, groups, wide, out), "down": normal(1, groups, out, wide)}

    return train(loss, init, {"x": shaped(256, wide)})


def sent(estimate: Estimate) -> set[str]:
    """Kinds of the collectives that send more than numbers."""
    return {c.kind for c in estimate.collectives if c.bytes > 64}


def test_what_a_ragged_product_ties_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.target.target.require_compiler", str)  # nothing is compiled
    of = make_problem(trace(routed()), find_target("v5e:2x4"), "free", None)
    analysis = of.analysis
    where = {a.name: set(a.where) for a in analysis.axes.axes}
    assert not analysis.axes.opaque
    rows = next(a for a in analysis.axes.axes if a.is_batch)
    (wide,) = [n for n, w in where.items() if {"state['up'][1]", "state['down'][2]"} <= w]
    (out,) = [n for n, w in where.items() if {"state['up'][2]", "state['down'][1]"} <= w]
    assert {a.name for a in analysis.axes.axes if a.is_contracted} >= {wide, out}

    def judged(layout: Layout) -> Estimate:
        outcome = Propagator(analysis).judge(of.space, layout, COST)
        assert isinstance(outcome, Estimate)
        return outcome

    alone = judged(Layout(mesh=(("x", 8),)))
    by_rows = judged(Layout(mesh=(("x", 8),), activation_rules=rules({rows.name: "x"})))
    by_out = judged(
        Layout(mesh=(("x", 8),), activation_rules=rules({out: "x"}), state_rules=rules({out: "x"}))
    )
    products = 256 * 64 * 128 * 2
    assert alone.flops == pytest.approx(products * (3 + 2 * 4), rel=0.05)  # two are of gradients
    assert by_rows.flops == pytest.approx(alone.flops, rel=0.05)
    assert by_out.flops == pytest.approx(alone.flops / 8, rel=0.05)
    assert sent(by_rows) == {"all_gather"}  # no device has rows of its own
    assert sent(by_out) == {"all_reduce"}
