"""What loops send: rung 1 sends what the compiled program sends, as often."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.executable import compile_module
from autoshard.cost import CostModel
from autoshard.layout import Layout
from autoshard.lowering import lower_step
from autoshard.pricing import cost_model
from autoshard.subjects import Subject
from autoshard.target import find_target
from autoshard.trial import Collective
from autoshard.workload import Workload
from tests.analysed import analyse, propagator, target
from tests.hardware import needs
from tests.programs import normal, shaped, train
from tests.rungs.test_sending import CPU, compiled, compiled_elsewhere, judged, payloads

ROWS, WIDTH, HIDDEN, TURNS, LAYERS = 32, 128, 64, 9, 3
LEFT = CostModel(dataclasses.replace(CPU.constants, moves_invariants=False))
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


def branching() -> Workload:
    """The matrix is used in a branch of each turn."""

    def loss(params, x):
        def turn(h, x):
            h = jax.lax.cond(
                jnp.sum(x) > 0, lambda h: jnp.tanh(h @ params["again"]), lambda h: h * 2, h
            )
            return h + x, None

        h, _ = jax.lax.scan(turn, x[:, 0], jnp.swapaxes(x, 0, 1))
        return jnp.mean(h**2)

    return train(loss, lambda: {"again": normal(0, WIDTH, WIDTH)}, shaped(ROWS, TURNS, WIDTH))


def looping_in_a_branch() -> Workload:
    """Forward alone: a loop in a branch of each turn."""

    def step(params, x):
        def again(h):
            return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params["again"]), h)

        def turn(h, x):
            return jax.lax.cond(jnp.sum(x) > 0, again, lambda h: h * 2, h) + x, None

        h, _ = jax.lax.scan(turn, x[:, 0], jnp.swapaxes(x, 0, 1))
        return params, jnp.mean(h**2)

    batch = shaped(ROWS, TURNS, WIDTH)
    return Workload(step=step, init=lambda: {"again": normal(0, WIDTH, WIDTH)}, batch=batch)


def at_rest(of: Subject, *paths: str) -> Layout:
    """FSDP: the batch over all devices, and so the last axis of these parameters."""
    storage = {}
    for leaf, dims in zip(of.space.program.state, of.space.axes.inputs, strict=False):
        if any(path in leaf.path for path in paths):
            storage[dims[-1][0][0]] = ("x",)
    return of.space.layout(MESH, {"batch": ("x",)}, storage)


def gathers(collectives: tuple[Collective, ...]) -> list[int]:
    return payloads(tuple(one for one in collectives if one.kind == "all_gather"))


MATRIX, HEAD = WIDTH * WIDTH * 4, WIDTH * HIDDEN * 4


@pytest.mark.parametrize(
    ("make", "paths", "moved", "left"),
    [
        (recurrent, ["again"], [MATRIX] * 2, [MATRIX] * 2 * TURNS),
        (accumulating, ["head"], [HEAD] * 2, [HEAD] * 2 * TURNS),
        (
            accumulating,
            ["layers"],  # and the head, whose rows are as wide
            [HEAD] * 2 + [MATRIX] * 2 * LAYERS * TURNS,
            [HEAD] * 2 * TURNS + [MATRIX] * 2 * LAYERS * TURNS,
        ),
        (branching, ["again"], [MATRIX] * 2 * TURNS, [MATRIX] * 2 * TURNS),
    ],
)
def test_what_a_loop_does_not_change_is_gathered_once_on_cpu(make, paths, moved, left) -> None:
    of = analyse(make())
    layout = at_rest(of, *paths)
    assert gathers(judged(of, layout, CPU)) == moved == gathers(compiled(of, layout))
    assert gathers(judged(of, layout, LEFT)) == left


def test_nothing_is_taken_out_of_a_branch() -> None:
    """XLA takes it in front of the inner loop, within the branch: that is not counted."""
    of = analyse(looping_in_a_branch())
    layout = at_rest(of, "again")
    assert gathers(compiled(of, layout)) == [MATRIX] * TURNS
    assert gathers(judged(of, layout, CPU)) == [MATRIX] * 3 * TURNS


def two_matrices() -> Workload:
    """Forward alone: one matrix after the other in each turn."""

    def step(params, x):
        def turn(h, x):
            return jnp.tanh(h @ params["first"] + x) @ params["second"], None

        h, _ = jax.lax.scan(turn, x[:, 0], jnp.swapaxes(x, 0, 1))
        return params, jnp.mean(h**2)

    def init():
        return {"first": normal(0, WIDTH, WIDTH), "second": normal(1, WIDTH, WIDTH)}

    return Workload(step=step, init=init, batch=shaped(ROWS, TURNS, WIDTH))


def test_what_was_gathered_in_front_of_a_loop_is_held_until_its_end() -> None:
    of = analyse(two_matrices())
    layout = at_rest(of, "first", "second")
    moved, left = (propagator(of.analysis).judge(of.space, layout, c) for c in (CPU, LEFT))
    assert gathers(moved.collectives) == [MATRIX] * 2
    # Left in the loop, each is there for its own product alone.
    more = moved.peak_memory_bytes - left.peak_memory_bytes
    assert MATRIX <= more < MATRIX + ROWS * WIDTH * 4
    module = lower_step(of.analysis, of.space.specs(layout), target())
    program = compile_module(module, jax.devices()[:8])
    assert program.memory.temporaries_bytes >= 2 * MATRIX


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
