"""Which device stands where: slices and hosts outermost, the torus as jax's own utilities say."""

import pytest
from jax.experimental import mesh_utils

from autoshard.compat.xla.device_order import device_order, known_kind
from autoshard.errors import TargetError
from tests.hardware import gpu, tpu


def order(topology, *sizes: int) -> tuple[int, ...]:
    chip = topology.chip
    return device_order(topology.positions, chip.device_kind, chip.platform, sizes)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_hosts_are_outermost(sizes: tuple[int, ...]) -> None:
    assert order(gpu(2, 4), *sizes) == tuple(range(8))


def test_every_device_has_one_place_on_every_mesh() -> None:
    for topology in (tpu(4, 4, 4), tpu(2, 2, 2, slices=4), tpu(4, 4, 1), tpu(8, 4, 4)):
        n = topology.device_count
        for first in (d for d in range(1, n + 1) if n % d == 0):
            assert sorted(order(topology, first, n // first)) == list(range(n))


def test_slices_are_the_outer_part_of_the_first_axis_that_they_divide() -> None:
    topology = tpu(2, 2, 1, slices=2)
    slice_of = [p.slice for p in topology.positions]
    assert [slice_of[i] for i in order(topology, 2, 4)] == [0] * 4 + [1] * 4
    assert [slice_of[i] for i in order(topology, 8)] == [0] * 4 + [1] * 4
    # An axis of one cannot take them: the next does.
    assert [slice_of[i] for i in order(topology, 1, 8)] == [0] * 4 + [1] * 4


def test_a_torus_is_laid_out_as_mesh_utils_does(monkeypatch) -> None:
    """Each axis of 4 x 16 is one whole dimension, and two, of a cube of 4."""
    topology = tpu(4, 4, 4)
    places = order(topology, 4, 16)
    coords = [topology.positions[i].coords for i in places]
    rows = [coords[k * 16 : (k + 1) * 16] for k in range(4)]
    moving = [len({c[d] for c in rows[0]}) for d in range(3)]
    assert sorted(moving) == [1, 4, 4]
    asked = []
    real = mesh_utils.create_device_mesh
    monkeypatch.setattr(
        mesh_utils, "create_device_mesh", lambda *a, **k: asked.append(a[0]) or real(*a, **k)
    )
    device_order.cache_clear()
    assert order(topology, 4, 16) == places and asked == [(4, 16)]


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(TargetError, match=r"needs 6 devices, got 8"):
        order(gpu(2, 4), 2, 3)


def test_kinds_of_two_names_are_one() -> None:
    assert known_kind("TPU v5") == known_kind("TPU v5p")
    assert known_kind("NVIDIA H200") == "NVIDIA H200"
