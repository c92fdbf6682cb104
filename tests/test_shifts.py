"""Slices and pads along a divided dimension are sent as the compiled program sends them."""

import random
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import hlo
from autoshard.convolutions import Window
from autoshard.shifts import moves, padded, pieces, sliced
from tests.compiled import compiled
from tests.programs import shaped

ROWS = 4
Taken = tuple[int, int, int]
Made = tuple[Window, Callable[[jax.Array], jax.Array]]


def test_slices_and_pads_are_windows_of_one_place() -> None:
    assert sliced(192, 64, 128, 1) == Window(data=192, kernel=1, out=64, low=-64)
    assert sliced(10, 1, 10, 4) == Window(data=10, kernel=1, out=3, stride=4, low=-1)
    assert padded(64, 2, 3, 0) == Window(data=64, kernel=1, out=69, low=2)
    assert padded(4, -1, 0, 2) == Window(data=4, kernel=1, out=9, low=-1, spread=3)
    assert padded(0, 1, 1, 2) == Window(data=0, kernel=1, out=2, low=1, spread=3)


def test_what_stays_where_it_is_does_not_move() -> None:
    assert not moves(sliced(64, 0, 64, 1))
    assert not moves(padded(64, 0, 0, 0))
    assert moves(sliced(64, 0, 32, 1))  # parts are shorter then, and begin elsewhere
    assert moves(padded(64, 0, 64, 0))


def a_slice(extent: int, taken: Taken) -> Made:
    start, limit, stride = taken
    return sliced(extent, *taken), lambda x: jax.lax.slice(
        x, (0, start), (ROWS, limit), (1, stride)
    )


def a_pad(extent: int, taken: Taken) -> Made:
    return padded(extent, *taken), lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), taken))


def sent(function: Callable[[jax.Array], jax.Array], extent: int, devices: int) -> list[str]:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))
    jitted = jax.jit(function, in_shardings=columns, out_shardings=columns)
    text = compiled(jitted, shaped(ROWS, extent)).as_text()
    counts = hlo.count(hlo.parse(text), (("x", devices),))
    return sorted(f"{c.kind} {int(c.bytes)}" for c in counts.collectives for _ in range(c.count))


def said(window: Window, devices: int) -> list[str]:
    found = pieces(window, devices)
    if found is None:
        return [f"all_gather {4 * ROWS * window.data}"]
    return sorted(f"collective_permute {4 * ROWS * places}" for places in found)


@pytest.mark.parametrize(
    ("make", "devices", "extent", "taken", "found"),
    [
        (a_slice, 8, 192, (0, 64, 1), (16, 16, 8)),  # a gate of three: a source has three targets
        (a_slice, 8, 64, (0, 8, 1), (1, 1, 1, 1, 1, 1, 1)),  # all from the first device
        (a_slice, 8, 64, (0, 64, 2), ()),  # every second place, of its own
        (a_slice, 2, 64, (32, 64, 1), (16,)),  # what the neighbour has
        (a_slice, 4, 8, (2, 6, 1), (1, 1)),  # from both sides
        (a_pad, 8, 64, (0, 128, 0), (8, 8, 8)),  # the gradient of a gate
        (a_pad, 8, 64, (64, 64, 0), (8, 8)),
        (a_pad, 4, 8, (1, 3, 0), (2,)),  # the neighbours' alone
        (a_pad, 8, 56, (138, 0, 2), (6, 7, 4)),  # spread, and far away
        (a_pad, 4, 4, (0, 12, 0), None),  # all of it goes to the first device
    ],
)
def test_they_are_sent_so(
    make: Callable[[int, Taken], Made],
    devices: int,
    extent: int,
    taken: Taken,
    found: tuple[int, ...] | None,
) -> None:
    window, function = make(extent, taken)
    assert pieces(window, devices) == found
    assert said(window, devices) == sent(function, extent, devices)


def drawn(seed: int, count: int) -> Iterator[tuple[int, int, bool, Taken]]:
    """Devices, extent, whether it is a slice, and what is taken: all parts even."""
    rng = random.Random(seed)
    while count:
        devices = rng.choice([2, 4, 8])
        extent = devices * rng.randint(1, 24)
        if rng.random() < 0.5:
            stride = rng.choice([1, 1, 2, 3])
            out = devices * rng.randint(1, extent // devices)
            span = (out - 1) * stride + 1
            if span > extent or span == extent == out:
                continue
            start = rng.choice([0, extent - span, rng.randint(0, extent - span)])
            yield devices, extent, True, (start, start + span, stride)
        else:
            interior = rng.choice([0, 0, 1])
            body = extent + (extent - 1) * interior
            total = devices * (-(-body // devices) + rng.randint(0, 24))
            low = rng.choice([0, total - body, rng.randint(0, total - body)])
            if total == extent:
                continue
            yield devices, extent, False, (low, total - body - low, interior)
        count -= 1


def test_all_are_sent_as_the_compiler_sends_them() -> None:
    for devices, extent, is_slice, taken in drawn(0, 60):
        window, function = (a_slice if is_slice else a_pad)(extent, taken)
        assert said(window, devices) == sent(function, extent, devices), (devices, extent, taken)
