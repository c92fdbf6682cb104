"""Baselines: what people write by hand, found by structure."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.records.layout import Layout
from autoshard.space.baselines import baselines
from autoshard.target.target import find_target
from autoshard.workload import Workload
from tests import programs
from tests.analysed import analyse, baseline, judge, subject
from tests.programs import EMBED, HEADS, MLP, shaped


def test_a_gpt_has_all_of_them() -> None:
    space = subject("scanned_gpt").space
    found = baselines(space)
    names = {b.name for b in found}
    assert names == {
        "replicated",
        "data parallel",
        "FSDP",
        "FSDP, gathered once",
        "ZeRO-1",
        "tensor parallel",
        "FSDP x TP",
        "FSDP x TP, gathered once",
        "data x TP",
    }
    assert len({b.candidate for b in found}) == len(found)
    meshes = {b.candidate.layout.mesh for b in found if b.name == "FSDP x TP"}
    assert {tuple(n for _, n in mesh) for mesh in meshes} == {(4, 2), (2, 4)}


def test_data_parallel_shards_the_batch_and_nothing_else() -> None:
    layout = baseline(subject("scanned_gpt").space, "data parallel")
    assert layout.activation_rules == (("batch", ("x",)),) and layout.state_rules == ()
    clip = baseline(subject("clip").space, "data parallel")
    assert {axis for axis, _ in clip.activation_rules} == {"batch.image", "batch.text"}


def test_fsdp_stores_an_eighth_and_computes_as_data_parallel_does() -> None:
    of = subject("scanned_gpt")
    layout = baseline(of.space, "FSDP")
    replicated = judge(of, baseline(of.space, "replicated"))
    fsdp = judge(of, layout)
    assert fsdp.state_bytes == replicated.state_bytes / 8
    assert layout.activation_rules == baseline(of.space, "data parallel").activation_rules


def test_tensor_parallel_cuts_columns_then_rows() -> None:
    of = subject("scanned_gpt")
    sizes = {a.name: a.size for a in of.space.axes.axes}
    cuts = [
        {sizes[axis] for axis, _ in b.candidate.layout.activation_rules}
        for b in baselines(of.space)
        if b.name == "tensor parallel"
    ]
    assert any({HEADS, MLP} <= cut and EMBED not in cut for cut in cuts)


def test_tensor_parallel_of_an_equal_width_mlp_takes_every_other_axis() -> None:
    of = subject("equal_width_mlp")
    weights = of.analysis.axes.inputs[: len(of.analysis.program.state)]
    cuts = [
        {axis for axis, _ in b.candidate.layout.activation_rules}
        for b in baselines(of.space)
        if b.name == "tensor parallel" and not b.candidate.layout.conflict_losers
    ]
    assert cuts
    for cut in cuts:
        for (rows,), (columns,) in weights:
            assert len({rows[0], columns[0]} & cut) == 1
    # One all-reduce for two products forward: fewer than if each product were summed.
    layout = baseline(of.space, "tensor parallel")
    assert sum(c.count for c in judge(of, layout).collectives) <= 5


def test_tensor_parallel_of_weights_in_a_row_by_columns() -> None:
    space = subject("equal_width_mlp").space
    assert (((), ("x",)),) * 4 in [
        space.specs(b.candidate.layout).inputs[:4]
        for b in baselines(space)
        if b.name == "tensor parallel"
    ]


def test_experts_are_found_by_what_they_are_multiplied_with() -> None:
    of = subject("grouped_experts")
    experts = next(a.name for a in of.space.axes.axes if a.size == 8 and not a.is_loop)
    found = {
        (b.name, b.candidate.layout.mesh): b.candidate.layout
        for b in baselines(of.space)
        if b.name.endswith("EP")
    }
    shapes = [tuple(n for _, n in mesh) for name, mesh in found if name == "FSDP x EP"]
    assert sorted(shapes) == [(2, 4), (4, 2), (8,)]
    for (name, mesh), layout in found.items():
        every, last = tuple(axis for axis, _ in mesh), mesh[-1][0]
        assert dict(layout.activation_rules) == {"batch": every, experts: (last,)}
        rest = {axis: to for axis, to in layout.state_rules if axis != experts}
        assert (set(rest.values()) == {every}) is (name == "FSDP x EP")


def test_the_step_as_written_is_a_baseline_where_it_has_constraints() -> None:
    found = baselines(subject("with_constraints").space)
    assert found[0].name == "as annotated"
    assert found[0].candidate.layout == Layout(mesh=(("data", 4), ("model", 2)), as_annotated=True)
    assert "as annotated" not in {b.name for b in baselines(subject("scanned_gpt").space)}


def test_what_lies_beside_the_examples_takes_no_baseline_away() -> None:
    """A key, positions that 8 devices do not divide, and a weight for each class of the state."""

    def loss(w, batch):  # type: ignore[no-untyped-def]
        noise = jax.random.normal(batch["key"], (EMBED,))
        x = batch["x"] + noise + jnp.sum(batch["positions"])
        return jnp.mean(jax.nn.log_softmax(x @ w) * batch["class_weights"])

    def step(w, batch):  # type: ignore[no-untyped-def]
        value, slope = jax.value_and_grad(loss)(w, batch)
        return w - slope, {"loss": value}

    batch = {
        "x": shaped(32, EMBED),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "positions": shaped(197),
        "class_weights": shaped(64),
    }
    of = analyse(Workload(step=step, init=lambda: jnp.ones((EMBED, 64)), batch=batch))
    assert {a.size for a in of.space.axes.axes if a.is_batch} == {32, 197}
    found = {b.name: b.candidate.layout for b in baselines(of.space)}
    assert {"data parallel", "FSDP", "tensor parallel", "FSDP x TP", "data x TP"} <= set(found)
    (examples,) = dict(found["data parallel"].activation_rules)
    assert of.space.axes.axis(examples).size == 32
    for layout in found.values():
        judge(of, layout)


def test_experts_on_one_device_have_one_layout() -> None:
    program = trace(programs.grouped_experts())
    one = make_problem(program, find_target(jax.devices()[:1]), "free", None)
    assert [b.name for b in baselines(one.space)] == ["replicated"]


def test_examples_that_the_state_holds_are_stored_as_they_are_computed() -> None:
    """A memory of each example, which a layout may store whole too: it is no part of the batch."""

    def step(state: dict, x: jax.Array) -> tuple[dict, dict]:
        held = jnp.tanh(x @ state["w"] + state["held"])
        return {"w": state["w"] * 0.9, "held": held}, {"mean": jnp.mean(held)}

    def init() -> dict:
        return {"w": jnp.ones((16, 16)), "held": jnp.zeros((32, 16))}

    space = analyse(Workload(step=step, init=init, batch=shaped(32, 16))).space
    data = baseline(space, "data parallel")
    assert space.specs(data).inputs == ((("x",), ()), ((), ()), (("x",), ()))
    fsdp = space.specs(baseline(space, "FSDP"))
    assert fsdp.inputs[0] == (("x",), ()) and fsdp.inputs[1] in ((("x",), ()), ((), ("x",)))
    whole = space.layout(data.mesh, dict(data.activation_rules), {})
    assert space.contains(space.candidate(whole)) is None


def test_fsdp_divides_what_can_be_divided() -> None:
    """Of columns in three parts no part can be, nor can the two words of a key."""

    def step(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
        def loss(trained: dict) -> jax.Array:
            q, k, v = jnp.moveaxis((x @ trained["w"] + trained["b"]).reshape(-1, 3, 32), 1, 0)
            noise = jax.random.normal(state["key"], q.shape)
            return jnp.mean((jax.nn.sigmoid(q) * jnp.tanh(k) + v + noise) ** 2)

        trained = {name: state[name] for name in ("w", "b")}
        value, slopes = jax.value_and_grad(loss)(trained)
        key = jax.random.split(state["key"], 1)[0]
        return {**jax.tree.map(jnp.subtract, trained, slopes), "key": key}, value

    def init() -> dict:
        return {"w": jnp.ones((64, 96)), "b": jnp.ones(96), "key": jax.random.key(0)}

    program = trace(Workload(step=step, init=init, batch=shaped(64, 64)))
    for count in (2, 8):
        space = make_problem(program, find_target(jax.devices()[:count]), "free", None).space
        assert {b.name for b in baselines(space)} >= {"FSDP", "ZeRO-1", "tensor parallel"}
        fsdp = space.specs(baseline(space, "FSDP"))
        stored = {x.path: s for x, s in zip(program.state, fsdp.inputs, strict=False)}
        assert stored == {
            "state['w']": (("x",), ()),
            "state['b']": ((),),
            "state['key']": (),
        }
        assert 2 not in {axis.size for axis in space.shardable()}


def test_blocks_that_no_router_chooses_are_no_experts() -> None:
    def step(params, x):
        def loss(p):
            heads = jnp.einsum("bd,dhk->bhk", x, p["split"])
            mixed = jnp.einsum("bhk,hkm->bhm", heads, p["blocks"])
            return (jnp.einsum("bhm,hmd->bd", jnp.tanh(mixed), p["join"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params)), {}

    shapes = {"split": (64, 8, 16), "blocks": (8, 16, 32), "join": (8, 32, 64)}
    of = analyse(
        Workload(
            step=step,
            init=lambda: {name: jnp.ones(shape) for name, shape in shapes.items()},
            batch=jax.ShapeDtypeStruct((16, 64), "float32"),
        )
    )
    names = {b.name for b in baselines(of.space)}
    assert "FSDP x block TP" in names and not any("EP" in name for name in names)
    assert not any(a.is_selected for a in of.space.axes.axes)


@pytest.mark.parametrize("name", ["grouped_experts", "mixture_of_experts"])
def test_a_router_chooses_experts(name: str) -> None:
    names = {b.name for b in baselines(subject(name).space)}
    assert "FSDP x EP" in names and not any("block" in each for each in names)
