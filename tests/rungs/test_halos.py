"""Halos of convolutions whose places are divided: as the compiled program has them."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import hlo
from autoshard.convolutions import Window
from autoshard.cost import CostModel
from autoshard.halos import Reach, reach, reach_contracted
from autoshard.layout import Layout, rules
from autoshard.lowering import lower_step
from autoshard.rungs.compile import estimate_of
from autoshard.rungs.compile_job import CompileResult, compile_on
from autoshard.rungs.halos import NO_HALO, Halo, Reaching, halo_of, joining_s
from autoshard.trial import Estimate
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, kernels_of, propagator, target
from tests.programs import shaped

LABELS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    ("window", "ways", "found"),
    [
        # A kernel of three: one row of each neighbour, and every tap of both rows falls on data.
        (Window(data=8, kernel=3, out=8, low=1), 4, Reach(2, 1, 1, 2 * 3)),
        (Window(data=8, kernel=1, out=8), 4, Reach(2, 0, 0, 2)),
        (Window(data=8, kernel=3, out=8, low=2), 4, Reach(2, 2, 0, 2 * 3)),  # all before it
        (Window(data=16, kernel=3, out=8, low=0, stride=2), 2, Reach(8, 0, 1, 4 * 3)),
        (Window(data=64, kernel=7, out=32, low=3, stride=2), 2, Reach(32, 3, 2, 16 * 7)),
        (Window(data=8, kernel=3, out=8, low=2, step=2), 2, Reach(4, 2, 2, 4 * 3)),
        # Spread data: of three taps one or two meet any.
        (Window(data=4, kernel=3, out=8, low=1, spread=2), 2, Reach(2, 0, 1, 6)),
        (Window(data=2, kernel=3, out=2, low=1), 2, Reach(1, 1, 1, 3)),  # more than there is
    ],
)
def test_the_neighbours_have_what_windows_reach_into(
    window: Window, ways: int, found: Reach
) -> None:
    assert reach(window, ways) == found


@pytest.mark.parametrize(
    ("window", "ways", "found"),
    [
        (Window(data=8, kernel=8, out=3, low=1), 2, Reach(4, 1, 1, 4 * 3)),
        (Window(data=8, kernel=8, out=1), 2, Reach(4, 0, 0, 4)),
        (Window(data=8, kernel=4, out=3, low=1, step=2), 2, Reach(4, 1, 0, 2 * 3)),
    ],
)
def test_so_it_is_where_what_it_is_convolved_by_is_divided(
    window: Window, ways: int, found: Reach
) -> None:
    assert reach_contracted(window, ways) == found


def forward(stride: int) -> Callable[..., jax.Array]:
    return lambda x, k: jax.lax.conv_general_dilated(
        x, k, (stride,) * 2, "SAME", dimension_numbers=LABELS
    )


def towards_the_images(y: jax.Array, k: jax.Array) -> jax.Array:
    """The gradient of a convolution with a stride of two by its data."""
    return jax.lax.conv_general_dilated(
        y, k, (1, 1), [(2, 1)] * 2, lhs_dilation=(2, 2), dimension_numbers=LABELS
    )


def towards_the_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    """The gradient of a convolution by its kernel of three by three."""
    return jax.lax.conv_general_dilated(
        x, y, (1, 1), [(1, 1)] * 2, dimension_numbers=("CHWN", "IHWO", "HWNC")
    )


ROWS, WHOLE = PartitionSpec(None, "x"), PartitionSpec()
Program = tuple[Callable[..., jax.Array], tuple[PartitionSpec, ...], list[tuple[int, ...]]]
PROGRAMS: Mapping[str, Program] = {
    "three": (forward(1), (ROWS, WHOLE, ROWS), [(4, 16, 8, 24), (3, 3, 24, 32)]),
    "five": (forward(1), (ROWS, WHOLE, ROWS), [(4, 16, 8, 24), (5, 5, 24, 32)]),
    "one": (forward(1), (ROWS, WHOLE, ROWS), [(4, 16, 8, 24), (1, 1, 24, 32)]),
    "stride": (forward(2), (ROWS, WHOLE, ROWS), [(4, 16, 8, 24), (3, 3, 24, 32)]),
    "seven": (forward(2), (ROWS, WHOLE, ROWS), [(4, 32, 8, 24), (7, 7, 24, 32)]),
    "images": (towards_the_images, (ROWS, WHOLE, ROWS), [(4, 8, 8, 24), (3, 3, 24, 32)]),
    "kernel": (towards_the_kernel, (ROWS, ROWS, WHOLE), [(4, 16, 8, 24), (4, 16, 8, 32)]),
}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_sends_and_multiplies_so(name: str, devices: int) -> None:
    function, specs, shapes = PROGRAMS[name]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    *given, made = (NamedSharding(mesh, spec) for spec in specs)
    jitted = jax.jit(function, in_shardings=tuple(given), out_shardings=made)
    text = jitted.lower(*(shaped(*s) for s in shapes)).compile().as_text() or ""
    counts = hlo.count(hlo.parse(text), (("x", devices),))
    sent = sum(c.bytes * c.count for c in counts.collectives if c.kind == "collective_permute")

    kernels = kernels_of(function, *shapes)
    (one,) = kernels.convolutions
    data, by, result = (
        tuple(("x",) if axis == "x" else () for axis in (*spec, None, None, None, None)[:4])
        for spec in specs
    )
    size = 4.0 * math.prod(shapes[0]) / devices
    halo = halo_of(one.said, data, by, result, size, {"x": devices})
    assert sum(bytes_ for _, bytes_ in halo.sent) == sent
    assert (halo.bytes > size) == (sent > 0) == (name != "one")
    whole = kernels.kernel_flops[one.kernel]
    assert counts.matmul_flops == pytest.approx(whole * halo.work / devices)


def test_nothing_is_divided_in_space_and_there_is_no_halo() -> None:
    (one,) = kernels_of(forward(1), (4, 8, 8, 24), (3, 3, 24, 32)).convolutions
    batch = (("x",), (), (), ())
    assert halo_of(one.said, batch, (), batch, 1.0, {"x": 4}) == NO_HALO
    assert halo_of(one.said, (), (), (), 1.0, {"x": 4}) == NO_HALO
    # Rows that are gathered, or that the result is cut into, are no halo's.
    rows = ((), ("x",), (), ())
    assert halo_of(one.said, rows, (), (), 1.0, {"x": 4}) == NO_HALO
    assert halo_of(one.said, (), (), rows, 1.0, {"x": 4}) == NO_HALO


def test_what_is_received_is_joined_with_the_own_part() -> None:
    kernels = kernels_of(forward(1), (4, 8, 8, 24), (3, 3, 24, 32))
    (one,) = kernels.convolutions
    shared = CostModel(dataclasses.replace(CONSTANTS, shared=True))
    found = joining_s([Reaching(one, Halo((), 4096.0, 1.0))], kernels, 1e6, shared)
    # 1024 elements are read and written, and a byte for each that says where it lies; a launch.
    assert found == pytest.approx(8 * (2 * 5 * 1024 / 1e10 + 1e-6))
    slow = CostModel(dataclasses.replace(CONSTANTS, shared=True, element_flops_per_s=1e9))
    found = joining_s([Reaching(one, Halo((), 4096.0, 1.0))], kernels, 1e6, slow)
    assert found == pytest.approx(8 * (6 * 1024 / 1e9 + 1e-6))
    assert joining_s([Reaching(one, Halo((), 0.0, 1.5))], kernels, 1e6, slow) == 0.0


def images() -> Workload:
    """A step of two convolutions, whose images' rows can be divided."""

    def step(state, x):  # type: ignore[no-untyped-def]
        def loss(kernels):  # type: ignore[no-untyped-def]
            hidden = jnp.tanh(forward(1)(x, kernels["in"]))
            return jnp.sum(jnp.sin(forward(2)(hidden, kernels["out"])))

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), {"loss": value}

    return Workload(
        step=step,
        init=lambda: {"in": jnp.zeros((3, 3, 24, 32)), "out": jnp.zeros((3, 3, 32, 24))},
        batch=shaped(8, 16, 16, 24),
    )


def test_rung_1_sends_what_the_compiled_step_sends() -> None:
    of = analyse(images())
    rows = next(axis.name for axis in of.analysis.axes.axes if axis.name.startswith("batch[1]"))
    layout = Layout(mesh=(("x", 4), ("y", 2)), compute=rules({rows: "x", "batch": "y"}))
    cost = CostModel(dataclasses.replace(CONSTANTS, shared=True))
    judged = propagator(of.analysis).judge(of.space, layout, cost)
    module = lower_step(of.analysis, of.space.specs(layout), target())
    result = compile_on(module, target().placed(module.mesh))
    assert isinstance(result, CompileResult)
    compiled = estimate_of(module, result, cost)

    def permuted(said: object) -> float:
        assert isinstance(said, Estimate)
        return said.bytes_by_kind().get("collective_permute", 0.0)

    assert 0 < permuted(judged) == pytest.approx(permuted(compiled), rel=0.3)
    # Of the batch alone a device has four times as much, and pads in place of multiplying zeros.
    fewer = dataclasses.replace(layout, compute=rules({"batch": "y"}))
    whole = propagator(of.analysis).judge(of.space, fewer, cost)
    assert isinstance(whole, Estimate) and permuted(whole) == 0
    assert isinstance(judged, Estimate) and judged.flops > whole.flops / 4
