"""What windows along divided dimensions send: as the compiled program, or more; never nothing."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import pytest

from autoshard.layout import Layout, rules
from autoshard.subjects import Subject
from autoshard.trial import Collective
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


def over_rows(function: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[Subject, Layout]:
    """A step forward over images whose rows are divided."""
    work = Workload(
        step=lambda state, x: (state, jnp.sum(jnp.sin(function(x, state)))),
        init=lambda: normal(0, 3, 3, 4, 6),
        batch=shaped(2, 64, 5, 4),
    )
    of = analyse(work)
    rows = next(axis.name for axis in of.analysis.axes.axes if axis.size == 64)
    return of, Layout(mesh=MESH, compute=rules({rows: "x"}))


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

    of = analyse(train(loss, lambda: normal(0, 3, 3, 4, 6), shaped(2, 64, 5, 4)))
    rows = next(axis.name for axis in of.analysis.axes.axes if axis.size == 64)
    layout = Layout(mesh=MESH, compute=rules({rows: "x"}))
    found, real = judged(of, layout, CPU), compiled(of, layout)
    sent = bytes_of(found, "collective_permute")
    assert sent == pytest.approx(bytes_of(real, "collective_permute"), rel=0.01) and sent > 0


def moved(change: Callable[[jax.Array], jax.Array], out: int) -> tuple[Subject, Layout]:
    """A product whose divided columns are cut or padded."""

    def loss(params, batch):  # type: ignore[no-untyped-def]
        return jnp.mean((jnp.tanh(change(batch["x"] @ params["w"])) - batch["y"]) ** 2)

    batch = {"x": shaped(BATCH, EMBED), "y": shaped(BATCH, out)}
    of = analyse(train(loss, lambda: {"w": normal(0, EMBED, WIDTH)}, batch))
    return of, Layout(mesh=MESH, compute=((f"w[1]:{WIDTH}", ("x",)),))


def test_a_slice_of_near_places_is_a_permute_and_of_far_ones_a_gather() -> None:
    of, layout = moved(lambda x: x[:, 1:], WIDTH - 1)
    near = judged(of, layout, CPU)
    assert bytes_of(near, "collective_permute") > 0
    of, layout = moved(lambda x: x[:, WIDTH // 2 :], WIDTH // 2)
    far = judged(of, layout, CPU)
    assert bytes_of(far, "all_gather") > 0


@pytest.mark.parametrize(
    ("change", "out"),
    [
        (lambda x: x[:, 1:], WIDTH - 1),
        (lambda x: x[:, WIDTH // 2 :], WIDTH // 2),
        (lambda x: jnp.pad(x, ((0, 0), (8, 0))), WIDTH + 8),
        (lambda x: x[:, ::2], WIDTH // 2),
    ],
)
def test_what_a_compiler_sends_for_slices_and_pads_is_never_free(
    change: Callable[[jax.Array], jax.Array], out: int
) -> None:
    of, layout = moved(change, out)
    found, real = judged(of, layout, CPU), compiled(of, layout)
    plain = judged(*moved(lambda x: x, WIDTH), CPU)
    if bytes_of(real, "collective_permute") + bytes_of(real, "all_gather") == 0:
        return  # the partitioner brings the whole elsewhere before
    kinds = ("collective_permute", "all_gather", "all_to_all")
    assert sum(bytes_of(found, kind) for kind in kinds) > sum(
        bytes_of(plain, kind) for kind in kinds
    )
