"""Traced workloads: leaves, paths, the user's own constraints, batches to measure with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compat.jaxpr import jaxprs
from autoshard.errors import WorkloadError
from autoshard.lowering.problem import make_problem
from autoshard.program import placement as siting
from autoshard.program.program import sample_batch, trace, trace_function
from autoshard.target.target import find_target
from tests.workloads import mlp, stateless

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def program():
    return trace(mlp(), (("rate", 0.1),))


def test_leaves_have_paths_shapes_and_dtypes(program):
    assert [leaf.path for leaf in program.state] == [
        "state['count']",
        "state['key']",
        "state['momentum']['w1']",
        "state['momentum']['w2']",
        "state['params']['w1']",
        "state['params']['w2']",
    ]
    assert [leaf.path for leaf in program.batch] == ["batch['x']", "batch['y']"]
    assert [leaf.path for leaf in program.metrics] == ["metrics['count']", "metrics['loss']"]
    assert program.state[4].key == "['params']['w1']" and program.state[4].shape == (64, 128)
    assert program.state[1].is_key and program.state[1].shape == () and program.state[1].bytes == 8
    assert program.state_bytes == 4 + 8 + 4 * 64 * 128 * 4
    assert program.knobs == (("rate", 0.1),)
    assert len(program.step.jaxpr.invars) == len(program.inputs)
    assert len(program.step.jaxpr.outvars) == len(program.outputs)


def test_nothing_is_allocated_and_nothing_runs():
    def init():
        return {"w": jnp.zeros((1 << 30, 1 << 10))}  # 4 TiB

    program = trace(
        autoshard.Workload(
            step=lambda s, b: ({"w": s["w"] + b.mean()}, {}),
            init=init,
            batch=jax.ShapeDtypeStruct((1 << 40,), jnp.float32),
        )
    )
    assert program.state_bytes == 1 << 42


def constrained(batch):
    def inner(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("data", "model")))

    def body(c, _):
        return jax.lax.with_sharding_constraint(c, NamedSharding(MESH, P("data"))), None

    x, _ = jax.lax.scan(body, jax.jit(inner)(batch), None, length=2)
    return x.sum()


def test_the_users_constraints_are_taken_out_and_kept_aside():
    def step(state, batch):
        return {"w": state["w"] + constrained(batch)}, {}

    program = trace(stateless(step)())

    def constraints(closed):
        names = [e.primitive.name for e in jaxprs.equations(closed.jaxpr)]
        return names.count("sharding_constraint")

    assert constraints(program.step) == 0 and constraints(program.annotated) == 2
    assert program.annotated_meshes == ((("data", 4), ("model", 2)),)
    kept = trace(stateless(step)(), keep_constraints=True)
    assert constraints(kept.step) == 2 and kept.keeps_constraints
    assert kept.pinned_mesh == (("data", 4), ("model", 2))
    plain = trace(mlp())
    assert plain.annotated is None and plain.annotated_meshes == () and plain.pinned_mesh is None
    ones = jnp.ones((8, 8))
    (got,) = jaxprs.as_function(program.step)(jnp.ones((8, 16)), ones)
    np.testing.assert_array_equal(got, step({"w": jnp.ones((8, 16))}, ones)[0]["w"])


@pytest.mark.parametrize("mesh", [MESH, MESH.abstract_mesh], ids=["concrete", "abstract"])
def test_a_manual_region_is_found_with_its_source_line_and_pins_its_mesh(mesh):
    def step(state, batch):
        double = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return {"w": state["w"] + double(batch).sum()}, {}

    program = trace(stateless(step)())
    assert len(program.manual) == 1 and "test_program.py:" in program.manual[0]
    target = find_target(jax.devices())
    assert make_problem(program, target, "free", None).space.meshes == (
        (("data", 4), ("model", 2)),
    )
    with pytest.raises(WorkloadError, match=r"unsupported.*test_program.py.*takes 8 devices"):
        make_problem(program, find_target(jax.devices()[:4]), "free", None)


def test_evaluation_functions_have_no_new_state(program):
    state = jax.eval_shape(program.workload.init)
    batch = {"x": jax.ShapeDtypeStruct((5, 64), jnp.float32)}
    traced = trace_function(lambda s, b: b["x"] @ s["params"]["w1"], state, batch, program)
    assert not traced.returns_state and traced.outputs == traced.metrics
    assert [leaf.shape for leaf in traced.metrics] == [(5, 128)]
    assert [leaf.shape for leaf in traced.batch] == [(5, 64)]
    assert traced.state == program.state


def test_sampled_batches_are_the_workloads_own(program):
    flat = sample_batch(program, 3)
    expected = program.workload.sample(jax.random.key(3))
    np.testing.assert_array_equal(flat[0], expected["x"])
    np.testing.assert_array_equal(flat[1], expected["y"])
    assert not np.array_equal(flat[0], sample_batch(program, 4)[0])


def test_synthetic_batches_suit_every_dtype():
    shapes = {
        "half": jax.ShapeDtypeStruct((64, 4), jnp.bfloat16),
        "float": jax.ShapeDtypeStruct((64, 4), jnp.float32),
        "int": jax.ShapeDtypeStruct((64, 4), jnp.int32),
        "mask": jax.ShapeDtypeStruct((64, 4), jnp.bool),
        "zkey": jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype),
    }
    program = trace(stateless(lambda s, b: (s, {}), batch=shapes)())
    drawn = sample_batch(program, 0)
    byname = dict(zip([leaf.key for leaf in program.batch], drawn, strict=True))
    assert [str(v.dtype) for v in drawn] == ["float32", "bfloat16", "int32", "bool", "uint32"]
    assert 0.5 < byname["['float']"].std() < 1.5
    assert set(np.unique(byname["['int']"])) == {0, 1} and byname["['mask']"].any()
    assert byname["['zkey']"].shape == (3, 2)
    np.testing.assert_array_equal(drawn[0], sample_batch(program, 0)[0])


def test_a_workload_is_traced_as_it_is_given(program):
    """Two traces of one workload are one program; another rate is another."""
    target = find_target(jax.devices())

    def digest(p):
        return make_problem(p, target, "free", None).analysis.digest

    assert digest(program) == digest(trace(mlp()))
    assert digest(program) != digest(trace(mlp(rate=0.2)))
    assert digest(program) == digest(trace(dataclasses.replace(mlp(), sample=None)))


def test_where_sites_go_changes_no_digest(program, monkeypatch):
    """Plans of another version of autoshard, which puts constraints elsewhere, stay valid."""
    target = find_target(jax.devices())
    here = make_problem(program, target, "free", None).analysis
    monkeypatch.setattr(siting, "_only_transposed", lambda jaxpr: set())
    there = make_problem(program, target, "free", None).analysis
    assert [s.operation for s in here.sites.sites] != [s.operation for s in there.sites.sites]
    assert here.digest == there.digest


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"['v']": ("embed",)}, r"\['v'\].*is no leaf of the state.*\['w'\]"),
        ({"['w']": ("embed",)}, r"got \('embed',\), expected a name or None for each of its 2"),
        ({"['w']": ("embed", None, None)}, "of its 2 dim"),
        ({"['w']": "ab"}, "got 'ab', expected a name or None"),
    ],
)
def test_names_are_of_leaves_and_one_for_each_dimension(names, message):
    def step(state, batch):
        return {"w": state["w"] + jnp.mean(batch)}, {}

    workload = autoshard.Workload(
        step=step,
        init=lambda: {"w": jnp.ones((4, 2))},
        batch=jax.ShapeDtypeStruct((8, 2), jnp.float32),
        axis_names=names,
    )
    with pytest.raises(WorkloadError, match=message):
        trace(workload)
