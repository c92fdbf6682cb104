"""What windows along divided dimensions send: as the compiled program, or more; never nothing."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import pytest

from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Layout, rules
from autoshard.records.trial import Collective
from autoshard.workload import Workload
from tests.analysed import analyse
from tests.programs import normal, shaped, train
from tests.rungs.propagate.test_spmd_collectives import CPU, compiled, judged

LABELS = ("NHWC", "HWIO", "NHWC")
MESH = (("x", 8),)
BATCH, EMBED, WIDTH = 16, 32, 64


def convolve(x: jax.Array, k: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, k, (stride,) * 2, "SAME", dimension_numbers=LABELS)


def pool(x: jax.Array) -> jax.Array:
    window = (1, 3, 3, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1, 1, 1), "SAME")


def with_divided_rows(work: Workload) -> tuple[SearchProblem, Layout]:
    """A step over images of 64 rows, the last input."""
    of = analyse(work)
    factors = of.analysis.axes.inputs[-1][1]
    return of, Layout(mesh=MESH, activation_rules=rules({factors[0][0]: "x"}))


def over_rows(
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[SearchProblem, Layout]:
    """A step forward over images whose rows are divided."""
    work = Workload(
        step=lambda state, x: (state, jnp.sum(jnp.sin(function(x, state)))),
        init=lambda: normal(0, 3, 3, 4, 6),
        batch=shaped(2, 64, 5, 4),
    )
    return with_divided_rows(work)


def bytes_of(collectives: Iterable[Collective], kind: str) -> int:
    return sum(one.bytes * one.count for one in collectives if one.kind == kind)


@pytest.mark.parametrize(
    "function",
    [
        convolve,
        lambda x, k: convolve(x, k, stride=2),
        lambda x, k: convolve(pool(x), k),
    ],
)
def test_convolutions_and_pools_send_rows_to_the_neighbours(
    function: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    of, layout = over_rows(function)
    found, real = judged(of, layout, CPU), compiled(of, layout)
    assert bytes_of(real, "collective_permute") > 0
    assert bytes_of(found, "collective_permute") == bytes_of(real, "collective_permute")


def test_the_gradient_of_a_convolution_sends_rows_too() -> None:
    def loss(k: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(convolve(x, k) ** 2)

    of, layout = with_divided_rows(train(loss, lambda: normal(0, 3, 3, 4, 6), shaped(2, 64, 5, 4)))
    found, real = judged(of, layout, CPU), compiled(of, layout)
    sent = bytes_of(found, "collective_permute")
    assert sent == pytest.approx(bytes_of(real, "collective_permute"), rel=0.01) and sent > 0


def moved(change: Callable[[jax.Array], jax.Array], out: int) -> tuple[SearchProblem, Layout]:
    """A product whose divided columns are cut or padded."""

    def loss(params, batch):  # type: ignore[no-untyped-def]
        return jnp.mean((jnp.tanh(change(batch["x"] @ params["w"])) - batch["y"]) ** 2)

    batch = {"x": shaped(BATCH, EMBED), "y": shaped(BATCH, out)}
    of = analyse(train(loss, lambda: {"w": normal(0, EMBED, WIDTH)}, batch))
    columns = of.analysis.axes.inputs[0][1]
    return of, Layout(mesh=MESH, activation_rules=rules({columns[0][0]: "x"}))


@pytest.mark.parametrize(
    ("change", "out"),
    [
        (lambda x: x[:, 1:], WIDTH - 1),
        (lambda x: jnp.pad(x, ((0, 0), (7, 0))), WIDTH + 7),
        (lambda x: x[:, ::2], WIDTH // 2),
    ],
)
def test_slices_and_pads_of_near_places_send_what_the_compiled_program_sends(
    change: Callable[[jax.Array], jax.Array], out: int
) -> None:
    of, layout = moved(change, out)
    found, real = judged(of, layout, CPU), compiled(of, layout)
    for kind in ("collective_permute", "all_gather"):
        assert bytes_of(found, kind) == pytest.approx(bytes_of(real, kind), rel=0.02)


def test_a_slice_of_far_places_is_gathered_and_never_free() -> None:
    def far(x: jax.Array) -> jax.Array:
        return x[:, 41:]

    of, layout = moved(far, WIDTH - 41)
    found, real = judged(of, layout, CPU), compiled(of, layout)
    gathered = BATCH * WIDTH * 4
    assert gathered in [one.bytes for one in found if one.kind == "all_gather"]
    assert bytes_of(found, "all_gather") >= bytes_of(real, "all_gather")
