"""Rung 1: what the partitioner makes of a layout, and that no step ends it."""

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import pytest

from autoshard.compat.shardy import partitioner
from autoshard.records.layout import Layout, rules
from autoshard.records.trial import Estimate, Failure, Kind
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.target.cost import CostModel
from autoshard.workload import Workload
from tests import programs
from tests.analysed import CONSTANTS, COST, analyse, baseline, judge, propagator, subject
from tests.programs import BATCH, EMBED, LAYERS, MLP, shaped, train


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_baselines_and_random_layouts_of_every_step_are_judged(name: str) -> None:
    of = subject(name)
    rng = random.Random(2)
    layouts = list({b.name: b.candidate.layout for b in baselines(of.space)}.values())
    layouts += [c.layout for c in (of.space.sample(rng) for _ in range(3)) if c]
    for layout in layouts:
        estimate = judge(of, layout)
        assert estimate.time_s == pytest.approx(estimate.compute_s + estimate.communication_s)
        assert estimate.time_s >= 0 and estimate.flops >= 0
        assert estimate.peak_memory_bytes >= estimate.state_bytes >= 0
        assert all(c.group_size > 1 and c.bytes > 0 for c in estimate.collectives)


def test_a_replicated_step_sends_nothing_and_does_everything() -> None:
    of = subject("scanned_gpt")
    estimate = judge(of, baseline(of.space, "replicated"))
    assert estimate.collectives == () and estimate.communication_s == 0.0
    assert estimate.state_bytes == of.analysis.program.state_bytes


def test_data_parallel_divides_the_work_and_sums_each_gradient_once() -> None:
    of = subject("custom_derivatives")
    alone = judge(of, baseline(of.space, "replicated"))
    spread = judge(of, baseline(of.space, "data parallel"))
    assert spread.flops < alone.flops / 6
    assert set(spread.bytes_by_kind()) == {"all_reduce"}
    gradients = 2 * EMBED * MLP * 4
    assert spread.bytes_by_kind()["all_reduce"] == gradients + 4  # and the loss
    assert all(c.group_size == 8 and c.mesh_axes == ("x",) for c in spread.collectives)


def test_what_the_module_did_not_say_is_told() -> None:
    of = subject("loops")
    estimate = judge(of, baseline(of.space, "replicated"))
    unknown = r"unknown trip count taken as 1 at programs\.py:\d+"
    assert all(re.fullmatch(unknown, said) for said in estimate.assumptions)
    assert len(estimate.assumptions) == 2
    of = subject("custom_derivatives")
    assert judge(of, baseline(of.space, "replicated")).assumptions == ()


def test_collectives_in_a_loop_count_every_iteration() -> None:
    of = subject("scanned_mlp")
    hidden = next(a.name for a in of.space.axes.axes if a.size == MLP)
    layout = of.space.layout((("x", 8),), {hidden: ("x",)}, {hidden: ("x",)})
    estimate = judge(of, layout)
    forward_and_back = [c for c in estimate.collectives if c.bytes == BATCH * EMBED * 4]
    assert sum(c.count for c in forward_and_back) == 2 * LAYERS
    assert set(estimate.bytes_by_kind()) == {"all_reduce"}


def test_a_sharded_contraction_divides_the_work() -> None:
    of = subject("custom_derivatives")
    hidden = next(a.name for a in of.space.axes.axes if a.size == MLP)
    layout = of.space.layout((("x", 8),), {hidden: ("x",)}, {hidden: ("x",)})
    alone = judge(of, baseline(of.space, "replicated"))
    assert judge(of, layout).flops == pytest.approx(alone.flops / 8, rel=0.1)


def test_state_bytes_are_those_of_one_device() -> None:
    of = subject("adamw")
    for name in ("FSDP", "tensor parallel"):
        estimate = judge(of, baseline(of.space, name))
        assert estimate.state_bytes < of.analysis.program.state_bytes / 6


def test_a_square_and_an_erf_keep_their_sharding() -> None:
    """CHLO operations, which Shardy has no rules for: without one they would be replicated."""

    def loss(params, x):
        h = (x @ params["up"]) ** 2
        return ((jax.lax.erf(h) @ params["down"]) ** 2).mean()

    def init():
        return {"up": programs.normal(0, EMBED, MLP), "down": programs.normal(1, MLP, EMBED)}

    of = analyse(train(loss, init, shaped(BATCH, EMBED)))
    alone = judge(of, baseline(of.space, "replicated"))
    spread = judge(of, baseline(of.space, "data parallel"))
    assert spread.flops < alone.flops / 6
    assert set(spread.bytes_by_kind()) == {"all_reduce"}
    assert not spread.unmodelled


def test_what_a_cast_widens_is_sent_narrow() -> None:
    """XLA's partitioner gives an elementwise operation its operands as its result is sharded: the
    bf16 operand of a cast is sent (so compiled for H100, jax 0.10.2), not its f32 result."""
    batch, width = 256, 640

    def step(w, x):
        wide = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return w, jnp.sum(jnp.sort(wide, axis=1)[:, ::3])

    state = jnp.zeros((96, width))
    of = analyse(Workload(step=step, init=lambda: state, batch=shaped(batch, 96)))
    axis = next(a.name for a in of.space.axes.axes if a.size == width)
    layout = of.space.layout((("x", 8),), {axis: ("x",)}, {axis: ("x",)})
    sent = [c.bytes for c in judge(of, layout).collectives if c.kind == "all_to_all"]
    assert batch * width * 2 // 8 in sent  # the way back, after the sort, is f32


def test_a_parameter_is_gathered_once_an_iteration() -> None:
    """XLA's common-subexpression elimination: recomputing the forward pass and the gradient of the
    input gather the same parameter to the same sharding, in one iteration of the backward loop."""
    of = subject("scanned_gpt")
    gathers = [
        c.count
        for c in judge(of, baseline(of.space, "FSDP")).collectives
        if c.kind == "all_gather" and c.bytes == EMBED * MLP * 4
    ]
    assert sum(gathers) == 2 * 2 * LAYERS  # up and down, forward and backward


def divided_along_two_dimensions():
    """A matrix at rest in 2 x 4 parts, whole where a batch over all devices meets it."""

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    of = analyse(train(loss, lambda: jnp.zeros((64, 128)), shaped(BATCH, 64)))
    rows, columns = (
        next(a.name for a in of.space.axes.axes if a.size == size) for size in (64, 128)
    )
    mesh = (("x", 2), ("y", 4))
    at_rest = {rows: ("x",), columns: ("y",)}
    return of, of.space.layout(mesh, {"batch": ("x", "y")}, at_rest)


@pytest.mark.parametrize(
    ("by_dimension", "expected"),
    [(True, [(("y",), 4), (("x",), 8)]), (False, [(("x", "y"), 8)])],
)
def test_what_lies_in_parts_of_two_dimensions_is_gathered_as_the_compiler_does(
    by_dimension, expected
) -> None:
    of, layout = divided_along_two_dimensions()
    cost = CostModel(dataclasses.replace(CONSTANTS, gathers_by_dimension=by_dimension))
    estimate = propagator(of.analysis).judge(of.space, layout, cost)
    part = 64 * 128 * 4 // 8
    gathers = [
        (c.mesh_axes, c.bytes)
        for c in estimate.collectives
        if c.kind == "all_gather" and c.bytes > part  # the batch is less
    ]
    assert gathers == [(axes, parts * part) for axes, parts in expected]


def test_a_sum_that_is_cut_along_two_dimensions_is_no_reduce_scatter() -> None:
    of = subject("scanned_gpt")
    fsdp = baseline(of.space, "FSDP")
    assert "reduce_scatter" in judge(of, fsdp).bytes_by_kind()
    ((embed, _),) = fsdp.state_rules
    hidden = next(a.name for a in of.space.axes.axes if a.size == MLP)
    both = of.space.layout(
        (("x", 2), ("y", 4)), {"batch": ("x", "y")}, {embed: ("x",), hidden: ("y",)}
    )
    matrix = EMBED * MLP * 4
    sent = [c for c in judge(of, both).collectives if c.bytes == matrix]
    assert not [c for c in sent if c.kind == "reduce_scatter"]
    assert sum(c.count for c in sent if c.kind == "all_reduce") == 2 * LAYERS  # up and down


def test_a_product_reads_what_was_gathered_for_it() -> None:
    """Where two dimensions of a product want one mesh axis the partitioner gathers an operand: the
    product reads the whole of it, though each device made only its part."""

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    inner, width = 8192, 64
    of = analyse(train(loss, lambda: jnp.zeros((inner, width)), shaped(BATCH, inner)))
    axis = next(a.name for a in of.space.axes.axes if a.size == width)
    cut = of.space.layout((("x", 8),), {"batch": ("x",), axis: ("x",)}, {axis: ("x",)})
    estimate = judge(of, cut)
    whole = BATCH * inner * 4
    assert [c.bytes for c in estimate.collectives if c.kind == "all_gather"] == [whole]
    # Both products read all of x: with an eighth of it the step comes to 2.8 times.
    assert estimate.bytes_accessed > 4 * whole


def test_a_prng_key_in_the_state_costs_nothing() -> None:
    """Its constraints name a mesh without axes; Shardy ends the process on an axis it lacks."""
    of = subject("key_in_state")
    estimate = judge(of, baseline(of.space, "data parallel"))
    assert set(estimate.bytes_by_kind()) <= {"all_reduce"}


def test_a_step_as_written_is_judged_by_its_own_constraints() -> None:
    of = subject("with_constraints")
    layout = Layout(mesh=(("data", 4), ("model", 2)), as_annotated=True)
    written = judge(of, layout)
    # The author's layout, said as rules.
    hidden = next(a.name for a in of.space.axes.axes if a.size == MLP)
    same = of.space.layout(
        layout.mesh, {"batch": ("data",), hidden: ("model",)}, {hidden: ("model",)}
    )
    estimate = judge(of, same)
    assert written.bytes_by_kind() == estimate.bytes_by_kind()
    assert written.flops == pytest.approx(estimate.flops, rel=0.05)


def test_a_layout_that_is_not_of_the_space_is_a_failure_not_an_exception() -> None:
    of = subject("custom_derivatives")
    outcome = propagator(of.analysis).judge(
        of.space, Layout(mesh=(("x", 8),), as_annotated=True), COST
    )
    assert isinstance(outcome, Failure) and outcome.kind is Kind.UNSUPPORTED
    of = subject("manual_region")
    outcome = propagator(of.analysis).judge(of.space, Layout(mesh=(("x", 8),)), COST)
    assert isinstance(outcome, Failure) and "data" in outcome.message


def test_what_the_partitioner_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLIR has an error of its own, which is neither a RuntimeError nor a ValueError."""
    of = subject("custom_derivatives")
    layout = baseline(of.space, "data parallel")
    unreadable = dataclasses.replace(of.space.specs(layout), mesh=(('"', 8),))
    monkeypatch.setattr(Propagator, "specs", lambda self, space, layout: unreadable)
    outcome = Propagator(of.analysis).judge(of.space, layout, COST)
    assert isinstance(outcome, Failure) and outcome.kind is Kind.UNSUPPORTED, outcome
    assert "parse" in outcome.message


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError])
@pytest.mark.parametrize("where", ["_estimate", "read"])
def test_a_bug_of_the_library_is_no_failure_of_a_layout(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    """A journal would keep the failure, and the search would silently do without the layout."""

    def broken(*_: object) -> Estimate:
        raise error("a bug")

    of = subject("custom_derivatives")
    monkeypatch.setattr(Propagator if where == "_estimate" else partitioner, where, broken)
    with pytest.raises(error, match="a bug"):
        Propagator(of.analysis).judge(of.space, baseline(of.space, "data parallel"), COST)


def test_judging_leaves_the_base_module_alone() -> None:
    of = subject("custom_derivatives")
    fresh = Propagator(of.analysis)
    layouts = [b.candidate.layout for b in baselines(of.space)]
    first = [fresh.judge(of.space, layout, COST) for layout in layouts]
    again = [fresh.judge(of.space, layout, COST) for layout in reversed(layouts)][::-1]
    for a, b in zip(first, again, strict=True):
        assert isinstance(a, Estimate) and isinstance(b, Estimate)
        assert (a.time_s, a.collectives, a.peak_memory_bytes) == (
            b.time_s,
            b.collectives,
            b.peak_memory_bytes,
        )


def test_zero_is_a_point_of_the_space() -> None:
    """Storage over an axis that compute does not use: parameters gathered, gradients scattered."""
    of = subject("scanned_gpt")
    embed = next(a.name for a in of.space.axes.axes if a.size == EMBED)
    zero = of.space.layout((("x", 8),), {"batch": ("x",)}, {embed: ("x",)})
    kinds = judge(of, zero).bytes_by_kind()
    assert kinds["all_gather"] > 0 and kinds["reduce_scatter"] > 0
    assert kinds.get("all_reduce", 0) < kinds["reduce_scatter"] / 10


def test_sharding_by_rules_with_size_one_axes_is_the_same() -> None:
    of = subject("custom_derivatives")
    plain = Layout(mesh=(("x", 8),), activation_rules=rules({"batch": "x"}))
    padded = Layout(
        mesh=(("x", 8), ("y", 1)), activation_rules=rules({"batch": ("x", "y")})
    ).canonical()
    assert judge(of, plain).time_s == judge(of, padded).time_s
