"""Slices and pads of divided dimensions in a step: rung 1 sends what the compiled program sends."""

import collections
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

from autoshard.layout import Layout
from autoshard.trial import Collective
from autoshard.workload import Workload
from tests.analysed import analyse
from tests.programs import normal, shaped, train
from tests.rungs.test_sending import CPU, compiled, judged

HIDDEN, EMBED, TIME, BATCH = 64, 32, 6, 16
COLUMNS = f"w[1.1]:{HIDDEN}"


def shifted(collectives: Iterable[Collective]) -> dict[tuple[str, ...], tuple[int, int]]:
    """How many collective-permutes, and bytes, by mesh axes."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    bytes_: collections.Counter[tuple[str, ...]] = collections.Counter()
    for one in collectives:
        if one.kind == "collective_permute":
            found[one.mesh_axes] += one.count
            bytes_[one.mesh_axes] += one.bytes * one.count
    return {axes: (found[axes], bytes_[axes]) for axes in found}


def gated() -> Workload:
    """A GRU whose gates are slices of one product."""

    def loss(params, batch):  # type: ignore[no-untyped-def]
        def turn(h, x):  # type: ignore[no-untyped-def]
            reset, update, new = jnp.split(x @ params["w"], 3, axis=1)
            reset_h, update_h, new_h = jnp.split(h @ params["u"], 3, axis=1)
            r, z = jax.nn.sigmoid(reset + reset_h), jax.nn.sigmoid(update + update_h)
            n = jnp.tanh(new + r * new_h)
            h = (1 - z) * n + z * h
            return h, None

        first = jnp.zeros((BATCH, HIDDEN))
        last, _ = jax.lax.scan(turn, first, jnp.swapaxes(batch["x"], 0, 1))
        return jnp.mean((last - batch["y"]) ** 2)

    return train(
        loss,
        lambda: {"w": normal(0, EMBED, 3 * HIDDEN), "u": normal(1, HIDDEN, 3 * HIDDEN)},
        {"x": shaped(BATCH, TIME, EMBED), "y": shaped(BATCH, HIDDEN)},
    )


@pytest.mark.parametrize("mesh", [(("x", 8),), (("x", 4), ("y", 2)), (("x", 2), ("y", 4))])
def test_gates_that_are_slices_of_a_divided_product(mesh: tuple[tuple[str, int], ...]) -> None:
    of = analyse(gated())
    batch = (("batch", ("y",)),) if len(mesh) == 2 else ()
    layout = Layout(mesh=mesh, compute=(*batch, (f"u[0]:{HIDDEN}", ("x",))))
    found = shifted(judged(of, layout, CPU))
    assert found == shifted(compiled(of, layout))
    assert found["x",][0] >= 4 * TIME


def test_parts_that_are_not_even_are_sent_as_long_as_the_longest() -> None:
    def loss(params, batch):  # type: ignore[no-untyped-def]
        made = (batch["x"] @ params["w"])[:, 1:-1]
        padded = jnp.tanh(jnp.pad(made, ((0, 0), (3, 0))))
        joined = jnp.concatenate([padded, padded * padded], 1)
        return jnp.mean((joined[:, ::2] - batch["y"]) ** 2)

    batch = {"x": shaped(BATCH, EMBED), "y": shaped(BATCH, 3 * HIDDEN + 1)}
    of = analyse(train(loss, lambda: {"w": normal(0, EMBED, 3 * HIDDEN)}, batch))
    layout = Layout(mesh=(("x", 8),), compute=((f"w[1]:{3 * HIDDEN}", ("x",)),))
    found = shifted(judged(of, layout, CPU))
    assert found == shifted(compiled(of, layout)) != {}
