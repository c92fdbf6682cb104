"""Sums over devices: rung 1 sends what the compiled program sends, by kind, mesh axes and bytes."""

import collections
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.xla.executable import compile_module
from autoshard.lowering.lower import lower_step
from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Layout
from autoshard.records.trial import Collective, Estimate
from autoshard.rungs.compile import hlo
from autoshard.rungs.compile.job import CompileResult, compile_in_process, request_for
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.cost import CostModel
from autoshard.target.target import Target, find_target
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, baseline, propagator, subject, target
from tests.hardware import needs
from tests.programs import normal, shaped, train

EMBED, HIDDEN, LENGTH, BATCH = 128, 64, 16, 32
CPU = CostModel(dataclasses.replace(CONSTANTS, forms_reduce_scatter=False, folds_sums=False))


def dense(*, bias: bool) -> Workload:
    """The gradient of the kernel is a product, that of the bias a reduction."""

    def loss(params, batch):
        found = batch["x"] @ params["kernel"]
        if bias:
            found += params["bias"]
        return jnp.mean((jnp.tanh(found) - batch["y"]) ** 2)

    kernel, shift = normal(0, EMBED, HIDDEN), normal(1, HIDDEN)
    return train(
        loss,
        lambda: {"kernel": kernel, "bias": shift} if bias else {"kernel": kernel},
        {"x": shaped(BATCH, LENGTH, EMBED), "y": shaped(BATCH, LENGTH, HIDDEN)},
    )


def judged(of: SearchProblem, layout: Layout, cost: CostModel) -> tuple[Collective, ...]:
    estimate = propagator(of.analysis).judge(of.space, layout, cost)
    assert isinstance(estimate, Estimate), estimate
    return estimate.collectives


def compiled(of: SearchProblem, layout: Layout) -> tuple[Collective, ...]:
    """On the CPU devices that are here."""
    module = lower_step(of.analysis, of.space.specs(layout), target())
    program = compile_module(module, jax.devices()[:8])
    return hlo.count(hlo.parse(program.hlo_text), layout.mesh).collectives


def compiled_elsewhere(
    of: SearchProblem, layout: Layout, there: Target, folder: pathlib.Path
) -> tuple[Collective, ...]:
    module = lower_step(of.analysis, of.space.specs(layout), there)
    program = compile_in_process(request_for(module, there, str(folder), 120.0))
    assert isinstance(program, CompileResult), program
    return hlo.count(hlo.parse(program.hlo_text), layout.mesh).collectives


def sums(collectives: tuple[Collective, ...]) -> dict[tuple[str, ...], int]:
    """Bytes by kind and mesh axes."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for one in collectives:
        if one.kind in ("all_reduce", "reduce_scatter"):
            found[one.kind, *sorted(one.mesh_axes)] += one.bytes * one.count
    return dict(found)


MESH = (("x", 2), ("y", 2), ("z", 2))
X, XY, XYZ = ("x",), ("x", "y"), ("x", "y", "z")
WIDE, NARROW, TIME = f"kernel[0]:{EMBED}", f"kernel[1]:{HIDDEN}", f"x[1]:{LENGTH}"


@pytest.mark.parametrize(
    ("compute", "storage"),
    [
        ({"batch": XYZ}, {}),
        ({"batch": XYZ}, {WIDE: X}),
        ({"batch": XYZ}, {WIDE: XY}),
        ({"batch": XYZ}, {WIDE: XYZ}),
        ({"batch": XYZ}, {WIDE: X, NARROW: ("z",)}),
        ({"batch": XYZ}, {WIDE: XY, NARROW: ("z",)}),
        ({"batch": X, TIME: ("y", "z")}, {}),
        ({"batch": X, TIME: ("y", "z")}, {WIDE: X}),
        ({"batch": X, TIME: ("y",)}, {WIDE: XY}),
        ({"batch": X, TIME: ("y",), NARROW: ("z",)}, {NARROW: ("z",)}),
        ({"batch": XY, NARROW: ("z",)}, {NARROW: ("z",), WIDE: X}),
        ({"batch": XY, NARROW: ("z",)}, {NARROW: ("z", "x")}),  # already divided, then more
    ],
)
def test_sums_as_compiled_for_cpu(compute: dict, storage: dict) -> None:
    of = analyse(dense(bias=True))
    layout = Layout(
        mesh=MESH, activation_rules=tuple(compute.items()), state_rules=tuple(storage.items())
    )
    assert sums(judged(of, layout, CPU)) == sums(compiled(of, layout))


PATCH, CHANNELS, FEATURES, SIDE = 4, 32, 512, 16  # whole tiles of a TPU, divided too


def patches() -> Workload:
    """The gradient of the kernel is a convolution whose features are the batch."""

    def loss(params, batch):
        found = jax.lax.conv_general_dilated(
            batch["x"],
            params["kernel"],
            (PATCH, PATCH),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.mean((jnp.tanh(found) - batch["y"]) ** 2)

    return train(
        loss,
        lambda: {"kernel": normal(0, PATCH, PATCH, CHANNELS, FEATURES)},
        {
            "x": shaped(BATCH, SIDE, SIDE, CHANNELS),
            "y": shaped(BATCH, SIDE // PATCH, SIDE // PATCH, FEATURES),
        },
    )


OUT, IN, ROWS = f"kernel[3]:{FEATURES}", f"kernel[2]:{CHANNELS}", f"kernel[0]:{PATCH}"
CONVOLVED = [
    ({"batch": XYZ}, {}),
    ({"batch": XYZ}, {OUT: X}),
    ({"batch": XYZ}, {OUT: XY}),
    ({"batch": XYZ}, {IN: X, OUT: ("z",)}),
    ({"batch": XYZ}, {ROWS: ("y",)}),
    ({"batch": XY, OUT: ("z",)}, {OUT: ("z",), IN: X}),
    ({"batch": XY, IN: ("z",)}, {IN: ("z",), OUT: X}),
]


@pytest.mark.parametrize(("compute", "storage"), CONVOLVED)
def test_sums_of_convolutions_as_compiled_for_cpu(compute: dict, storage: dict) -> None:
    of = analyse(patches())
    layout = of.space.layout(MESH, compute, compute | storage)
    assert sums(judged(of, layout, CPU)) == sums(compiled(of, layout))


def branches() -> Workload:
    """Three products of one activation: backward, three sums of its gradient are added up."""

    def loss(params, x):
        x = jnp.tanh(x @ params["in"])
        return jnp.mean(sum(x @ params[name] for name in "abc") ** 2)

    def init():
        shapes = {"in": (EMBED, EMBED), **dict.fromkeys("abc", (EMBED, HIDDEN))}
        return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    return train(loss, init, shaped(BATCH, EMBED))


def hidden_divided() -> tuple[SearchProblem, Layout]:
    of = analyse(branches())
    hidden = next(a.name for a in of.space.axes.axes if a.size == HIDDEN)
    return of, of.space.layout((("x", 8),), {hidden: X}, {hidden: X})


def test_sums_that_are_added_up_are_sent_each_on_cpu_and_once_elsewhere() -> None:
    of, layout = hidden_divided()
    whole = BATCH * EMBED * 4
    on_cpu = sums(judged(of, layout, CPU))
    assert on_cpu == sums(compiled(of, layout))
    assert on_cpu["all_reduce", "x"] // whole == 3
    assert sums(judged(of, layout, CostModel(CONSTANTS)))["all_reduce", "x"] // whole == 1


def stacked() -> Workload:
    def loss(params, x):
        for up, down in zip(params["up"], params["down"], strict=True):
            x = jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    def init():
        seeds = range(3)
        return {
            "up": [normal(i, EMBED, HIDDEN) for i in seeds],
            "down": [normal(-i, HIDDEN, EMBED) for i in seeds],
        }

    return train(loss, init, shaped(BATCH, EMBED))


def payloads(collectives: tuple[Collective, ...]) -> list[int]:
    return sorted(one.bytes for one in collectives for _ in range(one.count))


def test_every_array_of_a_combined_sum_counts() -> None:
    """XLA:CPU makes one operation of all sums."""
    of = analyse(stacked())
    layout = of.space.layout((("x", 8),), {"batch": X}, {})
    predicted, (one,) = judged(of, layout, CPU), compiled(of, layout)
    assert one.arrays == len(predicted) == 7  # the gradients, and the loss
    assert one.bytes == sum(c.bytes for c in predicted) == 6 * EMBED * HIDDEN * 4 + 4


def test_sums_that_need_each_other() -> None:
    of = analyse(stacked())
    rules = {a.name: X for a in of.space.axes.axes if a.size == HIDDEN}
    layout = of.space.layout((("x", 8),), rules, rules)
    for found in (judged(of, layout, CPU), compiled(of, layout)):
        # All but the gradient of the batch.
        assert payloads(found) == [BATCH * EMBED * 4] * 5
        assert {c.arrays for c in found} == {1}


@pytest.mark.parametrize("name", ["FSDP", "FSDP, gathered once", "ZeRO-1"])
def test_collectives_of_divided_states_are_as_many_as_compiled(name: str) -> None:
    of = subject("momentum_layers")
    layout = baseline(of.space, name)
    counts, again = (
        collections.Counter(c.kind for c in found for _ in range(c.count * c.arrays))
        for found in (judged(of, layout, CPU), compiled(of, layout))
    )
    assert counts == again  # not their bytes: XLA:CPU computes bfloat16 in float32


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize("baseline_name", ["FSDP", "FSDP, gathered once", "ZeRO-1"])
def test_parameters_are_gathered_as_compiled_elsewhere(
    platform: str, name: str, baseline_name: str, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    of, there = subject("momentum_layers"), find_target(name)
    layout = baseline(of.space, baseline_name)

    def gathered(collectives: tuple[Collective, ...]) -> int:
        return sum(c.bytes * c.count for c in collectives if c.kind == "all_gather")

    predicted = judged(of, layout, cost_model(there))
    assert gathered(predicted) == gathered(compiled_elsewhere(of, layout, there, tmp_path))


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(
    "storage", [{}, {WIDE: X}, {WIDE: XY}, {WIDE: X, NARROW: ("z",)}, {WIDE: XY, NARROW: ("z",)}]
)
def test_sums_of_products_as_compiled_elsewhere(
    platform: str, name: str, storage: dict, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    there = find_target(name)
    of = analyse(dense(bias=False))
    layout = Layout(
        mesh=MESH, activation_rules=(("batch", XYZ),), state_rules=tuple(storage.items())
    )
    predicted = judged(of, layout, cost_model(there))
    assert sums(predicted) == sums(compiled_elsewhere(of, layout, there, tmp_path))


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
@pytest.mark.parametrize(("compute", "storage"), CONVOLVED)
def test_sums_of_convolutions_as_compiled_elsewhere(
    platform: str, name: str, compute: dict, storage: dict, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    there = find_target(name)
    of = analyse(patches())
    layout = of.space.layout(MESH, compute, compute | storage)
    predicted = judged(of, layout, cost_model(there))
    assert sums(predicted) == sums(compiled_elsewhere(of, layout, there, tmp_path))


@pytest.mark.deviceless
@pytest.mark.parametrize(("platform", "name"), [("cuda", "h100:1x8"), ("tpu", "v5e:2x4")])
def test_sums_that_are_added_up_as_compiled_elsewhere(
    platform: str, name: str, tmp_path: pathlib.Path
) -> None:
    needs(platform)
    of, layout = hidden_divided()
    there = find_target(name)
    predicted = judged(of, layout, cost_model(there))
    assert sums(predicted) == sums(compiled_elsewhere(of, layout, there, tmp_path))
