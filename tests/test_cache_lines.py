"""What becomes of the cache lines of what is read in another order than it lies in."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard import calibrate, hlo
from autoshard.cache_lines import KEPT, STAY, Lines, Turn
from autoshard.cost import CostModel
from autoshard.hlo.steps import Launch, Steps
from autoshard.layout import Layout, rules
from autoshard.trial import Estimate
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, kernels_of, propagator
from tests.programs import shaped


@pytest.mark.parametrize(
    ("extents", "before", "after", "lines"),
    [
        ((512, 512), (1, 0), (0, 1), Lines(1.0, 1.0)),  # 2048 bytes apart: two sets, 256 lines each
        ((64, 512), (1, 0), (0, 1), Lines(1.0, 0.75)),  # 32 each
        ((32, 512), (1, 0), (0, 1), Lines(1.0, 0.0)),  # 16 each
        ((16, 512), (1, 0), (0, 1), Lines(KEPT, 0.0)),  # 8 each: the cache holds them
        ((8, 1024), (1, 0), (0, 1), STAY),  # 4096 apart: one set, which holds them
        ((32, 1024), (1, 0), (0, 1), Lines(1.0, 0.75)),
        ((1024, 1024), (1, 0), (0, 1), Lines(1.0, 1.5)),
        ((256, 256), (1, 0), (0, 1), Lines(1.0, 0.25)),  # 1024 apart: four sets, 64 lines each
        ((384, 384), (1, 0), (0, 1), Lines(1.0, 0.0)),  # 1536 apart: eight sets
        (calibrate._MATRIX, (1, 0), (0, 1), Lines(1.0, 0.0)),  # all sets, 24 lines each
        ((64, 1001), (1, 0), (0, 1), Lines(KEPT, 0.0)),
        ((65, 1001), (1, 0), (0, 1), Lines(1.0, 0.0)),  # two lines of a set, but many
        # 4100 apart: the lines of sixteen columns share a set, and the next sixteen the next one.
        ((32, 1025), (1, 0), (0, 1), Lines(1.0, 0.0)),
        ((1024, 16), (1, 0), (0, 1), Lines(1.0, 0.0)),  # a line each: all sets, 16 lines each
        ((512, 2), (1, 0), (0, 1), Lines(KEPT, 0.0)),  # eight rows to a line
        ((4, 2, 256), (2, 1, 0), (1, 0, 2), Lines(1.0, 0.0)),  # eight lines, but in two loops
        ((64, 3, 256), (2, 1, 0), (0, 1, 2), Lines(1.0, 0.25)),  # 1024 and 3072: the same four
        ((64, 64, 16, 16), (3, 2, 1, 0), (0, 3, 2, 1), Lines(1.0, 1.5)),
        # Images to the front: those of one place share a set, whichever the places of a row take.
        ((32, 16, 16, 64), (3, 2, 1, 0), (0, 2, 1, 3), Lines(1.0, 0.75)),
        ((16, 8, 8, 128), (3, 2, 1, 0), (0, 2, 1, 3), Lines(1.0, 0.0)),
        ((64, 8, 8, 128), (3, 2, 1, 0), (0, 2, 1, 3), Lines(1.0, 1.5)),
        ((32, 15, 15, 60), (3, 2, 1, 0), (0, 2, 1, 3), Lines(1.0, 0.0)),
    ],
)
def test_what_lines_cost_by_how_many_share_a_set_and_how_many_sets(
    extents: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], lines: Lines
) -> None:
    assert Turn(before, after, 4.0).lines(extents) == pytest.approx(lines)


@pytest.mark.parametrize(
    ("extents", "arrays", "lines"),
    [
        ((64, 256), 1, Lines(1.0, 0.0)),  # 1024 apart: four sets, 16 lines each
        ((64, 256), 2, Lines(1.0, 0.25)),
        ((64, 512), 2, Lines(1.0, 1.0)),  # two sets, 32 lines each of one array
        ((16, 512), 1, Lines(KEPT, 0.0)),
        ((16, 512), 2, Lines(1.0, 0.0)),  # 16 lines of a set
        ((64, 1001), 6, Lines(KEPT, 0.0)),  # of each one line in most sets, which hold eight
        ((8, 1024), 3, STAY),
    ],
)
def test_arrays_that_one_loop_reads_share_the_sets(
    extents: tuple[int, ...], arrays: int, lines: Lines
) -> None:
    assert Turn((1, 0), (0, 1), 4.0).lines(extents, arrays) == pytest.approx(lines)


def test_rung_1_reads_the_lines_of_a_devices_part() -> None:
    """Of 512 x 1024 in eight: 64 rows lie in one set, as all 512 do, but 128 columns in eight."""

    def step(state, x):  # type: ignore[no-untyped-def]
        return state, jnp.sum(jnp.tanh(jnp.swapaxes(x, 0, 1) * 2.0))

    of = analyse(Workload(step=step, init=lambda: jnp.zeros(()), batch=shaped(512, 1024)))
    few, many = (axis.name for axis in sorted(of.analysis.axes.axes, key=lambda a: a.size))
    costs = [
        CostModel(dataclasses.replace(CONSTANTS, shared=True, transposed_s=1e-9, collided_s=s))
        for s in (1e-9, 2e-9)
    ]
    beyond = {}
    for name, on in (("rows", {few: "x"}), ("columns", {many: "x"}), ("whole", {})):
        layout = Layout(mesh=(("x", 8),), compute=rules(on), storage=())
        cheap, dear = (propagator(of.analysis).judge(of.space, layout, c) for c in costs)
        assert isinstance(cheap, Estimate) and isinstance(dear, Estimate)
        parts = 8 if on else 1
        beyond[name] = (dear.compute_s - cheap.compute_s) / (8 * 512 * 1024 / parts * 1e-9)
    assert beyond == pytest.approx({"rows": 1.5, "columns": 0.0, "whole": 1.5})


def test_both_rungs_count_what_collides() -> None:
    def swapped(x):  # type: ignore[no-untyped-def]
        return jnp.swapaxes(x, 0, 1) * 2.0

    for side, crossed, crowding in ((512, 1.0, 1.0), (256, 1.0, 0.25), (60, KEPT, 0.0)):
        kernels = kernels_of(swapped, (side, side))
        (turn,), (extents,) = kernels.transposed_turns, kernels.transposed_extents
        assert turn.lines(extents) == (crossed, crowding)
        text = jax.jit(swapped).lower(shaped(side, side)).compile().as_text()
        module = hlo.parse(text)
        (work,) = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
        assert (work.transposed, work.collided) == (side**2 * crossed, side**2 * crowding)


def test_both_rungs_count_the_lines_of_all_arrays_of_a_loop() -> None:
    def summed(x, y):  # type: ignore[no-untyped-def]
        return jnp.swapaxes(x * 2.0 + y, 0, 1) * 2.0

    both = shaped(64, 256), shaped(64, 256)
    workload = Workload(
        step=lambda state, batch: (state, jnp.tanh(summed(*batch))),
        init=lambda: jnp.zeros(()),
        batch=both,
    )
    of = analyse(workload)
    whole = Layout(mesh=(("x", 8),), compute=(), storage=())
    cheap, dear = (
        propagator(of.analysis).judge(
            of.space,
            whole,
            CostModel(dataclasses.replace(CONSTANTS, shared=True, transposed_s=1e-9, collided_s=s)),
        )
        for s in (1e-9, 2e-9)
    )
    assert isinstance(cheap, Estimate) and isinstance(dear, Estimate)
    elements = 2 * 64 * 256
    assert dear.compute_s - cheap.compute_s == pytest.approx(8 * elements * 0.25e-9)
    module = hlo.parse(jax.jit(summed).lower(*both).compile().as_text())
    (work,) = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    assert (work.transposed, work.collided) == (elements, elements * 0.25)
