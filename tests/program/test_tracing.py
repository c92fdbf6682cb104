"""Tracing: what a program holds, and what is refused with which words."""

import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.jaxpr import jaxprs
from autoshard.errors import WorkloadError
from autoshard.lowering import lower as lowering
from autoshard.program.program import Program, sample_batch, trace
from autoshard.workload import Workload
from tests import programs
from tests.analysed import analyse, baseline, target
from tests.programs import BATCH, EMBED, MLP, normal, shaped


def traced(step: Callable, state: object = None, batch: object = None) -> Program:
    made = {"w": jnp.ones((4, 4))} if state is None else state
    return trace(Workload(step=step, init=lambda: made, batch=batch or shaped(8, 4)))


def test_leaves_have_paths_in_flat_order_and_sizes() -> None:
    program = trace(programs.key_in_state())
    paths = [leaf.path for leaf in program.state]
    assert paths == sorted(paths) and "state['params']['a']" in paths
    by_path = {leaf.path: leaf for leaf in program.state}
    assert by_path["state['keys']"].is_key and by_path["state['keys']"].bytes == 8 * 8
    assert by_path["state['params']['a']"].bytes == EMBED * MLP * 4
    assert by_path["state['zero']"].bytes == 0
    assert program.state_bytes == sum(leaf.bytes for leaf in program.state)
    assert [leaf.path for leaf in program.batch] == ["batch"]
    assert [leaf.path for leaf in program.metrics] == ["metrics['loss']"]


def test_nothing_is_allocated() -> None:
    huge = 1 << 20

    def step(w, x):
        return w * 0.5, jnp.sum(x @ w)

    program = trace(
        Workload(step=step, init=lambda: jnp.zeros((huge, huge)), batch=shaped(huge, huge))
    )
    assert program.state_bytes == 4 * huge**2


def test_a_step_that_cannot_be_traced_shows_the_user_s_own_traceback() -> None:
    def step(state, x):
        return {"w": state["w"] @ jnp.ones((5, 5))}, {}

    with pytest.raises(TypeError) as caught:
        traced(step)
    lines = "".join(traceback.format_exception(caught.value))
    assert "jnp.ones((5, 5))" in lines
    assert any("while tracing step" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (lambda s: {"w": s["w"][:2]}, r"state\['w'\].*\[2, 4\].*\[4, 4\]"),
        (lambda s: {"w": s["w"].astype(jnp.bfloat16)}, r"state\['w'\].*bfloat16.*float32"),
        (lambda s: {**s, "m": s["w"]}, r"unexpected: state\['m'\]"),
        (lambda s: {"v": s["w"]}, r"missing: state\['w'\]; unexpected: state\['v'\]"),
        (lambda s: (s["w"],), "structure"),
    ],
)
def test_a_state_that_changes_says_which_leaf(new: Callable, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        traced(lambda s, x: (new(s), {"loss": jnp.sum(x)}))


@pytest.mark.parametrize("result", [lambda s: s, lambda s: (s,), lambda s: (s, {}, {})])
def test_a_step_that_returns_something_else(result: Callable) -> None:
    with pytest.raises(WorkloadError, match="new state, metrics"):
        traced(lambda s, x: result(s))


def test_a_model_fn_that_returns_something_else() -> None:
    with pytest.raises(WorkloadError, match=r"autoshard\.Workload, got dict"):
        trace({"step": None})  # type: ignore[arg-type]


def test_a_batch_that_is_no_shape() -> None:
    with pytest.raises(WorkloadError, match="ShapeDtypeStruct"):
        traced(lambda s, x: (s, {}), batch={"x": 3.0})


def test_keys_whose_values_depend_on_the_sharding_are_refused() -> None:
    def uses_key(state, x):
        return state, jax.random.normal(state["key"], (4,))

    with pytest.raises(WorkloadError, match=r"state\['key'\].*rbg"):
        traced(uses_key, {"key": jax.random.key(0, impl="rbg")})

    def makes_key(state, x):
        noise = jax.random.normal(jax.random.key(0, impl="rbg"), (8, 4))
        return state, jnp.sum(x + noise)

    with pytest.raises(WorkloadError, match=r"test_tracing\.py"):
        traced(makes_key)


def test_state_in_the_host_s_memory_is_refused() -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = here.with_memory_kind("pinned_host")

    def init():
        return {"w": jnp.ones((4, 4)), "m": jax.device_put(jnp.zeros((4, 4)), host)}

    def step(state, x):
        m = jax.device_put(state["m"], here.with_memory_kind("device")) + jnp.mean(x)
        return {"w": state["w"] - m, "m": jax.device_put(m, host)}, jnp.sum(m)

    with pytest.raises(WorkloadError, match=r"state\['m'\] of the state is kept in the host's"):
        trace(Workload(step=step, init=init, batch=shaped(8, 4)))

    def back(state, x):
        new, loss = step(state, x)
        return new | {"m": state["m"]}, loss

    program = trace(
        Workload(step=back, init=lambda: jax.tree.map(jnp.ones_like, init()), batch=shaped(8, 4))
    )
    assert len(program.state) == 2


def test_what_goes_by_way_of_a_reference_counts_as_what_it_is() -> None:
    """Gradients that add up in place, batch by batch, are gradients all the same."""

    def step(w, x):
        total = jax.new_ref(jnp.zeros_like(w))
        moving = jax.new_ref(w)

        def turn(_, part):
            total[...] += jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(moving[...])
            return None, None

        jax.lax.scan(turn, None, x)
        return w - 0.1 * total[...], jnp.sum(total[...])

    work = Workload(step=step, init=lambda: jnp.ones((16, 16)) / 16, batch=shaped(4, 32, 16))
    of = analyse(work)
    names = {e.primitive.name for e in jaxprs.equations(of.analysis.program.step.jaxpr)}
    assert "scan" in names and not any("ref" in name or name == "swap" for name in names)
    layout = baseline(of.space, "FSDP")
    expected = step(jnp.ones((16, 16)) / 16, jnp.ones((4, 32, 16)))[0]
    (new, _) = lowering.jit_step(of.analysis, of.space.specs(layout), target())(
        jnp.ones((16, 16)) / 16, jnp.ones((4, 32, 16))
    )
    np.testing.assert_allclose(new, expected, rtol=1e-5)


def test_large_closures_are_warned_about_with_their_size() -> None:
    big = np.ones((1024, 512), np.float32)

    def step(state, x):
        return state, jnp.sum(x) + jnp.sum(jnp.asarray(big))

    with pytest.warns(UserWarning, match=r"2097152 bytes.*float32\[1024, 512\]"):
        traced(step)


def test_constraints_are_taken_out_everywhere() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def pinned(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))

    @jax.jit
    def inner(x):
        return pinned(x * 2.0)

    def step(state, x):
        y, _ = jax.lax.scan(lambda c, _: (pinned(jnp.tanh(c)), None), x, None, length=2)
        y = jax.lax.cond(jnp.sum(y) > 0, lambda: pinned(y), lambda: y)
        y = pinned(pinned(y))
        return state, jnp.sum(inner(jax.checkpoint(pinned)(y)) @ state["w"])

    program = traced(step, {"w": jnp.ones((4, 4))}, shaped(8, 4))

    def count(closed: jaxprs.ClosedJaxpr) -> int:
        return sum(
            e.primitive.name == "sharding_constraint" for e in jaxprs.equations(closed.jaxpr)
        )

    assert program.annotated is not None
    assert count(program.annotated) == 6
    assert count(program.step) == count(program.plain) == 0
    made = jaxprs.as_function(program.step)(jnp.ones((4, 4)), jnp.ones((8, 4)))
    assert float(made[-1]) == pytest.approx(8 * 4 * 4 * 2 * np.tanh(np.tanh(1.0)), rel=1e-5)
    assert program.annotated_meshes == ((("data", 8),),)


def test_a_shared_function_without_constraints_is_left_as_it_is() -> None:
    program = trace(programs.jit_called_six_times())
    assert program.annotated is None and program.step is program.plain


def test_meshes_that_contradict_each_other_are_refused() -> None:
    one, two = (
        jax.make_mesh((8,), (name,), axis_types=(jax.sharding.AxisType.Auto,)) for name in "ab"
    )

    def step(state, x):
        for mesh, name in ((one, "a"), (two, "b")):
            x = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P(name), out_specs=P(name))(x)
        return state, jnp.sum(x)

    with pytest.raises(WorkloadError, match=r"several meshes.*test_tracing\.py"):
        traced(step)


def test_made_up_batches_are_normal_and_zero_or_one_and_the_same_for_a_seed() -> None:
    batch = {
        "x": shaped(64, 8),
        "low": shaped(64, dtype=jnp.bfloat16),
        "n": shaped(64, dtype=jnp.int32),
        "b": shaped(64, dtype=jnp.bool_),
    }
    program = traced(lambda s, b: (s, jnp.sum(b["x"])), batch=batch)
    values = dict(zip(sorted(batch), sample_batch(program, 3), strict=True))
    again = dict(zip(sorted(batch), sample_batch(program, 3), strict=True))
    other = dict(zip(sorted(batch), sample_batch(program, 4), strict=True))
    for name, leaf in batch.items():
        assert values[name].shape == leaf.shape and values[name].dtype == leaf.dtype
        assert np.array_equal(values[name], again[name])
    assert set(values["n"]) == {0, 1}
    assert 0.5 < values["x"].std() < 1.5 and not np.array_equal(values["x"], other["x"])


def test_a_sample_of_the_wrong_shape_says_which_leaf() -> None:
    workload = programs.scanned_mlp()
    good = trace(Workload(**{**_fields(workload), "sample": lambda key: jnp.ones((BATCH, EMBED))}))
    assert sample_batch(good, 0)[0].shape == (BATCH, EMBED)
    bad = trace(Workload(**{**_fields(workload), "sample": lambda key: jnp.ones((BATCH, 3))}))
    with pytest.raises(WorkloadError, match=r"batch.*\[16, 3\].*\[16, 32\]"):
        sample_batch(bad, 0)
    tree = trace(Workload(**{**_fields(workload), "sample": lambda key: (1, 2)}))
    with pytest.raises(WorkloadError, match="structure"):
        sample_batch(tree, 0)


def _fields(workload: Workload) -> dict[str, object]:
    return {"step": workload.step, "init": workload.init, "batch": workload.batch}


def test_init_may_hold_anything_a_pytree_may() -> None:
    state = {"w": normal(0, 4, 4), "none": None, "empty": (), "deep": [{"n": jnp.int32(3)}]}
    program = traced(lambda s, x: (s, jnp.sum(x)), state)
    assert [leaf.path for leaf in program.state] == ["state['deep'][0]['n']", "state['w']"]
