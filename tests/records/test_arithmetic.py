"""Both rungs count an algorithm alike, and as its formula has it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.rungs.compile import hlo
from autoshard.rungs.propagate import Propagator
from autoshard.target import target as target_module
from autoshard.target.target import find_target
from autoshard.workload import Workload
from tests.analysed import propagator_of
from tests.programs import shaped


def by_rung_1(rung: Propagator) -> float:
    return float(np.dot(rung.kernels.flops, rung.kernels.trips))


def by_rung_2(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    compiled = jax.jit(function).lower(*(shaped(*shape) for shape in shapes)).compile()
    return hlo.count(hlo.parse(compiled.as_text()), ()).flops


def complex_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.real(jax.lax.complex(x, x) @ jax.lax.complex(y, y))


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x: jnp.real(jnp.fft.fft(x)), [(32, 4096)], 5 * 32 * 4096 * 12),
        (lambda x: jnp.real(jnp.fft.rfft(x)), [(32, 4096)], 5 * 32 * 2049 * 12),
        (complex_product, [(64, 256), (256, 128)], 8 * 64 * 256 * 128),
        (lambda x: jnp.sort(x, axis=0), [(1024, 64)], 1024 * 64 * 10),
        (lambda x, y: jax.lax.sort((x, y), num_keys=1), [(64, 1024)] * 2, 1024 * 64 * 10),
    ],
)
def test_an_algorithm_counts_the_same_for_both_rungs(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: float
) -> None:
    assert by_rung_1(propagator_of(function, *shapes)) == pytest.approx(expected, rel=0.2)
    assert by_rung_2(function, *shapes) == pytest.approx(expected, rel=0.2)


def test_the_gradient_of_a_pooling_looks_at_every_window() -> None:
    def pooled(x: jax.Array) -> jax.Array:
        window, strides = (1, 4, 4, 1), (1, 2, 2, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(pooled(x)))(x)

    windows = 2 * 15 * 15 * 3
    found = by_rung_1(propagator_of(gradient, (2, 32, 32, 3)))
    assert 1.0 <= found / (16 * windows) < 1.5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (jax.lax.linalg.cholesky, 4 * 64**3 / 3),
        (lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True), 4 * 64**3),
    ],
)
def test_factors_and_solutions_where_the_compiler_is_told_of_them(
    function: Callable[..., Any], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs and GPUs a library is called, of which only the memory traffic is known."""
    monkeypatch.setattr(target_module, "require_compiler", lambda platform: "")
    workload = Workload(
        step=lambda state, batch: (function(batch), jnp.float32(0)),
        init=lambda: jnp.zeros((4, 64, 64)),
        batch=shaped(4, 64, 64),
    )
    one = make_problem(trace(workload, (), False), find_target("v5e:2x4"), "free", None)
    assert by_rung_1(Propagator(one.analysis)) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("name", ["cosh", "sinh", "acosh", "asinh", "acos", "asin", "atanh"])
def test_rung_2_counts_inverse_and_hyperbolic_functions(name: str) -> None:
    """As newer compilers write them, of one operation."""
    text = f"""HloModule m, is_scheduled=true

ENTRY %e (x: f32[64,32]) -> f32[64,32] {{
  %x = f32[64,32]{{1,0}} parameter(0)
  ROOT %r = f32[64,32]{{1,0}} {name}(%x)
}}
"""
    found = hlo.count(hlo.parse(text), ())
    assert found.flops == found.transcendentals == 64 * 32
