"""Products over few rows: rung 1 sums their gradients where the compiled program does."""

import collections
import pathlib

import jax.numpy as jnp
import pytest

from autoshard.layout import Layout
from autoshard.pricing import cost_model
from autoshard.subjects import Subject
from autoshard.target import find_target
from autoshard.trial import Collective
from autoshard.workload import Workload
from tests.analysed import analyse
from tests.hardware import needs
from tests.programs import normal, shaped, train
from tests.rungs.test_sending import CPU, MESH, compiled, compiled_elsewhere, judged, sums

ROWS, WIDTH, HIDDEN, OUT = 16, 128, 64, 96
UP, INNER, DOWN = f"up[0]:{WIDTH}", f"up[1]:{HIDDEN}", f"down[1]:{OUT}"
X, XY, XYZ, YZ = ("x",), ("x", "y"), ("x", "y", "z"), ("y", "z")


def few_rows() -> Workload:
    """Activations are smaller than parameters: gathering them would send less than summing."""

    def loss(params, batch):
        found = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        return jnp.mean((found - batch["y"]) ** 2)

    return train(
        loss,
        lambda: {"up": normal(0, WIDTH, HIDDEN), "down": normal(1, HIDDEN, OUT)},
        {"x": shaped(ROWS, WIDTH), "y": shaped(ROWS, OUT)},
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


def laid_out(compute: dict, storage: dict) -> tuple[Subject, Layout]:
    of = analyse(few_rows())
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
    there = find_target(name)
    predicted = judged(of, layout, cost_model(there))
    found = compiled_elsewhere(of, layout, there, tmp_path)
    if platform == "tpu":  # gathers f32 as bf16, and scatters no sum whose parts fill no tiles
        assert unscattered(predicted) == unscattered(found)
    else:
        assert sent(predicted) == sent(found)
