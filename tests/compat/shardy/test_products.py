"""Products: rung 1 sums, and gathers what they sum over, where the compiled program does."""

import collections
import pathlib

import jax.numpy as jnp
import pytest

from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Layout
from autoshard.records.trial import Collective
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.target import find_target
from autoshard.workload import Workload
from tests.analysed import analyse
from tests.hardware import needs
from tests.programs import normal, shaped, train
from tests.rungs.propagate.test_spmd_collectives import (
    CPU,
    MESH,
    compiled,
    compiled_elsewhere,
    judged,
    sums,
)

ROWS, WIDTH, HIDDEN, OUT = 16, 128, 64, 96
UP, INNER, DOWN = f"up[0]:{WIDTH}", f"up[1]:{HIDDEN}", f"down[1]:{OUT}"
X, Y, Z = ("x",), ("y",), ("z",)
XY, XYZ, YZ = ("x", "y"), ("x", "y", "z"), ("y", "z")


def two_products(rows: int = ROWS, out: int = OUT) -> Workload:
    """Of few rows activations are smaller than parameters: to gather them would send less than to
    sum."""

    def loss(params, batch):
        found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        return jnp.mean((found - batch["y"]) ** 2)

    return train(
        loss,
        lambda: {"up": normal(0, WIDTH, HIDDEN), "down": normal(1, HIDDEN, out)},
        {"x": shaped(rows, WIDTH), "y": shaped(rows, out)},
    )


LAYOUTS = [
    ({"batch": XYZ}, {}),
    ({"batch": XYZ}, {UP: X}),
    ({"batch": XYZ}, {UP: XYZ}),
    ({"batch": XYZ}, {INNER: XYZ}),
    ({"batch": XYZ}, {DOWN: X, INNER: ("y",)}),
    ({"batch": XY, INNER: ("z",)}, {INNER: ("z",), UP: X}),
    ({"batch": XY, INNER: ("z",)}, {INNER: ("z", "x")}),
    ({"batch": X, INNER: YZ}, {INNER: YZ, DOWN: X}),
    ({"batch": X, INNER: YZ}, {INNER: YZ, DOWN: X, UP: X}),
]


def laid_out(compute: dict, storage: dict, rows: int = ROWS) -> tuple[SearchProblem, Layout]:
    of = analyse(two_products(rows))
    return of, of.space.layout(MESH, compute, storage)


def sent(collectives: tuple[Collective, ...]) -> dict[tuple[str, ...], int]:
    """Bytes by kind and mesh axes."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for one in collectives:
        found[one.kind, *sorted(one.mesh_axes)] += one.bytes * one.count
    return dict(found)


def unscattered(collectives: tuple[Collective, ...]) -> dict[tuple[str, ...], int]:
    """`sums`, a reduce-scatter taken for an all-reduce; bytes by mesh axes."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for (_, *axes), bytes_ in sums(collectives).items():
        found[tuple(axes)] += bytes_
    return dict(found)


def check_elsewhere(
    of: SearchProblem, layout: Layout, platform: str, name: str, folder: pathlib.Path
) -> None:
    """What is sent is what the target's own compiler sends."""
    there = find_target(name)
    predicted = judged(of, layout, cost_model(there))
    found = compiled_elsewhere(of, layout, there, folder)
    if platform == "tpu":  # gathers f32 as bf16, and scatters no sum whose parts fill no tiles
        assert unscattered(predicted) == unscattered(found)
    else:
        assert sent(predicted) == sent(found)


@pytest.mark.parametrize(("compute", "storage"), LAYOUTS)
def test_gradients_over_few_rows_are_sums_as_compiled_for_cpu(compute: dict, storage: dict) -> None:
    of, layout = laid_out(compute, storage)
    assert sent(judged(of, layout, CPU)) == sent(compiled(of, layout))


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(("compute", "storage"), LAYOUTS)
def test_gradients_over_few_rows_are_sums_as_compiled_elsewhere(
    platform: str, name: str, compute: dict, storage: dict, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    of, layout = laid_out(compute, storage)
    check_elsewhere(of, layout, platform, name, tmp_path)


# Propagation divides activations as the stored parameter, which is gathered for products with them.
ONE_DIVIDED = [
    ({}, {INNER: Y}),
    ({}, {INNER: XYZ}),
    ({"batch": X}, {INNER: YZ}),
    ({"batch": X}, {INNER: Y}),
    ({"batch": XY}, {INNER: Z}),
    ({"batch": X}, {DOWN: YZ, INNER: Z}),
]


@pytest.mark.parametrize("rows", [ROWS, 512])
@pytest.mark.parametrize(("compute", "storage"), ONE_DIVIDED)
def test_what_one_operand_alone_divides_is_gathered_as_compiled_for_cpu(
    compute: dict, storage: dict, rows: int
) -> None:
    of, layout = laid_out(compute, storage, rows)
    assert sent(judged(of, layout, CPU)) == sent(compiled(of, layout))


@pytest.mark.parametrize("out", [32, HIDDEN, OUT])
@pytest.mark.parametrize("batch", [X, XY])
def test_it_is_gathered_where_that_is_no_more_than_the_result(
    out: int, batch: tuple[str, ...]
) -> None:
    of = analyse(two_products(out=out))
    layout = of.space.layout(MESH, {"batch": batch}, {INNER: Z})
    found = sent(compiled(of, layout))
    assert sent(judged(of, layout, CPU)) == found
    # or where some mesh axis divides neither operand
    assert (("all_reduce", "z") in found) == (out < HIDDEN and batch == XY)


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(("compute", "storage"), ONE_DIVIDED)
def test_what_one_operand_alone_divides_is_gathered_as_compiled_elsewhere(
    platform: str, name: str, compute: dict, storage: dict, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    of, layout = laid_out(compute, storage, 512)
    check_elsewhere(of, layout, platform, name, tmp_path)
