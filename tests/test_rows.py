"""Products of few rows: how many there are, in both rungs, and their price."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import CostModel
from autoshard.hlo import parse
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.work import Work
from autoshard.layout import Layout, rules
from autoshard.rows import MANY
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, asked_of, propagator
from tests.programs import shaped

SHARED = dataclasses.replace(CONSTANTS, shared=True)
BY_FOUR = dataclasses.replace(SHARED, least_rows=4.0)
LABELS = ("NHWC", "HWIO", "NHWC")


def convolved(padding: object = "SAME", stride: int = 1, **more: int) -> Callable[..., object]:
    def convolution(x, k):  # type: ignore[no-untyped-def]
        return jax.lax.conv_general_dilated(
            x, k, (stride,) * 2, padding, dimension_numbers=LABELS, **more
        )

    return convolution


def towards_the_kernel(x, k):  # type: ignore[no-untyped-def]
    return jax.grad(lambda k: jnp.sum(jnp.sin(convolved()(x, k))))(k)


def by_hlo(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[float]:
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text() or ""
    module = parse(text)
    works = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    return sorted(w.rows for w in works if w.matmul_flops)


def by_rung_1(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[float]:
    kernels, asked = asked_of(function, *shapes)
    return sorted(asked["rows"][kernels.kernel_contracts].tolist())


def towards_the_weight(x, w):  # type: ignore[no-untyped-def]
    return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)


PROGRAMS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], list[float]]] = {
    "a matrix": (jnp.matmul, [(6, 40), (40, 50)], [6]),
    "tokens of examples": (
        lambda x, w: jnp.einsum("btd,df->btf", x, w),
        [(2, 3, 40), (40, 50)],
        [6],
    ),
    "of each example": (
        lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
        [(8, 3, 40), (8, 40, 50)],
        [3],
    ),
    "a vector": (jnp.matmul, [(40,), (40, 50)], [1]),
    "towards the weight": (lambda x, y: jnp.einsum("bd,bf->df", x, y), [(6, 40), (6, 50)], [40]),
    "towards the weight of a head": (towards_the_weight, [(64, 40), (40, 3)], [40, 64]),
    "of few features": (towards_the_weight, [(64, 3), (3, 40)], [3, 64]),
    "convolution": (convolved(), [(4, 8, 12, 24), (3, 3, 24, 32)], [12]),
    "with a stride": (convolved(stride=2), [(4, 8, 12, 24), (3, 3, 24, 32)], [6]),
    "of all places": (convolved("VALID"), [(4, 8, 8, 24), (8, 8, 24, 32)], [1]),
    "made of few features": (convolved(), [(4, 8, 12, 16), (3, 3, 16, 16)], [MANY]),
    "of few features, made more": (convolved(), [(4, 8, 12, 16), (3, 3, 16, 17)], [12]),
    "of spread data": (
        convolved([(1, 1)] * 2, lhs_dilation=(2, 2)),
        [(4, 8, 8, 24), (3, 3, 24, 32)],
        [MANY],
    ),
    "of less than the kernel": (convolved(), [(4, 2, 2, 24), (3, 3, 24, 32)], [MANY]),
    "towards a kernel of 1 x 1": (towards_the_kernel, [(4, 8, 8, 24), (1, 1, 24, 32)], [1, 8]),
    "towards a kernel of 3 x 3": (towards_the_kernel, [(4, 8, 8, 24), (3, 3, 24, 32)], [3, 8]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_rungs_count_the_rows_of_a_product(name: str) -> None:
    function, shapes, expected = PROGRAMS[name]
    assert by_hlo(function, *shapes) == expected
    assert by_rung_1(function, *shapes) == expected


def test_of_several_products_in_a_kernel_the_one_with_the_most_rows_counts() -> None:
    text = """HloModule m, is_scheduled=true

%f (p: f32[2,40], q: f32[40,50], s: f32[3,40]) -> (f32[2,50], f32[3,50]) {
  %p = f32[2,40]{1,0} parameter(0)
  %q = f32[40,50]{1,0} parameter(1)
  %a = f32[2,50]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[3,40]{1,0} parameter(2)
  %b = f32[3,50]{1,0} dot(%s, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[2,50]{1,0}, f32[3,50]{1,0}) tuple(%a, %b)
}

ENTRY %main (x: f32[2,40], y: f32[40,50], z: f32[3,40]) -> f32[2,50] {
  %x = f32[2,40]{1,0} parameter(0)
  %y = f32[40,50]{1,0} parameter(1)
  %z = f32[3,40]{1,0} parameter(2)
  %g = (f32[2,50]{1,0}, f32[3,50]{1,0}) fusion(%x, %y, %z), kind=kCustom, calls=%f
  %h = f32[2,50]{1,0} get-tuple-element(%g), index=0
  ROOT %r = f32[2,50]{1,0} negate(%h)
}
"""
    module = parse(text)
    works = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    assert [w.rows for w in works] == [3.0, MANY]


def multiplied() -> Workload:
    """Sixteen rows by a matrix."""

    def step(state, x):  # type: ignore[no-untyped-def]
        return state, jnp.sum(jnp.sin(x @ state))

    return Workload(step=step, init=lambda: jnp.zeros((64, 48)), batch=shaped(16, 64))


@pytest.mark.parametrize(
    ("size", "ways", "times"), [(16, 8, 2.0), (16, 4, 1.0), (48, 8, 1.0), (64, 8, 1.0)]
)
def test_rung_1_counts_the_rows_of_one_device(size: int, ways: int, times: float) -> None:
    of = analyse(multiplied())
    (name,) = (axis.name for axis in of.analysis.axes.axes if axis.size == size)
    layout = Layout(mesh=(("x", ways), ("y", 8 // ways)), compute=rules({name: "x"}))
    judged = propagator(of.analysis)
    plain, other = (judged.judge(of.space, layout, CostModel(c)) for c in (SHARED, BY_FOUR))
    alone_s = 8 * 2.0 * 16 * 64 * 48 / ways / SHARED.contract_flops_per_s
    assert other.compute_s - plain.compute_s == pytest.approx((times - 1.0) * alone_s, abs=1e-12)


@pytest.mark.parametrize(("rows", "times"), [(1.0, 4.0), (3.0, 4 / 3), (4.0, 1.0), (MANY, 1.0)])
def test_both_rungs_price_them_alike(rows: float, times: float) -> None:
    work = Work(
        opcode="fusion", name="f", matmul_flops=(("f32", 1e9),), element_flops=1e6, rows=rows
    )
    more = CostModel(BY_FOUR).kernel_s(work) - CostModel(SHARED).kernel_s(work)
    alone_s = SHARED.device_count * 1e9 / SHARED.contract_flops_per_s
    assert more == pytest.approx((times - 1.0) * alone_s)
    flops, one = np.array([1e9]), np.array([1.0])
    few, many = (
        CostModel(c).kernels_s(flops, one, one, ["f32"], rows=np.array([rows]))
        for c in (BY_FOUR, SHARED)
    )
    assert few - many == pytest.approx(more)
