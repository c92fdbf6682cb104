"""Sums of products beside a dimension of one element: which ones, in both rungs, their price."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import CostModel
from autoshard.degenerate import Elements, elements
from autoshard.hlo import parse
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.work import Work
from autoshard.layout import Layout, rules
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, kernels_of, propagator
from tests.programs import shaped

SHARED = dataclasses.replace(CONSTANTS, shared=True)
SLOW = dataclasses.replace(SHARED, degenerate_s=3e-9, degenerate_across_s=7e-9)

FUSED = """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] {adds}(%a, %b)
}}

%f (p: {made}, q: {made}) -> {out} {{
  %p = {made} parameter(0)
  %q = {made} parameter(1)
  %product = {made} {multiplies}(%p, {right})
  %zero = f32[] constant(0)
  ROOT %s = {out} reduce(%product, %zero), dimensions={{{summed}}}, to_apply=%sum
}}

ENTRY %main (x: {made}, y: {made}) -> {out} {{
  %x = {made} parameter(0)
  %y = {made} parameter(1)
  ROOT %fusion = {out} fusion(%x, %y), kind=kCustom, calls=%f, backend_config={{{said}}}
}}
"""
PLAIN = {
    "adds": "add",
    "made": "f32[1,512,256]{2,1,0}",
    "out": "f32[1,512]{1,0}",
    "multiplies": "multiply",
    "right": "%q",
    "summed": "2",
    "said": '"fusion_config":{"kind":"__ynn_fusion"}',
}
ALL = 512 * 256


def of_text(text: str) -> Elements:
    module = parse(text)
    works = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    return Elements(
        int(sum(w.degenerate for w in works)), int(sum(w.degenerate_across for w in works))
    )


@pytest.mark.parametrize(
    ("extents", "summed", "found"),
    [
        ((512, 256), 1, (0, 0)),
        ((1, 512, 256), 2, (ALL, 0)),
        ((1, 512, 256), 1, (0, ALL)),
        ((512, 1, 256), 0, (0, ALL)),
        ((512, 256, 1), 1, (ALL, 0)),  # nothing lies between its elements
        ((512, 256, 1), 0, (0, ALL)),
        ((1, 131072), 1, (ALL, 0)),
        ((2, 4, 4, 16, 256), 4, (0, 0)),
        ((1, 8192), 0, (0, 0)),  # there is nothing to add up
        ((1, 63, 65), 2, (0, 0)),  # too few for the library
        ((1, 64, 64), 2, (4096, 0)),
    ],
)
def test_another_dimension_has_one_element(
    extents: tuple[int, ...], summed: int, found: tuple[int, int]
) -> None:
    assert elements(extents, summed) == found


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, (ALL, 0)),
        ({"summed": "1", "out": "f32[1,256]{1,0}"}, (0, ALL)),
        ({"made": "f32[1,512,256]{1,2,0}"}, (0, ALL)),  # other lines lie densely
        ({"made": "f32[512,256]{1,0}", "summed": "1", "out": "f32[512]{0}"}, (0, 0)),
        ({"summed": "1,2", "out": "f32[1]{0}"}, (0, 0)),
        ({"adds": "maximum"}, (0, 0)),
        ({"multiplies": "subtract"}, (0, 0)),
        ({"right": "%p"}, (0, 0)),  # squares
        ({"said": '"outer_dimension_partitions":["2"]'}, (0, 0)),  # not handed over
    ],
)
def test_rung_2_reads_them_off_what_the_library_is_handed(
    changed: dict[str, str], found: tuple[int, int]
) -> None:
    assert of_text(FUSED.format(**(PLAIN | changed))) == found


def softmax_gradient(x, g):  # type: ignore[no-untyped-def]
    return jax.vjp(jax.nn.softmax, x)[1](g)[0]


PROGRAMS: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], tuple[int, int]]] = {
    "products": (lambda x, y: jnp.sum(x * y, -1), [(1, 480, 40)] * 2, (480 * 40, 0)),
    "across": (lambda x, y: jnp.sum(x * y, 1), [(1, 480, 40)] * 2, (0, 480 * 40)),
    "an average": (lambda x, y: jnp.mean(x * y, -1), [(480, 1, 40)] * 2, (480 * 40, 0)),
    "no such dimension": (lambda x, y: jnp.sum(x * y, -1), [(2, 480, 40)] * 2, (0, 0)),
    "over two": (lambda x, y: jnp.sum(x * y, (0, 2)), [(480, 1, 40)] * 2, (0, 0)),
    "of few": (lambda x, y: jnp.sum(x * y, -1), [(1, 48, 40)] * 2, (0, 0)),
    "squares": (lambda x: jnp.sum(x * x, -1), [(1, 480, 40)], (0, 0)),
    "by a constant": (lambda x: jnp.sum(jnp.exp(x) * 2, -1), [(1, 480, 40)], (0, 0)),
    "a sum of sums": (lambda x, y: jnp.sum(x * y + x, -1), [(1, 480, 40)] * 2, (0, 0)),
    "the largest": (lambda x, y: jnp.max(x * y, -1), [(1, 480, 40)] * 2, (0, 0)),
    "of rows": (
        lambda x, y: jnp.sum(x * y[..., None], -1),
        [(1, 480, 40), (1, 480)],
        (480 * 40, 0),
    ),
    "of what is made": (
        lambda x, y: jnp.sum(jnp.exp(x) * (y - x), -1),
        [(1, 480, 40)] * 2,
        (480 * 40, 0),
    ),
    "written besides": (
        lambda x, y: (jnp.sum(z := x * y, -1), z),
        [(1, 480, 40)] * 2,
        (0, 0),
    ),
    "softmax": (softmax_gradient, [(1, 4, 160, 40)] * 2, (4 * 160 * 40, 0)),
    "softmax of several": (softmax_gradient, [(2, 4, 160, 40)] * 2, (0, 0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_rungs_find_them_in_programs(name: str) -> None:
    function, shapes, expected = PROGRAMS[name]
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text() or ""
    assert of_text(text) == expected
    found = [
        elements(p.extents, p.dimension) for p in kernels_of(function, *shapes).summed_products
    ]
    assert (sum(one.along for one in found), sum(one.across for one in found)) == expected


def scored() -> Workload:
    """A step whose gradient is a sum of products, of one example for each of eight devices."""

    def step(state, x):  # type: ignore[no-untyped-def]
        return state - jnp.sum(jnp.sum(jnp.exp(x) * (x - state), -1)), {}

    return Workload(step=step, init=lambda: jnp.zeros(()), batch=shaped(8, 480, 400))


@pytest.mark.parametrize(("axis", "ways", "slow"), [(0, 8, True), (0, 4, False), (1, 8, False)])
def test_rung_1_looks_at_what_one_device_has(axis: int, ways: int, slow: bool) -> None:
    of = analyse(scored())
    name = of.analysis.axes.axes[axis].name
    layout = Layout(mesh=(("x", ways), ("y", 8 // ways)), compute=rules({name: "x"}))
    judged = propagator(of.analysis)
    plain, other = (judged.judge(of.space, layout, CostModel(c)) for c in (SHARED, SLOW))
    more = 8 * 3e-9 * 480 * 400 if slow else 0.0
    assert other.compute_s - plain.compute_s == pytest.approx(more)


def test_both_rungs_price_them_alike() -> None:
    work = Work(opcode="fusion", name="f", degenerate=5e6, degenerate_across=2e6)
    more = CostModel(SLOW).kernel_s(work) - CostModel(SHARED).kernel_s(work)
    assert more == pytest.approx(SLOW.device_count * (5e6 * 3e-9 + 2e6 * 7e-9))
    nothing, one = np.array([0.0]), np.array([1.0])
    slow, plain = (
        CostModel(c).kernels_s(
            nothing,
            nothing,
            one,
            [""],
            degenerate=np.array([5e6]),
            degenerate_across=np.array([2e6]),
        )
        for c in (SLOW, SHARED)
    )
    assert slow - plain == pytest.approx(more)
