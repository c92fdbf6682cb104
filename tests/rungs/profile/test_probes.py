"""Probes grow until they take long enough, and stay within the memory."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard.rungs.profile import probes
from autoshard.rungs.profile.probes import Effort, fitting, grown, on_accelerator


def timed(seconds_of):
    """(clock, make): programs that take `seconds_of(size, run)` on a clock of their own."""
    now = [0.0]

    def make(size):
        runs = [0]

        def run():
            now[0] += seconds_of(size, runs[0])
            runs[0] += 1

        return run

    return lambda: now[0], make


@pytest.mark.parametrize(
    ("floor_s", "size"), [(0.0, 3), (3.1e-5, 6), (1e-3, 192), (3e-3, 384), (1.0, 768)]
)
def test_a_probe_grows_until_it_takes_long_enough_or_as_large_as_it_may(floor_s, size):
    clock, make = timed(lambda size, run: size * 1e-5)
    found, run = grown(make, 3, 1000, floor_s, clock)
    assert found == size
    before = clock()
    run()
    assert clock() - before == pytest.approx(size * 1e-5)


def test_what_holds_up_a_run_does_not_end_the_growth():
    clock, make = timed(lambda size, run: size * 1e-5 + (1.0 if run in (0, 2) else 0.0))
    assert grown(make, 1, 1 << 20, 1e-3, clock)[0] == 128


def test_a_size_that_does_not_fit_is_halved():
    assert fitting(1 << 20, 8, 1 << 23) == 1 << 20
    assert fitting(1 << 20, 8, (1 << 23) - 1) == 1 << 19
    assert fitting(1 << 20, 8, 0) == 1


@pytest.fixture
def made(monkeypatch):
    """(bytes of the array, dtype) of each program that is made; none of them runs."""
    found = []

    def program(function, mesh, *shape, dtype="float32", scale=None):
        found.append((int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype))
        return lambda: None

    monkeypatch.setattr(probes, "program", program)
    return found


@pytest.mark.parametrize("memory_bytes", [1 << 20, 16 << 30, 192 << 30])
def test_probes_of_an_accelerator_are_large_and_fit_into_its_memory(made, memory_bytes):
    found = on_accelerator(Mesh(np.array(jax.devices()[:1]), ("x",)), memory_bytes, 0.0)
    assert set(found) == {"product bf16", "product f32", "elements", "copy"}
    assert 2 * max(bytes_ for bytes_, _ in made) <= memory_bytes / 4
    assert {dtype for _, dtype in made} == {"bfloat16", "float32"}
    if memory_bytes >= 16 << 30:
        assert found["copy"].amount >= 2 * (256 << 20)
        assert found["product bf16"].amount >= 1e12


def test_amounts_are_those_of_the_programs():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    effort = Effort(floor_s=10.0, side=64, elements=256, copy_bytes=1024, repeats=4)
    found = on_accelerator(mesh, 1 << 20, 0.0, effort)
    assert found["product f32"].amount == 4 * 2 * 64**3
    assert found["elements"].amount == 4 * 7 * 256
    assert found["copy"].amount == 8 * (1 << 15)
    assert all(np.isfinite(np.asarray(probe.run(), dtype=float)).all() for probe in found.values())


@pytest.mark.parametrize(("in_place", "second"), [(True, 2.5), (False, 1.5)])
def test_a_program_in_place_takes_what_its_last_run_left(in_place, second):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    run = probes.program(lambda x: x + 1.0, mesh, 4, in_place=in_place)
    run()
    np.testing.assert_array_equal(np.asarray(run()), np.full((2, 4), second, np.float32))
