"""Convolutions whose operands are divided unalike: rung 1 sends and multiplies as compiled."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard.layout import Layout
from autoshard.lowering import lower_step
from autoshard.pricing import cost_model
from autoshard.rungs.compile import estimate_of
from autoshard.rungs.compile_job import CompileResult, compile_on
from autoshard.subjects import Subject
from autoshard.target import find_target
from autoshard.trial import Estimate
from autoshard.workload import Workload
from tests.analysed import analyse, propagator, target
from tests.compat.test_products import sent, unscattered
from tests.hardware import needs
from tests.programs import normal, shaped, train
from tests.rungs.test_sending import CPU, MESH, compiled_elsewhere, judged

Rules = dict[str, tuple[str, ...]]
ROWS, ROWS_OF_ONE, MADE = "x[1]:4", "x[1]:8", "0[3]:32"
XY, XZ, YZ, XZY = ("x", "y"), ("x", "z"), ("y", "z"), ("x", "z", "y")


def convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    labels = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=labels)


def images(convolutions: int, stride: int = 2) -> Workload:
    """The rows of the images are an axis of their own: behind a stride of two there are others."""

    def loss(params, batch):  # type: ignore[no-untyped-def]
        found = batch["x"]
        for kernel in params:
            found = jnp.sin(convolved(found, kernel, stride))
        return jnp.mean(found**2)

    kernels = normal(0, 3, 3, 24, 32), normal(1, 3, 3, 32, 48)
    return train(loss, lambda: kernels[:convolutions], {"x": shaped(8, 16, 16, 24)})


LAYOUTS: list[tuple[int, Rules, Rules]] = [
    # The images' batch is in fewer parts than that of what comes out: rows have the other axis.
    (2, {"batch": XY, ROWS: ("y",)}, {}),
    (2, {"batch": XZY, ROWS: ("y",)}, {}),
    (2, {"batch": XZ, ROWS: ("z",)}, {}),
    (2, {"batch": XZY, ROWS: YZ}, {}),
    (2, {"batch": XY}, {}),
    # What is made is cut afterwards, unless it is divided as what is summed was.
    (1, {"batch": XY, ROWS_OF_ONE: ("y",)}, {MADE: ("z",)}),
    (1, {"batch": XY, ROWS_OF_ONE: ("y",)}, {MADE: ("y",)}),
    (1, {"batch": XZY, ROWS_OF_ONE: ("y",)}, {MADE: XZY}),
]


def laid_out(
    convolutions: int, compute: Rules, storage: Rules, stride: int = 2
) -> tuple[Subject, Layout]:
    of = analyse(images(convolutions, stride))
    assert {*compute, *storage} <= {axis.name for axis in of.analysis.axes.axes}
    return of, of.space.layout(MESH, compute, storage)


def both_rungs(of: Subject, layout: Layout) -> tuple[Estimate, Estimate]:
    said = propagator(of.analysis).judge(of.space, layout, CPU)
    module = lower_step(of.analysis, of.space.specs(layout), target())
    result = compile_on(module, target().placed(module.mesh))
    assert isinstance(result, CompileResult)
    compiled = estimate_of(module, result, CPU)
    assert isinstance(said, Estimate) and isinstance(compiled, Estimate)
    return said, compiled


@pytest.mark.parametrize(("convolutions", "compute", "storage"), LAYOUTS)
def test_operands_are_brought_and_multiplied_as_compiled(
    convolutions: int, compute: Rules, storage: Rules
) -> None:
    said, compiled = both_rungs(*laid_out(convolutions, compute, storage))
    assert sent(said.collectives) == sent(compiled.collectives)
    # A kernel gradient that is not whole would be a tenth or more of the step.
    assert said.flops == pytest.approx(compiled.flops, rel=0.05)


def test_data_stay_where_both_are_summed_over_what_divides_them() -> None:
    rows, read = "x[1]:16", "0[2]:24"
    of, layout = laid_out(1, {"batch": ("x",), rows: ("y",)}, {read: ("z",)}, stride=1)
    for said in both_rungs(of, layout):
        assert ("collective_permute", "y") in sent(said.collectives)
        assert ("all_gather", "y") not in sent(said.collectives)


@pytest.mark.parametrize(("convolutions", "compute", "storage"), LAYOUTS[-3:])
def test_what_is_gathered_is_copied_whole(
    convolutions: int, compute: Rules, storage: Rules
) -> None:
    said, compiled = both_rungs(*laid_out(convolutions, compute, storage))
    beside = [one.peak_memory_bytes - one.state_bytes for one in (said, compiled)]
    assert beside[0] == pytest.approx(beside[1], rel=0.1)


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(("convolutions", "compute", "storage"), LAYOUTS)
def test_operands_are_brought_as_compiled_elsewhere(
    platform: str,
    name: str,
    convolutions: int,
    compute: Rules,
    storage: Rules,
    tmp_path: pathlib.Path,
) -> None:
    needs(platform)
    of, layout = laid_out(convolutions, compute, storage)
    there = find_target(name)
    predicted = judged(of, layout, cost_model(there))
    found = compiled_elsewhere(of, layout, there, tmp_path)
    assert unscattered(predicted) == pytest.approx(unscattered(found), rel=0.1)
