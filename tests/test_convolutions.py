"""Which convolutions XLA:CPU turns around, and their operations by both rungs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import hlo
from autoshard.calibrate import patch_s
from autoshard.cost import CostModel
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.work import Work
from autoshard.layout import Layout, rules
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, asked_of, kernels_of, propagator
from tests.programs import shaped

LABELS = ("NHWC", "HWIO", "NHWC")


def forward(x, k, stride: int = 1):  # type: ignore[no-untyped-def]
    return jax.lax.conv_general_dilated(x, k, (stride,) * 2, "SAME", dimension_numbers=LABELS)


def all_places(x, k):  # type: ignore[no-untyped-def]
    """Each place of the kernel meets the one place of the data."""
    padding = ((k.shape[0] - 1,) * 2,) * 2
    return jax.lax.conv_general_dilated(x, k, (1, 1), padding, dimension_numbers=LABELS)


def towards_the_images(x, k):  # type: ignore[no-untyped-def]
    return jax.grad(lambda x: jnp.sum(jnp.sin(forward(x, k, stride=2))))(x)


@pytest.mark.parametrize(
    ("function", "side", "kernel", "turned"),
    [
        (forward, 8, 3, False),
        (forward, 3, 3, False),
        (forward, 2, 3, True),
        (forward, 1, 1, False),
        (forward, 1, 3, True),
        (all_places, 1, 3, False),
        (forward, 4, 5, True),
        (towards_the_images, 8, 3, False),
        (towards_the_images, 4, 3, True),
    ],
)
def test_a_convolution_with_less_data_than_kernel_is_turned_around(
    function, side: int, kernel: int, turned: bool
) -> None:  # type: ignore[no-untyped-def]
    shapes = (4, side, side, 16), (kernel, kernel, 16, 24)
    kernels = kernels_of(function, *shapes)
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text()
    module = hlo.parse(text)
    launches = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    assert any(kernels.kernel_turned) == turned
    assert any(work.turned_flops for work in launches) == turned
    _, asked = asked_of(function, *shapes)
    assert asked["patches"].sum() == sum(work.patches for work in launches)
    products = kernels.kernel_flops[kernels.kernel_contracts].sum()
    assert products == sum(flops for work in launches for _, flops in work.matmul_flops)


def one_dimension(x, k):  # type: ignore[no-untyped-def]
    return jax.lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=24
    )


PATCHES: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], int]] = {
    "few features": (forward, [(4, 8, 12, 16), (3, 3, 16, 16)], 4 * 8 * 12 * 9 * 16),
    "with a stride": (
        lambda x, k: forward(x, k, stride=2),
        [(4, 8, 12, 3), (7, 7, 3, 16)],
        4 * 4 * 6 * 49 * 3,
    ),
    "enough features": (forward, [(4, 8, 12, 16), (3, 3, 16, 17)], 0),
    "of spread data": (towards_the_images, [(4, 8, 8, 16), (3, 3, 16, 16)], 4 * 4 * 4 * 9 * 16),
    "turned around": (forward, [(4, 2, 2, 16), (3, 3, 16, 16)], 0),
    "of spread data in groups": (
        lambda x, k: jax.lax.conv_general_dilated(
            x,
            k,
            (1, 1),
            [(1, 1)] * 2,
            lhs_dilation=(2, 2),
            dimension_numbers=LABELS,
            feature_group_count=24,
        ),
        [(4, 8, 8, 24), (3, 3, 1, 24)],
        4 * 15 * 15 * 9 * 24,
    ),
    "one dimension": (one_dimension, [(4, 50, 24), (4, 1, 24)], 4 * 50 * 4 * 24),
}


@pytest.mark.parametrize("name", PATCHES)
def test_both_rungs_count_the_patches_that_no_library_spares(name: str) -> None:
    function, shapes, expected = PATCHES[name]
    _, asked = asked_of(function, *shapes)
    assert asked["patches"].sum() == expected
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text()
    module = hlo.parse(text)
    launches = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    assert sum(work.patches for work in launches) == expected


@pytest.mark.parametrize(
    ("divided", "made", "parts"),
    [
        ("batch", 16, 8),
        ("features read", 16, 8),
        ("made", 16, 1),
        ("batch", 32, 0),  # enough features for the library
        ("made", 32, 1),  # not on one device
    ],
)
def test_rung_1_counts_the_patches_of_one_device(divided: str, made: int, parts: int) -> None:
    def step(state, x):  # type: ignore[no-untyped-def]
        return state, jnp.sum(jnp.sin(forward(x, state)))

    batch, read = 24, 8
    of = analyse(
        Workload(
            step=step,
            init=lambda: jnp.zeros((3, 3, read, made)),
            batch=shaped(batch, 6, 6, read),
        )
    )
    size = {"batch": batch, "features read": read, "made": made}[divided]
    name = next(axis.name for axis in of.analysis.axes.axes if axis.size == size)
    layout = Layout(mesh=(("x", 8),), compute=rules({name: "x"}))
    shared = dataclasses.replace(CONSTANTS, shared=True)
    judged = propagator(of.analysis)
    plain, other = (
        judged.judge(of.space, layout, CostModel(c))
        for c in (shared, dataclasses.replace(shared, patch_s=1e-9))
    )
    patches = batch * 6 * 6 * 9 * read
    more = 8 * 1e-9 * patches / parts if parts else 0.0
    assert other.compute_s - plain.compute_s == pytest.approx(more)


def test_both_rungs_price_patches_alike() -> None:
    shared = dataclasses.replace(CONSTANTS, shared=True)
    dear = dataclasses.replace(shared, patch_s=2e-9)
    work = Work(opcode="convolution", name="c", matmul_flops=(("f32", 1e6),), patches=5e5)
    more = CostModel(dear).kernel_s(work) - CostModel(shared).kernel_s(work)
    assert more == pytest.approx(8 * 5e5 * 2e-9)
    one = np.array([1.0])
    slow, plain = (
        CostModel(c).kernels_s(one, one, one, ["f32"], patches=np.array([5e5]))
        for c in (dear, shared)
    )
    assert slow - plain == pytest.approx(more)


def test_what_a_patch_costs_is_beyond_its_products() -> None:
    rates = {"patches": 1e9, "product": 64e9}
    assert patch_s(rates) == pytest.approx(0.5e-9)
    assert patch_s({**rates, "product": 1e9}) == 0.0
