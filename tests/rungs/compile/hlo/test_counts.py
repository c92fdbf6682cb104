"""Whole programs: loops, branches, rematerialisation, and what is not modelled."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.rungs.compile.hlo import count, parse

N = 32
PRODUCT = 2 * N**3
X = jax.ShapeDtypeStruct((N, N), jnp.float32)


def weights(*lengths):
    return jax.ShapeDtypeStruct((*lengths, N, N), jnp.float32)


def layer(c, w):
    return jnp.tanh(c @ w), None


def test_a_scan_counts_its_trips(compile_hlo):
    counts = count(compile_hlo(lambda x, w: jax.lax.scan(layer, x, w)[0], X, weights(7)), ())
    assert counts.matmul_flops == 7 * PRODUCT
    assert counts.transcendentals == 7 * N * N
    assert counts.flops < 7.2 * (PRODUCT + N * N)
    assert counts.assumptions == counts.unmodelled == ()
    # a product, a tanh and the loop's own bookkeeping an iteration
    assert 2 * 7 <= counts.op_count <= 10 * 7


def test_nested_loops_multiply(compile_hlo):
    def outer(x, w):
        def step(c, w):
            return jax.lax.fori_loop(0, 4, lambda i, c: jnp.sin(c @ w), c), None

        return jax.lax.scan(step, x, w)[0]

    assert count(compile_hlo(outer, X, weights(3)), ()).matmul_flops == 3 * 4 * PRODUCT


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 40))
def test_a_fori_loop_counts_as_its_unrolled_self(trips):
    def f(x, w):
        return jax.lax.fori_loop(0, trips, lambda i, c: jnp.sin(c @ w), x)

    module = parse(jax.jit(f).lower(X, X).compile().as_text())
    assert count(module, ()).matmul_flops == trips * PRODUCT


def test_a_gradient_through_a_scan_and_what_remat_adds(compile_hlo):
    def loss(body):
        return jax.grad(lambda w, x: jax.lax.scan(body, x, w)[0].sum())

    plain = count(compile_hlo(loss(layer), weights(5), X), ())
    remat = count(compile_hlo(loss(jax.checkpoint(layer)), weights(5), X), ())
    assert plain.matmul_flops == 5 * 3 * PRODUCT
    assert remat.matmul_flops == 5 * 4 * PRODUCT


def test_a_conditional_counts_its_largest_branch_and_says_so(compile_hlo):
    small, large = (lambda x: x + 1), (lambda x: jnp.sin(x @ x) @ x)
    for branches in [(small, large), (large, small)]:
        p = jax.ShapeDtypeStruct((), jnp.bool_)
        counts = count(compile_hlo(lambda p, x: jax.lax.cond(p, *branches, x), p, X), ())  # noqa: B023
        assert counts.matmul_flops == 2 * PRODUCT
        (said,) = counts.assumptions
        assert said.startswith("conditional %") and said.endswith("largest of 2 branches taken")


def test_an_unknown_trip_count_is_one_and_said_so(compile_hlo):
    def f(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jnp.sin(c @ c), x)

    counts = count(compile_hlo(f, X), ())
    assert counts.matmul_flops == PRODUCT
    (said,) = counts.assumptions
    assert said.startswith("while %") and "trip count unknown" in said


def test_a_call_that_cannot_be_costed_is_named_with_its_executions(compile_hlo):
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.linalg.cholesky(x) + x, x)

    counts = count(compile_hlo(step, X), ())
    assert counts.unmodelled == (("lapack_spotrf_ffi", 3),)


def test_dtypes_of_products_are_told_apart():
    module = parse("""\
HloModule m, is_scheduled=true

%fused (a: bf16[8,8], b: f32[4,4]) -> (f32[8,8], f32[4,4]) {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  %c = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[4,4]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[8,8]{1,0}, f32[4,4]{1,0}) tuple(%c, %d)
}

ENTRY %e (a: bf16[8,8], b: f32[4,4]) -> (f32[8,8], f32[4,4]) {
  %a.1 = bf16[8,8]{1,0} parameter(0)
  %b.1 = f32[4,4]{1,0} parameter(1)
  ROOT %f = (f32[8,8]{1,0}, f32[4,4]{1,0}) fusion(%a.1, %b.1), kind=kCustom, calls=%fused
}
""")
    counts = count(module, ())
    assert counts.matmul_flops_by_dtype == (("bf16", 1024.0), ("f32", 128.0))
    assert counts.op_count == 1
    assert counts.bytes_accessed == 64 * 2 + 16 * 4 + 64 * 4 + 16 * 4


CALL = """\
HloModule m, is_scheduled=true

%fused (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  ROOT %n = f32[8,8]{{1,0}} negate(%a)
}}

%parallel (b: f32[8,8]) -> f32[8,8] {{
  %b = f32[8,8]{{1,0}} parameter(0)
  ROOT %f = f32[8,8]{{1,0}} fusion(%b), kind=kLoop, calls=%fused
}}{thread}

ENTRY %e (c: f32[8,8]) -> f32[8,8] {{
  %c = f32[8,8]{{1,0}} parameter(0)
{lines}
}}
"""


@pytest.mark.parametrize(
    ("lines", "thread"),
    [
        ("  ROOT %r = f32[8,8]{1,0} call(%c), to_apply=%parallel", ""),
        ("  ROOT %r = f32[8,8]{1,0} fusion(%c), kind=kLoop, calls=%fused", ""),
        (("  %s = ((f32[8,8]{1,0}), f32[8,8]{1,0}, s32[]) async-start(%c), calls=%parallel\n"
         "  ROOT %r = f32[8,8]{1,0} async-done(%s), calls=%parallel"),
         ', execution_thread="parallel"'),
        (("  %s = ((f32[8,8]{1,0}), f32[8,8]{1,0}, s32[]) fusion-start(%c), kind=kLoop, "
         "calls=%fused\n  ROOT %r = f32[8,8]{1,0} fusion-done(%s)"), ""),
    ],
)  # fmt: skip
def test_calls_and_wrappers_cost_what_they_call(lines, thread):
    counts = count(parse(CALL.format(lines=lines, thread=thread)), ())
    assert (counts.flops, counts.bytes_accessed, counts.op_count) == (64, 512, 1)


def test_free_instructions_launch_nothing(compile_hlo):
    counts = count(compile_hlo(lambda x: (x.reshape(N * N), x), X), ())
    assert counts.flops == 0
    # at most the copies of the results remain
    assert counts.op_count <= 2
