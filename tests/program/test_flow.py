"""What is storage and what is compute, on steps small enough to say which is which."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.jaxpr import jaxprs
from autoshard.program.flow import BATCH, STATE, Flow, into_products

W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)


def traced(step: Callable) -> tuple[jaxprs.ClosedJaxpr, Flow]:
    """`step(w, x) -> (new w, metric)`."""
    closed = jax.make_jaxpr(step)(W, X)
    return closed, Flow(closed, 1, 1)


def results(closed: jaxprs.ClosedJaxpr, primitive: str) -> list[jaxprs.Var]:
    return [e.outvars[0] for e in jaxprs.equations(closed.jaxpr) if e.primitive.name == primitive]


def test_activations_are_compute_and_gradients_are_storage() -> None:
    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * g, loss

    closed, flow = traced(step)
    forward, backward = results(closed, "dot_general")
    assert not flow.storage(forward) and flow.of(forward) == STATE | BATCH
    assert flow.storage(backward)
    assert flow.storage(closed.jaxpr.invars[0]) and not flow.storage(closed.jaxpr.invars[1])
    assert flow.state_only(closed.jaxpr.invars[0]) and not flow.state_only(forward)


def test_optimizer_arithmetic_is_storage_and_its_norm_is_not() -> None:
    def step(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        norm = jnp.sqrt(jnp.sum(g**2))
        return w - 0.1 * jnp.tanh(g) / (1 + norm), norm

    closed, flow = traced(step)
    assert all(flow.storage(v) for v in results(closed, "tanh"))
    assert not any(flow.storage(v) for v in results(closed, "sqrt"))


def test_gradients_accumulated_in_a_loop_are_storage() -> None:
    def step(w, x):
        def add(total, part):
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w)))(w), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(w), x.reshape(4, 4, 8))
        return w - total, jnp.sum(total)

    closed, flow = traced(step)
    (scan,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert flow.storage(scan.outvars[0])
    body = jaxprs.open_jaxpr(scan.params["jaxpr"])
    assert flow.storage(body.outvars[0])
    assert not any(flow.storage(v) for v in results(closed, "tanh"))


def test_hidden_state_carried_in_a_loop_is_compute() -> None:
    def step(w, x):
        def loss(w):
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
            return jnp.mean(h)

        return w - jax.grad(loss)(w), jnp.zeros(())

    closed, flow = traced(step)
    assert results(closed, "tanh")
    assert not any(flow.storage(v) for v in results(closed, "tanh"))


def test_a_cast_parameter_is_storage_and_its_product_is_not() -> None:
    def step(w, x):
        y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return w, jnp.sum(y)

    closed, flow = traced(step)
    casts = results(closed, "convert_element_type")
    assert {bool(flow.storage(v)) for v in casts if v.aval.shape == (8, 8)} == {True}
    assert not flow.storage(results(closed, "dot_general")[0])


def test_what_comes_from_the_state_alone_is_storage_even_through_a_product() -> None:
    closed, flow = traced(lambda w, x: (w, jnp.sum(jnp.sin(w.T @ w)) + jnp.sum(x)))
    (gram,) = results(closed, "dot_general")
    assert flow.of(gram) & BATCH == 0 and flow.storage(gram)


@pytest.mark.parametrize("how", ["add", "subtract", "multiply", "set", "min", "max"])
def test_what_is_scattered_into_does_not_make_the_rows_storage(how: str) -> None:
    """Not those of the same size either, whichever way they come in."""

    def step(w, x):
        rows = jnp.sin(x[:8])  # as many as the state has
        return getattr(w.at[jnp.int32(x[:8, 0])], how)(rows), jnp.zeros(())

    closed, flow = traced(step)
    assert not any(flow.storage(v) for v in results(closed, "sin"))


def test_values_inside_a_cond_and_a_nested_jit_are_told_apart() -> None:
    @jax.jit
    def update(w, g):
        return jax.lax.cond(jnp.sum(w) > 0, lambda: w - jnp.sin(g), lambda: w)

    def step(w, x):
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        return update(w, g), jnp.zeros(())

    closed, flow = traced(step)
    assert results(closed, "sin")
    assert all(flow.storage(v) for v in results(closed, "sin"))
    assert not any(flow.storage(v) for v in results(closed, "tanh"))


@pytest.mark.parametrize("state_first", [True, False])
def test_calls_of_one_function_are_told_apart_by_what_they_are_given(state_first) -> None:
    """As `jax.nn.silu` of a parameter and of an activation that is as large."""
    call = jax.jit(lambda v: jnp.tanh(v) * 2)

    def step(w, x):
        x = x[:8]
        kept = call(w) if state_first else None
        hidden = call(x)
        kept = call(w) if kept is None else kept
        return w + 0.1 * kept, (jnp.sin(hidden), jnp.cos(kept))

    closed, flow = traced(step)
    calls = [e for e in closed.jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    of_state, of_batch = calls if state_first else calls[::-1]
    assert of_state.params["jaxpr"] is of_batch.params["jaxpr"]
    assert flow.of(of_state.outvars[0]) & (STATE | BATCH) == STATE
    assert flow.of(of_batch.outvars[0]) & (STATE | BATCH) == BATCH
    assert not flow.storage(of_batch.outvars[0]) and flow.storage(of_state.outvars[0])
    assert not any(flow.storage(v) for v in results(closed, "sin"))
    assert all(flow.storage(v) for v in results(closed, "cos"))


def test_parameters_are_used_and_moments_and_decay_are_not() -> None:
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w.astype(jnp.bfloat16))[0])

    def step(w, moment, x):
        moment = 0.9 * moment + jax.grad(loss)(w, x.astype(jnp.bfloat16))
        norm = jnp.sqrt(jnp.sum(moment**2) + jnp.sum(jnp.sin(w) ** 2))
        return w - jnp.tanh(moment) / norm - jnp.cos(w), moment, norm

    stacked = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    closed = jax.make_jaxpr(step)(stacked, stacked, X)
    flow = Flow(closed, 2, 2)
    parameter, moment, _ = closed.jaxpr.invars
    assert flow.used(parameter) and not flow.used(moment)
    casts = [v for v in results(closed, "convert_element_type") if v.aval.shape == (3, 8, 8)]
    assert {flow.used(v) for v in casts if flow.state_only(v)} == {True}
    assert not any(flow.used(v) for v in [*results(closed, "sin"), *results(closed, "cos")])
    scans = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    slices = [
        v
        for scan in scans
        for v in jaxprs.open_jaxpr(scan.params["jaxpr"]).invars
        if getattr(v.aval, "shape", None) == (8, 8) and flow.state_only(v)
    ]
    assert slices and all(flow.used(v) for v in slices)


def test_what_becomes_an_operand_of_a_product_as_it_is_or_rearranged() -> None:
    @jax.jit
    def inner(a, b):
        return jnp.einsum("ij,kj->ik", a, b)

    def looped(x, w):
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0]

    cases = {
        "as it is": (lambda x, w: x @ w, [True, True]),
        "rearranged": (
            lambda x, w: x.reshape(4, 16).T.reshape(8, 8).astype("bfloat16") @ w,
            [True, True],
        ),
        "computed with": (lambda x, w: jnp.tanh(x) @ w, [False, True]),
        "added to": (lambda x, w: x + w, [False, False]),
        "in a function of its own": (inner, [True, True]),
        "in a loop": (looped, [True, True]),
    }
    for name, (function, expected) in cases.items():
        jaxpr = jax.make_jaxpr(function)(jnp.zeros((8, 8)), jnp.zeros((8, 8))).jaxpr
        found = into_products(jaxpr, [False] * len(jaxpr.outvars))
        assert found == expected, name
    jaxpr = jax.make_jaxpr(lambda x, w: (x.T, w + 1.0))(jnp.zeros((8, 8)), jnp.zeros((8, 8))).jaxpr
    assert into_products(jaxpr, [True, True]) == [True, False]
    assert into_products(jaxpr, [False, True]) == [False, False]
