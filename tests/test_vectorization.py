"""Loops that do their arithmetic element by element: which ones, in both rungs, and their price."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import CostModel
from autoshard.hlo import parse
from autoshard.hlo.loops import most_parts, vectorizes
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.work import Work
from autoshard.host import cores
from autoshard.layout import Layout, rules
from autoshard.vectorization import PART_BYTES, is_vectorized
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, kernels_of, propagator
from tests.programs import shaped

SHARED = dataclasses.replace(CONSTANTS, shared=True, loop_parts=2)
SLOW = dataclasses.replace(SHARED, unvectorized_flops_per_s=SHARED.element_flops_per_s / 50)

FUSED = """HloModule m, is_scheduled=true

%f (p: {made}) -> {made} {{
  %p = {made} parameter(0)
  ROOT %r = {made} sqrt(%p)
}}

ENTRY %main (x: {made}) -> {made} {{
  %x = {made} parameter(0)
  ROOT %fusion = {made} fusion(%x), kind=kLoop, calls=%f{said}
}}
"""


@pytest.mark.parametrize(
    ("shape", "parts", "vectorized"),
    [
        ((79152, 8), 2, True),
        ((79151, 8), 2, False),
        ((79151, 8), 4, True),  # four unequal parts are vectorized
        ((79151, 8), 1, True),
        ((79151,), 2, False),
        ((79151, 16, 1), 2, False),
        ((79151, 24), 2, True),
        ((3, 79151), 2, True),
        ((79152, 2, 8), 2, False),  # two inner loops, whatever the parts
        ((79152, 2, 8), 8, False),
        ((79152, 3, 8), 2, False),
        ((79151, 1, 24), 2, True),
        ((1, 79151, 8), 2, False),  # what is of one element is no loop
        ((1, 79152, 2, 8), 2, False),
        ((79152, 4, 8), 2, True),
        ((79152, 1, 8), 2, True),
    ],
)
def test_short_rows_are_not_vectorized_in_unequal_halves_or_in_two_loops(
    shape: tuple[int, ...], parts: int, vectorized: bool
) -> None:
    assert is_vectorized(np.array([shape]), np.array([parts])) == [vectorized]
    dims = ",".join(map(str, shape))
    told = f', backend_config={{"outer_dimension_partitions":["{parts}"]}}'
    text = FUSED.format(made=f"f32[{dims}]", said=told if parts > 1 else "")
    module = parse(text)
    assert vectorizes(module.find("main").root) == vectorized
    (work,) = (s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch))
    assert work.element_flops == math.prod(shape)
    assert work.unvectorized_flops == (0 if vectorized else work.element_flops)


def test_the_outermost_dimension_is_that_of_the_layout() -> None:
    told = ', backend_config={"outer_dimension_partitions":["2"]}'
    for made, vectorized in (("f32[8,79151]{0,1}", False), ("f32[8,79151]{1,0}", True)):
        module = parse(FUSED.format(made=made, said=told))
        assert vectorizes(module.find("main").root) == vectorized


def test_the_compiler_says_how_many_parts_a_large_loop_has() -> None:
    def parts(rows: int) -> int:
        made = jax.jit(lambda x: jnp.sqrt(x) + 1.0).lower(shaped(rows, 256)).compile()
        return most_parts(parse(made.as_text() or ""))

    assert parts(8) == 1
    enough = 4 * PART_BYTES // (2 * 4 * 256)
    assert (parts(enough) > 1) == (cores() > 1), "one core shares with none"


def test_a_sum_is_no_loop_over_what_it_writes() -> None:
    told = ', backend_config={"outer_dimension_partitions":["2"]}'
    text = FUSED.format(made="f32[79151]", said=told).replace(
        "%p = f32[79151] parameter(0)",
        """%q = f32[79151] parameter(0)
  %w = f32[79151,64] broadcast(%q), dimensions={0}
  %zero = f32[] constant(0)
  %p = f32[79151] reduce(%w, %zero), dimensions={1}, to_apply=%add""",
    )
    add = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%f ("""
    module = parse(text.replace("%f (", add, 1))
    (work,) = (s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch))
    assert work.element_flops > 64 * 79151 - 79151 and work.unvectorized_flops == 0
    assert not vectorizes(module.find("main").root)


def table(*shape: int) -> Workload:
    """An AdaGrad step of a table whose gradient is given."""

    def step(state, gradient):  # type: ignore[no-untyped-def]
        square = state["square"] + gradient * gradient
        moved = state["table"] - 0.01 * jax.lax.rsqrt(square + 1e-7) * gradient
        return {"table": moved, "square": square}, {}

    def init():  # type: ignore[no-untyped-def]
        return {name: jnp.zeros(shape) for name in ("table", "square")}

    return Workload(step=step, init=init, batch=shaped(*shape))


@pytest.mark.parametrize(
    ("shape", "axis", "slow"),
    [
        ((80002, 8), 0, True),  # 40001 rows on each of two devices
        ((80002, 8), 1, False),  # all 80002 of half the width
        ((80004, 8), 0, False),
        ((80002, 64), 0, False),
        ((802, 8), 0, False),  # too small to be divided into parts
        ((80004, 2, 8), 0, True),  # two inner loops
        ((80004, 2, 8), 1, False),  # one of them is divided: one left
        ((2, 80001, 8), 0, True),  # 80001 rows are the outermost loop that is left
    ],
)
def test_rung_1_looks_at_the_rows_of_one_device(
    shape: tuple[int, ...], axis: int, slow: bool
) -> None:
    of = analyse(table(*shape))
    name = of.analysis.axes.axes[axis].name
    layout = Layout(mesh=(("x", 2),), compute=rules({name: "x"}))
    judged = propagator(of.analysis)
    fast, other = (judged.judge(of.space, layout, CostModel(c)) for c in (SHARED, SLOW))
    assert (other.compute_s > 1.5 * fast.compute_s) == slow
    assert slow or other.compute_s == fast.compute_s


def test_products_and_lookups_are_no_such_loops() -> None:
    kernels = kernels_of(lambda x, y: jnp.tanh(x @ y), (48, 40), (40, 8))
    assert sorted(kernels.kernel_loops) == [False, True]
    assert list(kernels.kernel_loops) == [not c for c in kernels.kernel_contracts]
    lookup = kernels_of(lambda x, y: x[jnp.argsort(y[:, 0])], (48, 40), (48, 8))
    (looked_up,) = np.flatnonzero((lookup.kernel_extents == (48, 40)).all(axis=1))
    assert not lookup.kernel_loops[looked_up]


def test_both_rungs_price_them_alike() -> None:
    work = Work(opcode="fusion", name="f", element_flops=5e9, unvectorized_flops=5e9)
    more = CostModel(SLOW).kernel_s(work) - CostModel(SHARED).kernel_s(work)
    assert more == pytest.approx(8 * 49 * 5e9 / SHARED.element_flops_per_s)
    flops, bytes_, trips = (np.array([n]) for n in (5e9, 0.0, 1.0))
    one, other = (
        CostModel(c).kernels_s(flops, bytes_, trips, [""], vectorized=np.array([False]))
        for c in (SLOW, SHARED)
    )
    assert one - other == pytest.approx(more)
