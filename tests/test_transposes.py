"""What the kernels of a step transpose on CPU: as many elements as in the compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import hlo
from autoshard.compat.executable import compile_module
from autoshard.cost import CostModel
from autoshard.hlo.steps import Launch, Steps
from autoshard.hlo.work import Work
from autoshard.kernels import KernelTable
from autoshard.layout import MeshShape
from autoshard.lowering import lower_step
from autoshard.trial import Estimate
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, baseline, kernels_of, propagator, target
from tests.programs import normal, shaped, train

pytestmark = pytest.mark.usefixtures("no_line_is_kept")

T, TALL, WIDE = (8, 24, 40), (40, 4, 24), (4, 24, 40)
HEADS, SCORES = (8, 24, 4, 20), (8, 4, 24, 24)

PRODUCTS = {
    "forward": ("btd,df->btf", T, (40, 50)),
    "towards the input": ("btf,df->btd", (8, 24, 50), (40, 50)),
    "towards the weight": ("btd,btf->df", T, (8, 24, 50)),
    "heads": ("btd,dhk->bthk", T, TALL),
    "from heads": ("bthk,dhk->btd", (8, 24, 4, 24), TALL),
    "to heads": ("btd,hkd->bthk", T, WIDE),
    "heads' weight": ("btd,bthk->hkd", T, (8, 24, 4, 24)),
    "scores": ("bthk,bshk->bhts", HEADS, HEADS),
    "averages": ("bhts,bshk->bthk", SCORES, HEADS),
    "of experts": ("ecd,edf->ecf", (4, 48, 40), (4, 40, 50)),
    "experts' weight": ("ecd,ecf->edf", (4, 48, 40), (4, 48, 50)),
    "towards the experts' input": ("ecf,edf->ecd", (4, 48, 50), (4, 40, 50)),
    "matrices": ("id,df->if", (48, 40), (40, 50)),
    "left turned": ("di,df->if", (40, 48), (40, 50)),
    "right turned": ("id,fd->if", (48, 40), (50, 40)),
    "result turned": ("id,df->fi", (48, 40), (40, 50)),
    "gates": ("bgh,dgh->bd", (18, 3, 40), (40, 3, 40)),
    "few of each": ("bgh,dgh->bd", (16, 3, 16), (40, 3, 16)),
}


def by_rung_1(function, *shapes) -> float:  # type: ignore[no-untyped-def]
    kernels = kernels_of(function, *shapes)
    alone = kernels.transposed_product < 0
    times = kernels.kernel_trips[kernels.transposed_kernel] * crossed(kernels)
    return float(np.dot(kernels.value_elements[kernels.transposed_value], times * alone))


def crossed(kernels: KernelTable) -> list[float]:
    both = zip(kernels.transposed_turns, kernels.transposed_extents, strict=True)
    return [turn.lines(extents).crossed for turn, extents in both]


def compiled(function, *shapes) -> float:  # type: ignore[no-untyped-def]
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text()
    return transposed_in(hlo.parse(text), ())


def transposed_in(module: hlo.HloModule, mesh: MeshShape) -> float:
    steps = Steps(module, mesh).of(module.entry)
    return sum(step.work.transposed for step in steps if isinstance(step, Launch))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_copy_what_they_cannot_read_as_it_lies(name: str) -> None:
    equation, *shapes = PRODUCTS[name]

    def product(a, b):  # type: ignore[no-untyped-def]
        return jnp.einsum(equation, a, b)

    assert by_rung_1(product, *shapes) == compiled(product, *shapes)


def test_some_of_these_products_copy() -> None:
    equation, *shapes = PRODUCTS["gates"]
    assert compiled(lambda a, b: jnp.einsum(equation, a, b), *shapes) == 40 * 3 * 40


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.swapaxes(x, 1, 2) * 2.0,
        lambda x: jnp.moveaxis(x, 0, -1) * 2.0,
        lambda x: jnp.swapaxes(x, 0, 1) * 2.0,
        lambda x: jnp.tanh(jnp.swapaxes(x, 1, 2)) + 1.0,
    ],
)
def test_transposes_that_are_written_out(function) -> None:  # type: ignore[no-untyped-def]
    shape = (24, 30, 40)
    assert by_rung_1(function, shape) == compiled(function, shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.T @ y,
        lambda x, y: (x.T @ y).T,
        lambda x, y: (x.T @ y).T + jnp.sin(x.T @ y).T,
    ],
)
def test_matrices_beside_products_change_places_for_nothing(function) -> None:  # type: ignore[no-untyped-def]
    shapes = (40, 50), (40, 60)
    assert by_rung_1(function, *shapes) == compiled(function, *shapes)


def test_a_loop_transposes_in_every_turn() -> None:
    def looped(w, x):  # type: ignore[no-untyped-def]
        def turn(y, _):  # type: ignore[no-untyped-def]
            return jnp.tanh(jnp.einsum("bgh,dgh->bd", y.reshape(18, 3, 40), w)), None

        return jax.lax.scan(turn, x, length=5)[0]

    shapes = (120, 3, 40), (18, 120)
    assert by_rung_1(looped, *shapes) == 5 * 120 * 3 * 40


SHARED = dataclasses.replace(CONSTANTS, shared=True)
COSTS = [CostModel(dataclasses.replace(SHARED, transposed_s=s)) for s in (0.0, 1e-9)]


@pytest.mark.parametrize(
    ("equation", "batch", "weight", "elements"),
    [
        # Every device copies the whole weight,
        ("bgh,dgh->bd", (24, 3, 40), (40, 3, 40), 8 * 40 * 3 * 40),
        # and its part of the batch.
        ("bth,btd->hd", (24, 20, 40), (), 24 * 20 * 40),
    ],
)
def test_rung_1_adds_up_the_devices_of_a_host(
    equation: str, batch: tuple[int, ...], weight: tuple[int, ...], elements: int
) -> None:
    def step(w, x):  # type: ignore[no-untyped-def]
        return w, jnp.sum(jnp.tanh(jnp.einsum(equation, x, w if weight else x)))

    of = analyse(Workload(step=step, init=lambda: jnp.zeros(weight), batch=shaped(*batch)))
    layout = baseline(of.space, "data parallel")
    without, with_ = (propagator(of.analysis).judge(of.space, layout, c) for c in COSTS)
    assert isinstance(without, Estimate) and isinstance(with_, Estimate)
    assert with_.compute_s - without.compute_s == pytest.approx(elements * 1e-9)
    assert with_.time_s - without.time_s == pytest.approx(elements * 1e-9)


@pytest.mark.parametrize("name", ["replicated", "data parallel", "FSDP"])
@pytest.mark.parametrize(
    ("equation", "weight"), [("bd,dgh->bgh", (256, 3, 40)), ("bd,df->bf", (256, 48))]
)
def test_gradients_are_transposed_as_compiled(
    equation: str, weight: tuple[int, ...], name: str
) -> None:
    """In the parts in which they are kept; matrices only where parts of them are summed."""

    def loss(params, batch):  # type: ignore[no-untyped-def]
        return jnp.mean(jnp.tanh(jnp.einsum(equation, batch["x"], params["w"])))

    of = analyse(train(loss, lambda: {"w": normal(0, *weight)}, {"x": shaped(192, 256)}))
    layout = baseline(of.space, name)
    without, with_ = (propagator(of.analysis).judge(of.space, layout, c) for c in COSTS)
    assert isinstance(without, Estimate) and isinstance(with_, Estimate)
    specs = of.space.specs(layout)
    made = compile_module(lower_step(of.analysis, specs, target()), jax.devices()[:8])
    elements = transposed_in(hlo.parse(made.hlo_text), specs.mesh)
    assert (elements > 0) == (name != "replicated" or len(weight) > 2)
    assert with_.compute_s - without.compute_s == pytest.approx(8 * elements * 1e-9)


def test_each_array_that_makes_what_is_transposed_is_read_across_lines() -> None:
    def swapped(x, y):  # type: ignore[no-untyped-def]
        return jnp.swapaxes(x * y + 1.0, 0, 1) * 2.0

    shapes = (40, 50), (40, 50)
    kernels = kernels_of(swapped, *shapes)
    assert kernels.transposed_arrays.tolist() == [2]
    assert compiled(swapped, *shapes) == 2 * 40 * 50


def test_what_makes_a_convolutions_operand_is_read_across_lines_too() -> None:
    def gradient(a, b, g):  # type: ignore[no-untyped-def]
        return jax.lax.conv_general_dilated(
            a * b, g, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC")
        )

    images = (24, 12, 12, 40)
    shapes = images, images, (24, 12, 12, 20)
    kernels = kernels_of(gradient, *shapes)
    across = zip(kernels.transposed_arrays.tolist(), crossed(kernels), strict=True)
    assert [arrays for arrays, out in across if out] == [2]
    assert compiled(gradient, *shapes) == 2 * 24 * 12 * 12 * 40


def test_a_kernel_gradient_copies_the_images() -> None:
    """XLA:CPU takes channels for the batch; only what it brings to the front changes places."""

    def gradient(x, g):  # type: ignore[no-untyped-def]
        return jax.lax.conv_general_dilated(
            x, g, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC")
        )

    shapes = (24, 12, 12, 40), (24, 12, 12, 20)
    assert by_rung_1(gradient, *shapes) == compiled(gradient, *shapes) == 24 * 12 * 12 * 40


def test_what_collides_and_what_is_turned_around_has_prices_of_its_own() -> None:
    own = dataclasses.replace(
        SHARED,
        transposed_s=1e-9,
        collided_s=3e-9,
        turned_flops_per_s=SHARED.contract_flops_per_s / 9,
    )
    plain = dataclasses.replace(own, collided_s=0.0, turned_flops_per_s=0.0)
    work = Work(
        opcode="fusion",
        name="f",
        matmul_flops=(("f32", 9e9),),
        turned_flops=3e9,
        transposed=2000.0,
        collided=500.0,
    )
    more = CostModel(own).kernel_s(work) - CostModel(plain).kernel_s(work)
    beyond = 3e9 * 8 / SHARED.contract_flops_per_s
    assert more == pytest.approx(8 * (500 * 2e-9 + beyond))
    flops, bytes_, trips, moved, collided = (np.array([n]) for n in (3e9, 0.0, 1.0, 2e3, 500.0))
    one, other = (
        CostModel(c).kernels_s(flops, bytes_, trips, ["f32"], moved, collided, np.array([True]))
        for c in (own, plain)
    )
    assert one - other == pytest.approx(more)


def test_both_rungs_price_a_transposed_element_alike() -> None:
    work = Work(opcode="fusion", name="f", bytes=16000.0, transposed=2000.0)
    slow, fast = (costs.kernel_s(work) for costs in COSTS)
    assert fast - slow == pytest.approx(8 * 2000 * 1e-9)
    nothing = np.zeros(1)
    one = [
        costs.kernels_s(nothing, np.array([16000.0]), np.ones(1), [""], np.array([2000.0]))
        for costs in COSTS
    ]
    assert one == pytest.approx([slow, fast])
    assert slow > 8 * CONSTANTS.launch_s


COPIES_OF = """HloModule m, is_scheduled=true

%f (p: {taken}) -> {made} {{
  %p = {taken} parameter(0)
{copies}
}}

ENTRY %main (x: {taken}) -> {made} {{
  %x = {taken} parameter(0)
  ROOT %fusion = {made} fusion(%x), kind=kLoop, calls=%f
}}
"""


@pytest.mark.parametrize(
    ("taken", "made", "copies", "elements"),
    [
        (  # what a gather left with its last dimension in front, and a gradient takes turned
            "f32[64,48,80]{1,0,2}",
            "f32[48,80,64]{2,1,0}",
            """  %c = f32[64,48,80]{2,1,0} copy(%p)
  %t = f32[48,80,64]{1,0,2} transpose(%c), dimensions={1,2,0}
  ROOT %r = f32[48,80,64]{2,1,0} copy(%t)""",
            64 * 48 * 80,
        ),
        (  # there and back
            "f32[64,48,80]{2,1,0}",
            "f32[64,48,80]{2,1,0}",
            """  %c = f32[64,48,80]{1,0,2} copy(%p)
  ROOT %r = f32[64,48,80]{2,1,0} copy(%c)""",
            0,
        ),
        (  # the same, with a dimension of one element in between
            "f32[1,64,48,80]{3,2,1,0}",
            "f32[64,48,80]{2,1,0}",
            """  %c = f32[1,64,48,80]{2,1,3,0} copy(%p)
  %b = f32[64,48,80]{1,0,2} bitcast(%c)
  ROOT %r = f32[64,48,80]{2,1,0} copy(%b)""",
            0,
        ),
        (  # a bitcast turns a square, and the copies are there and back
            "f32[64,64]{1,0}",
            "f32[64,64]{0,1}",
            """  %c = f32[64,64]{0,1} copy(%p)
  %b = f32[64,64]{1,0} bitcast(%c)
  ROOT %r = f32[64,64]{0,1} copy(%b)""",
            0,
        ),
        (  # rows are joined: what the first copy made is another array
            "f32[64,48,80]{2,1,0}",
            "f32[80,3072]{1,0}",
            """  %c = f32[64,48,80]{1,0,2} copy(%p)
  %b = f32[3072,80]{0,1} bitcast(%c)
  %t = f32[80,3072]{1,0} transpose(%b), dimensions={1,0}
  ROOT %r = f32[80,3072]{1,0} copy(%t)""",
            64 * 48 * 80,
        ),
        (  # one copy goes on into another, and is needed besides
            "f32[64,80]{1,0}",
            "f32[64,80]{1,0}",
            """  %c = f32[64,80]{0,1} copy(%p)
  %k = f32[64,80]{1,0} copy(%c)
  ROOT %r = f32[64,80]{1,0} add(%c, %k)""",
            64 * 80,
        ),
    ],
)
def test_copies_of_copies_in_one_kernel_are_one(
    taken: str, made: str, copies: str, elements: int
) -> None:
    text = COPIES_OF.format(taken=taken, made=made, copies=copies)
    assert transposed_in(hlo.parse(text), ()) == elements


def test_copies_that_are_kernels_of_their_own_are_each_made() -> None:
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[64,80]) -> f32[64,80] {
  %x = f32[64,80]{1,0} parameter(0)
  %c = f32[64,80]{0,1} copy(%x)
  ROOT %r = f32[64,80]{1,0} copy(%c)
}
"""
    assert transposed_in(hlo.parse(text), ()) == 2 * 64 * 80
