"""The partitioner in process: inlining, one mesh, tags, rules, and what a judged module says."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.shardy import factor_rules, flattening, partitioner, shardings, stablehlo
from tests.analysed import subject

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def lowered(function, *shapes: jax.ShapeDtypeStruct) -> stablehlo.Operation:  # type: ignore[no-untyped-def]
    return flattening.flatten(
        stablehlo.lower_abstract(jax.make_jaxpr(function)(*shapes), shapes, "cpu")
    )


def names(module: stablehlo.Operation) -> list[str]:
    return [o.name for o in stablehlo.walk(stablehlo.main_function(module).regions[0].blocks[0])]


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("tensor<8x4xbf16>", (8, 4), 16),
        ("tensor<f32>", (), 32),
        ("tensor<3xi1>", (3,), 8),
        ("tensor<2x2xcomplex<f32>>", (2, 2), 64),
        ("tensor<4xui32>", (4,), 32),
        ("tensor<0x4xf32>", (0, 4), 32),
        ("tensor<8xf8E4M3FN>", (8,), 8),
        ("!stablehlo.token", (0,), 0),
    ],
)
def test_shapes_of_printed_types(text: str, shape: tuple[int, ...], bits: int) -> None:
    assert stablehlo.shape_and_bits(text) == (shape, bits)


def test_printed_shardings() -> None:
    assert shardings.parse_sharding('#sdy.sharding<@mesh, [{"x", "y"}, {}]>') == (("x", "y"), ())
    assert shardings.parse_sharding('#sdy.sharding<@mesh, [{"x":(1)4}, {?}]>') == (
        ('"x":(1)4',),
        (),
    )
    assert shardings.parse_sharding('#sdy.sharding<@mesh, [{"x"}], replicated={"y"}>') == (("x",),)
    assert (
        shardings.sharding_text(((("x",), True), ((), True), ((), False)))
        == '#sdy.sharding<@mesh, [{"x", ?}, {?}, {}]>'
    )


def test_calls_are_inlined_inside_loops_and_branches_too() -> None:
    @jax.jit
    def inner(x):
        return jnp.tanh(x)

    @jax.jit
    def outer(x):
        return inner(inner(x)) * 2.0

    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (outer(c), None), x, None, length=3)
        return jax.lax.cond(jnp.sum(y) > 0, outer, inner, y)

    module = lowered(f, X)
    assert "func.call" not in names(module)
    assert names(module).count("stablehlo.tanh") == 5
    functions = [o for o in module.regions[0].blocks[0].operations if "func" in o.operation.name]
    assert len(functions) == 1
    assert module.verify()


def test_there_is_always_exactly_one_mesh() -> None:
    for function, shape in [
        (lambda x: x + 1.0, X),
        (lambda k: jax.random.split(k), jax.eval_shape(lambda: jax.random.key(0))),
    ]:
        module = lowered(function, shape)
        meshes = [
            o.operation
            for o in module.regions[0].blocks[0].operations
            if o.operation.name == "sdy.mesh" and '"=' in str(o.operation.attributes["mesh"])
        ]
        assert len(meshes) == 1
        assert "sdy.sharding_constraint" not in names(module)


def test_two_meshes_are_an_error_and_not_the_end_of_the_process() -> None:
    def f(x):
        for axis in ("a", "b"):
            sharding = jaxprs.open_sharding(2, [(axis, 4)])
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    with pytest.raises(ValueError, match="several meshes"):
        lowered(f, X)


@pytest.mark.parametrize(
    "function",
    [jax.lax.erf, jnp.square, jax.lax.erf_inv, jnp.sinh, lambda x: jax.lax.top_k(x, 2)],
    ids=["erf", "square", "erf_inv", "sinh", "top_k"],
)
def test_chlo_operations_have_rules(function) -> None:  # type: ignore[no-untyped-def]
    module = factor_rules.with_rules(lowered(function, X))
    operations = list(stablehlo.walk(stablehlo.main_function(module).regions[0].blocks[0]))
    assert any(op.name.startswith("chlo.") for op in operations), "another is to be asked"
    for op in operations:
        if op.name.startswith(("chlo.", "stablehlo.")) and op.name != "stablehlo.constant":
            rule = factor_rules.factors_of(op)
            assert rule is not None, op.name
            assert rule.operands[0][0] == rule.results[0][0] == [0]
            if op.name == "chlo.top_k":
                assert rule.operands[0][1] != rule.results[0][1] == rule.results[1][1]


@pytest.mark.parametrize(
    ("function", "given", "wanted", "sends"),
    [
        (jax.lax.erf, ("x", ""), ("", "x"), {"all_to_all"}),
        (jax.lax.erf, ("x", ""), ("x", ""), set()),
        (lambda x: jax.lax.top_k(x, 2)[0], ("", "x"), ("", ""), {"all_gather"}),
    ],
    ids=["erf that moves", "erf in place", "top_k of what is divided"],
)
def test_chlo_operations_are_resharded_as_others(function, given, wanted, sends) -> None:  # type: ignore[no-untyped-def]
    module = lowered(function, X)
    stablehlo.tag(module)
    inputs, outputs = (
        [tuple(((axis,) if axis else (), False) for axis in dims)] for dims in (given, wanted)
    )
    attributes = shardings.Attributes(module.context)
    judged = partitioner.judge(module, [("x", 8)], inputs, outputs, {}, {}, attributes)
    assert {c.kind for c in judged.communication} == sends


def tags(module: stablehlo.Operation) -> dict[int, str]:
    return {
        o.attributes[stablehlo.TAG].value: o.name
        for o in stablehlo.walk(stablehlo.main_function(module).regions[0].blocks[0])
        if stablehlo.TAG in o.attributes
    }


def test_tags_survive_propagation() -> None:
    module = subject("scanned_mlp").analysis.module
    before = tags(module)
    assert sorted(before) == list(range(len(before)))
    copy = module.clone()
    with module.context:
        partitioner.propagate(copy, {}, shardings.Attributes(module.context), set(before.values()))
    after = tags(copy)
    lost = {before[t] for t in before.keys() - after.keys()}
    # Constraints have done their work; constant expressions are copied to each use.
    assert lost <= {
        "sdy.sharding_constraint",
        "stablehlo.constant",
        "stablehlo.broadcast_in_dim",
        "stablehlo.iota",
    }
    kept = {t: name for t, name in after.items() if "constant" not in name}
    assert kept == {t: before[t] for t in kept}


def test_equal_programs_have_equal_bytecode_whatever_their_lines() -> None:
    def one(x):
        return jnp.tanh(x)

    def two(x):
        return jnp.tanh(x)

    first, second = (lowered(f, X) for f in (one, two))
    assert stablehlo.bytecode(first) == stablehlo.bytecode(second)
    assert stablehlo.bytecode(first) != stablehlo.bytecode(lowered(lambda x: jnp.tanh(x) + 1.0, X))
