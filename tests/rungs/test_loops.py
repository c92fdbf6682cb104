"""What loops send: rung 1 sends what the compiled program sends, as often."""

import pathlib

import jax
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
from tests.rungs.test_sending import compiled_elsewhere, judged, payloads

ROWS, WIDTH, HIDDEN, TURNS, LAYERS = 32, 128, 64, 9, 3
MESH = (("x", 8),)


def recurrent() -> Workload:
    """The same matrix in every turn, forward and backward."""

    def loss(params, x):
        def turn(h, x):
            return jnp.tanh(h @ params["again"] + x), None

        h, _ = jax.lax.scan(turn, x[:, 0], jnp.swapaxes(x, 0, 1))
        return jnp.mean(h**2)

    return train(loss, lambda: {"again": normal(0, WIDTH, WIDTH)}, shaped(ROWS, TURNS, WIDTH))


def accumulating() -> Workload:
    """In each turn some layers, a slice of one array each, and a matrix that all turns share."""

    def loss(params, x):
        def layer(h, kernel):
            return jnp.tanh(h @ kernel), None

        def turn(total, x):
            h, _ = jax.lax.scan(layer, x, params["layers"])
            return total + jnp.mean((h @ params["head"]) ** 2), None

        return jax.lax.scan(turn, 0.0, jnp.swapaxes(x, 0, 1))[0]

    def init():
        return {"layers": normal(0, LAYERS, WIDTH, WIDTH), "head": normal(1, WIDTH, HIDDEN)}

    return train(loss, init, shaped(ROWS, TURNS, WIDTH))


def at_rest(of: Subject, *paths: str) -> Layout:
    """FSDP: the batch over all devices, and so the last axis of these parameters."""
    storage = {}
    for leaf, dims in zip(of.space.program.state, of.space.axes.inputs, strict=False):
        if any(path in leaf.path for path in paths):
            storage[dims[-1][0][0]] = ("x",)
    return of.space.layout(MESH, {"batch": ("x",)}, storage)


def gathers(collectives: tuple[Collective, ...]) -> list[int]:
    return payloads(tuple(one for one in collectives if one.kind == "all_gather"))


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(
    ("make", "path"), [(recurrent, "again"), (accumulating, "head"), (accumulating, "layers")]
)
def test_what_a_loop_does_not_change_is_gathered_as_compiled_elsewhere(
    platform: str, name: str, make, path: str, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    of, there = analyse(make()), find_target(name)
    layout = at_rest(of, path)
    found = gathers(compiled_elsewhere(of, layout, there, tmp_path))
    width = 2 if platform == "tpu" else 1  # TPU gathers f32 as bf16
    assert gathers(judged(of, layout, cost_model(there))) == [width * bytes_ for bytes_ in found]
