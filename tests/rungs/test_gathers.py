"""Copies for gathers along inner dimensions: as many elements as in the compiled program."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compat.judged import Communication
from autoshard.cost import CostModel
from autoshard.hlo import parse
from autoshard.hlo.steps import Launch, Steps
from autoshard.layout import Layout, rules
from autoshard.rungs.gathers import Copy, copies_of
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, propagator
from tests.programs import shaped

pytestmark = pytest.mark.usefixtures("no_line_is_kept")

SIZES = {"x": 4, "y": 2}
SHARED = dataclasses.replace(CONSTANTS, shared=True, transposed_s=1e-9)
COPIES = dataclasses.replace(SHARED, gathers_outermost=True)

Gathered = tuple[tuple[str, ...], ...]


def gather(extents: tuple[int, ...], gathered: Gathered, product: bool = False) -> Communication:
    elements = float(np.prod(extents))
    return Communication(
        kind="all_gather",
        axes=("x",),
        before=4 * elements,
        after=4 * elements * 4,
        block=0,
        tag=0,
        sum=None,
        extents=extents,
        gathered=gathered,
        to_product=product,
        location="",
        origin=None,
    )


@pytest.mark.parametrize(
    ("extents", "gathered", "product", "copies"),
    [
        ((12, 64), (("x",), ()), False, []),  # the outermost
        ((1, 12, 64), ((), ("x",), ()), False, []),  # so it is
        ((2, 48, 20), ((), (), ("x",)), False, [(15360, 1920, 0), (0, 7680, 0)]),
        ((2, 48, 20), ((), (), ("x",)), True, [(15360, 1920, 0), (61440, 7680, 0)]),
        ((2, 12, 80), ((), ("x",), ()), False, [(15360, 0, 0), (0, 0, 0)]),  # whole lines
        ((2, 1, 80), ((), ("x",), ()), False, [(0, 0, 0)]),  # a part is where it belongs
        (
            (2, 12, 20),
            ((), ("x",), ("y",)),
            False,
            [(3840, 480, 0), (0, 960, 0), (7680, 0, 0), (0, 0, 0)],
        ),
    ],
)
def test_what_is_gathered_along_an_inner_dimension_is_copied_there_and_back(
    extents: tuple[int, ...],
    gathered: Gathered,
    product: bool,
    copies: list[tuple[float, float, float]],
) -> None:
    found = copies_of(gather(extents, gathered, product), SIZES)
    assert found == [Copy(*copy) for copy in copies]


def test_lines_of_large_matrices_collide() -> None:
    before, after = copies_of(gather((512, 256), ((), ("x",))), SIZES)
    assert before.transposed == 512 * 256 and after.transposed == 512 * 1024
    # Both copies read whole columns: of the part 1 kB apart, of what is made 2 kB.
    assert before.collided == before.transposed / 4 and after.collided == after.transposed
    # Columns of 2048 that lie 8 kB apart; there they were rows of 64 bytes.
    _, after = copies_of(gather((2048, 16), ((), ("x",))), SIZES)
    assert after.collided == after.transposed * 1.5


DEVICES = 4
INNER, MIDDLE = PartitionSpec(None, None, "x"), PartitionSpec(None, "x", None)
COLUMNS, ROWS, WHOLE = PartitionSpec(None, "x"), PartitionSpec("x", None), PartitionSpec()


def whole(x: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, WHOLE))


PROGRAMS: dict[
    str, tuple[Callable[..., object], tuple[PartitionSpec, ...], list[tuple[int, ...]]]
] = {
    "activations": (lambda x: jnp.exp(whole(jnp.tanh(x))), (INNER,), [(2, 48, 80)]),
    "rows of them": (lambda x: jnp.exp(whole(jnp.tanh(x))), (MIDDLE,), [(2, 48, 80)]),
    "for a product": (lambda x, k: whole(jnp.tanh(x)) @ k, (INNER, WHOLE), [(2, 48, 80), (80, 96)]),
    "columns of a weight": (lambda x, k: x @ whole(k), (WHOLE, COLUMNS), [(2, 48, 80), (80, 96)]),
    "rows of a weight": (lambda x, k: x @ whole(k), (WHOLE, ROWS), [(2, 48, 80), (80, 96)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_copies_so(name: str) -> None:
    function, specs, shapes = PROGRAMS[name]
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    jitted = jax.jit(
        function,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=NamedSharding(mesh, WHOLE),
    )
    text = jitted.lower(*(shaped(*s) for s in shapes)).compile().as_text() or ""
    module = parse(text)
    steps = Steps(module, (("x", DEVICES),)).of(module.entry)
    compiled = sum(step.work.transposed for step in steps if isinstance(step, Launch))
    (which,) = (i for i, spec in enumerate(specs) if spec != WHOLE)
    gathered = tuple(("x",) if axis == "x" else () for axis in specs[which])
    extents = tuple(
        n // (DEVICES if axes else 1) for n, axes in zip(shapes[which], gathered, strict=True)
    )
    copies = copies_of(gather(extents, gathered), SIZES)
    assert sum(copy.transposed for copy in copies) == compiled
    assert (compiled == 0) == (name in ("rows of them", "rows of a weight"))


def stored() -> Workload:
    """A step whose weight is gathered before the product that it goes into."""

    def step(state, x):  # type: ignore[no-untyped-def]
        def loss(weight):  # type: ignore[no-untyped-def]
            return jnp.sum(jnp.tanh(x @ weight))

        return state - jax.grad(loss)(state), {}

    return Workload(step=step, init=lambda: jnp.zeros((80, 96)), batch=shaped(64, 80))


@pytest.mark.parametrize("dimension", [0, 1])
def test_rung_1_charges_for_them(dimension: int) -> None:
    of = analyse(stored())
    named = {axis.size: axis.name for axis in of.analysis.axes.axes}
    batch, name = named[64], named[(80, 96)[dimension]]
    layout = Layout(mesh=(("x", 8),), compute=rules({batch: "x"}), storage=rules({name: "x"}))
    judged = propagator(of.analysis)
    plain, other = (judged.judge(of.space, layout, CostModel(c)) for c in (SHARED, COPIES))
    assert other.communication_s == plain.communication_s
    kinds = [one.kind for one in plain.collectives]
    assert "all_gather" in kinds
    if dimension == 0:
        assert other.compute_s == plain.compute_s
    else:
        crossed = 80 * 96 * (1 + 1 / 8) * kinds.count("all_gather")
        assert other.compute_s - plain.compute_s > 8 * crossed * 1e-9
