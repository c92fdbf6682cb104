"""Jaxprs as data."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.jaxpr import jaxprs
from tests import programs

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def flat(name: str) -> jaxprs.ClosedJaxpr:
    workload = programs.EVERY[name]()
    return jax.make_jaxpr(workload.step)(jax.eval_shape(workload.init), workload.batch)


def primitives(closed: jaxprs.ClosedJaxpr) -> collections.Counter[str]:
    return collections.Counter(e.primitive.name for e in jaxprs.equations(closed.jaxpr))


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_rewriting_with_nothing_to_change_gives_the_same_equations(name: str) -> None:
    for eqn in jaxprs.equations(flat(name).jaxpr):
        assert jaxprs.with_inner(eqn, lambda jaxpr: jaxpr, {}) is eqn


def test_equations_are_found_in_every_kind_of_inner_jaxpr() -> None:
    @jax.custom_vjp
    def custom(x):
        return jnp.sin(x)

    custom.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))

    def f(x):
        x = jax.jit(lambda x: jnp.exp(x))(x)
        x = jax.checkpoint(lambda x: jnp.tanh(x))(x)
        x = custom(x)
        x, _ = jax.lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=2)
        x = jax.lax.while_loop(lambda c: jnp.sum(c) > 0, lambda c: jnp.log(c), x)
        return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.sqrt(x), lambda x: x, x)

    found = primitives(jax.make_jaxpr(f)(X))
    for name in ("exp", "tanh", "sin", "cos", "log", "sqrt"):
        assert found[name] == 1, name


def test_scan_carries_pair_operands_with_results() -> None:
    def f(a, b, xs):
        def body(carry, x):
            p, q = carry
            return (p + x * a, q * 2.0), p

        return jax.lax.scan(body, (a, b), xs)

    closed = jax.make_jaxpr(f)(jnp.ones(3), jnp.ones((2, 2)), jnp.ones((5, 3)))
    (scan,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    pairs = jaxprs.scan_carries(scan)
    assert len(pairs) == 2
    for out, into in pairs:
        assert scan.outvars[out].aval.shape == scan.invars[into].aval.shape
    assert [scan.outvars[o].aval.shape for o, _ in pairs] == [(3,), (2, 2)]


def test_a_constraint_takes_the_place_and_line_of_another_equation() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.tanh(x))(X)
    (tanh,) = closed.jaxpr.eqns
    target = jaxprs.fresh(tanh.outvars[0])
    eqn = jaxprs.constraint_equation(
        tanh.outvars[0], target, jaxprs.open_sharding(2), "a_tag", tanh
    )
    assert eqn.primitive.name == "sharding_constraint" and eqn.outvars == [target]
    assert jaxprs.source_line(eqn) == jaxprs.source_line(tanh) != ""
    assert "test_jaxprs.py" in jaxprs.source_line(eqn)
    assert "a_tag" in str(eqn.source_info.name_stack)


def test_shardings_of_nested_jits_are_found_moved_and_removed() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = NamedSharding(mesh, P("data"))
    closed = jax.make_jaxpr(jax.jit(lambda x: x * 2.0, in_shardings=over))(X)
    (eqn,) = closed.jaxpr.eqns
    assert jaxprs.has_shardings(eqn) == [over]
    assert jaxprs.has_shardings(jaxprs.without_shardings(eqn)) == []
    other = NamedSharding(mesh, P())
    moved = jaxprs.moved_shardings(eqn, lambda s: other if s == over else s)
    assert jaxprs.has_shardings(moved) == [other]


def test_meshes_of_ours_are_auto() -> None:
    mesh = jaxprs.abstract_mesh([("x", 2), ("y", 4)])
    assert mesh.axis_names == ("x", "y") and mesh.axis_sizes == (2, 4)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
