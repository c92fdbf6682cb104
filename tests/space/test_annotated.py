"""The step as its author wrote it, as a baseline."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compat.jaxpr import jaxprs
from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.records.layout import Candidate, Layout
from autoshard.records.trial import Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.space.baselines import baselines
from autoshard.target.target import find_target
from autoshard.workload import Workload
from tests import programs
from tests.analysed import (
    COST,
    analyse,
    baseline,
    judge,
    run,
    run_plain,
    subject,
    worst_error,
)
from tests.programs import BATCH, EMBED, MLP, shaped


def inputs(workload: Workload) -> dict[str, tuple[tuple[str, ...], ...]]:
    """What "as annotated" shards each input by."""
    of = analyse(workload)
    assert of.space.annotated is not None
    paths = [x.path for x in of.analysis.program.inputs]
    return dict(zip(paths, of.space.annotated.specs.inputs, strict=True))


def test_what_the_constraints_imply_for_state_and_batch() -> None:
    assert inputs(programs.with_constraints()) == {
        "state['a']": ((), ("model",)),
        "state['b']": (("model",), ()),
        "batch": (("data",), ()),
    }


def test_the_search_s_own_step_has_none_of_them() -> None:
    program = trace(programs.with_constraints())

    def names(closed: jaxprs.ClosedJaxpr) -> list[str]:
        return [e.primitive.name for e in jaxprs.equations(closed.jaxpr)]

    assert program.annotated is not None
    assert names(program.annotated).count("sharding_constraint") >= 5
    assert "sharding_constraint" not in names(program.step)
    assert program.annotated_meshes == ((("data", 4), ("model", 2)),)
    assert program.pinned_mesh is None
    kept = trace(programs.with_constraints(), (), True)
    assert "sharding_constraint" in names(kept.step)
    assert kept.pinned_mesh == (("data", 4), ("model", 2))


def test_as_written_costs_what_the_same_layout_costs_by_rules() -> None:
    """Constraints of one's own move and hold what they constrain: it is not for nothing."""
    of = analyse(programs.with_constraints())
    here = judge(of, baseline(of.space, "as annotated"))
    twins = [
        judge(of, b.candidate.layout)
        for b in baselines(of.space)
        if b.name == "data x TP" and sorted(n for _, n in b.candidate.layout.mesh) == [2, 4]
    ]
    figures = [(e.bytes_accessed, e.peak_memory_bytes, e.flops) for e in twins]
    assert (here.bytes_accessed, here.peak_memory_bytes, here.flops) in figures


def constrained_init(mesh: Mesh) -> Workload:
    def init():
        w = jnp.ones((EMBED, MLP))
        return {"w": jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P("data", "model")))}

    def step(state, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        return jax.tree.map(lambda w: w * 0.9, state), {"y": jnp.sum(x @ state["w"])}

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


def test_shardings_that_init_declares_are_taken() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = inputs(constrained_init(mesh))
    assert found["state['w']"] == (("data",), ("model",))


def test_shardings_of_a_nested_jit_are_the_author_s_too() -> None:
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    over = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P("data"))
    assert mesh.axis_names == over.mesh.axis_names

    inner = jax.jit(lambda x, w: jnp.tanh(x @ w), in_shardings=(over, None), out_shardings=over)

    def step(state, x):
        return state, {"y": jnp.sum(inner(x, state["w"]))}

    workload = Workload(
        step=step, init=lambda: {"w": jnp.ones((EMBED, MLP))}, batch=shaped(BATCH, EMBED)
    )
    assert inputs(workload)["batch"] == (("data",), ())
    program = trace(workload)
    assert all(not jaxprs.has_shardings(e) for e in jaxprs.equations(program.step.jaxpr))


def test_constraints_on_a_mesh_of_another_size_are_no_baseline() -> None:
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    assert analyse(constrained_init(mesh)).space.annotated is None


def test_a_step_without_constraints_has_no_such_baseline() -> None:
    assert subject("scanned_gpt").space.annotated is None


def test_constraints_on_two_meshes_are_no_baseline_and_no_obstacle() -> None:
    one, two = (AbstractMesh((8,), (name,), axis_types=(AxisType.Auto,)) for name in "ab")

    def step(state, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(one, P("a")))
        y = jax.lax.with_sharding_constraint(x @ state["w"], NamedSharding(two, P(None, "b")))
        return state, {"y": jnp.sum(y)}

    workload = Workload(
        step=step, init=lambda: {"w": jnp.ones((EMBED, MLP))}, batch=shaped(BATCH, EMBED)
    )
    assert analyse(workload).space.annotated is None


def test_loops_and_keys_in_a_step_as_written_are_judged() -> None:
    """Its operations have numbers of their own: loops are not those of the search's step."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def pinned(x, *spec):  # type: ignore[no-untyped-def]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(state, x):  # type: ignore[no-untyped-def]
        key, noise = jax.random.split(state["key"])

        def loss(w):  # type: ignore[no-untyped-def]
            x_ = pinned(x + jax.random.normal(noise, x.shape), "data", None)

            def layer(h, w):  # type: ignore[no-untyped-def]
                return pinned(jnp.tanh(h @ pinned(w, None, "model")), "data", None), None

            h, _ = jax.lax.scan(layer, x_, w)
            back, _ = jax.lax.scan(layer, h, w, reverse=True)
            return jnp.mean((back - x_) ** 2)

        slope = jax.grad(loss)(state["w"])
        return {"key": key, "w": state["w"] - slope}, {"norm": jnp.sum(slope**2)}

    of = analyse(
        Workload(
            step=step,
            init=lambda: {"key": jax.random.key(0), "w": jnp.ones((4, EMBED, EMBED)) * 0.01},
            batch=shaped(BATCH, EMBED),
        )
    )
    assert of.space.annotated is not None
    specs = dict(
        zip(
            (x.path for x in of.analysis.program.inputs),
            of.space.annotated.specs.inputs,
            strict=True,
        )
    )
    assert specs["state['key']"] == () and len(specs["state['w']"]) == 3
    layout = baseline(of.space, "as annotated")
    propagator = Propagator(of.analysis_for(layout))
    assert isinstance(propagator.judge(of.space, layout, COST), Estimate)


def with_key_and_square(mesh: Mesh) -> Workload:
    """A key beside a weight both of whose dimensions are one axis; constraints on the batch."""

    def step(state, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        key, now = jax.random.split(state["key"])
        h = jnp.tanh(x @ state["w"])
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data")))
        h = (h @ state["w"]) * jax.random.bernoulli(now, 0.9, h.shape)
        return {"key": key, "w": state["w"] * 0.9}, {"y": jnp.sum(h)}

    def init():
        return {"key": jax.random.key(0), "w": jnp.ones((EMBED, EMBED))}

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


def test_what_is_fixed_is_looked_for_beside_keys_and_in_square_weights() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    program = trace(with_key_and_square(mesh))
    here = find_target(mesh)
    batch = make_problem(program, here, "free", {"batch": "data"})
    assert "as annotated" in {b.name for b in baselines(batch.space)}
    (square,) = [a.name for a in batch.space.axes.axes if "state['w'][0]" in a.where]
    whole = make_problem(program, here, "free", {square: "model"})
    reason = whole.space.contains(Candidate(layout=Layout(mesh=(), as_annotated=True)))
    assert reason is not None and "is fixed to model, not so state['w'] as written" in reason


def test_a_square_weight_that_is_divided_once_is_divided_as_fixed() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    by_rows = NamedSharding(mesh, P("model"))

    def step(state, x):
        w = jax.lax.with_sharding_constraint(state["w"], by_rows)
        return {"w": w * 0.9}, {"y": jnp.sum(jnp.tanh(x @ w) @ w)}

    workload = Workload(
        step=step, init=lambda: {"w": jnp.ones((EMBED, EMBED))}, batch=shaped(BATCH, EMBED)
    )
    program = trace(workload)
    free = make_problem(program, find_target(mesh), "free", None)
    (square,) = [a.name for a in free.space.axes.axes if "state['w'][0]" in a.where]
    held = make_problem(program, find_target(mesh), "free", {square: "model"})
    assert held.space.annotated is not None
    assert held.space.annotated.specs.inputs[0] == (("model",), ())
    held_too = [axis for dim in held.space.axes.inputs[0] for axis, _ in dim]
    assert held_too == [square, square]
    assert "as annotated" in {b.name for b in baselines(held.space)}


@pytest.mark.parametrize("mesh_shape", ["free", "fixed"])
def test_an_axis_of_one_device_in_the_authors_mesh_is_no_other_mesh(mesh_shape: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))

    def step(state, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model")))
        return jax.tree.map(lambda w: w * 0.9, state), {"y": jnp.sum(x @ state["w"])}

    workload = Workload(
        step=step, init=lambda: {"w": jnp.ones((EMBED, MLP))}, batch=shaped(BATCH, EMBED)
    )
    of = make_problem(trace(workload), find_target(mesh), mesh_shape, None)
    layout = baseline(of.space, "as annotated")
    assert isinstance(judge(of, layout), Estimate)
    run(of, layout)


def looping(total: Callable[[jax.Array], jax.Array]) -> Workload:
    """A while loop whose condition asks for the total of what it goes over."""

    def step(state, x):  # type: ignore[no-untyped-def]
        y, _ = jax.lax.while_loop(
            lambda carry: (total(carry[0]) < 1e3) & (carry[1] < 3),
            lambda carry: (jnp.tanh(carry[0] @ state["w"]), carry[1] + 1),
            (x, 0),
        )
        return state, jnp.sum(y)

    return Workload(step=step, init=lambda: {"w": jnp.eye(16) / 2}, batch=shaped(32, 16))


def in_a_condition(constraint: NamedSharding) -> Workload:
    return looping(lambda x: jnp.sum(jax.lax.with_sharding_constraint(x, constraint)))


def in_a_condition_s_function(constraint: NamedSharding) -> Workload:
    return looping(jax.jit(jnp.sum, in_shardings=constraint))


def in_a_linear_solver(constraint: NamedSharding) -> Workload:
    def step(state, x):  # type: ignore[no-untyped-def]
        matrix = state["w"] @ state["w"].T + jnp.eye(16)

        def times(v):  # type: ignore[no-untyped-def]
            return jax.lax.with_sharding_constraint(matrix, constraint) @ v

        def solve(matvec, b):  # type: ignore[no-untyped-def]
            return jax.scipy.sparse.linalg.cg(matvec, b, maxiter=3)[0]

        y = jax.lax.custom_linear_solve(times, x[0], solve, symmetric=True)
        return state, jnp.sum(y) + jnp.mean(x)

    return Workload(step=step, init=lambda: {"w": jnp.eye(16) / 2}, batch=shaped(32, 16))


def without_products(constraint: NamedSharding) -> Workload:
    """An average of parameters, in which nothing is worth a site."""

    def step(state, x):  # type: ignore[no-untyped-def]
        mean = state["w"] * 0.9 + x * 0.1
        return {"w": jax.lax.with_sharding_constraint(mean, constraint)}, None

    return Workload(step=step, init=lambda: {"w": jnp.ones((32, 16))}, batch=shaped(32, 16))


def put_on_devices(constraint: NamedSharding) -> Workload:
    def step(state, x):  # type: ignore[no-untyped-def]
        x, rate = jax.device_put((x, 0.5 * jnp.ones(3)), (constraint, None))
        return {"w": state["w"] - rate[0] * x.T @ x}, jnp.mean(x @ state["w"])

    def init():  # type: ignore[no-untyped-def]
        return {"w": jax.device_put(jnp.eye(16) / 2, constraint)}

    return Workload(step=step, init=init, batch=shaped(32, 16))


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (in_a_condition, 1),
        (in_a_condition_s_function, 1),
        (in_a_linear_solver, 1),
        (without_products, 1),
        (put_on_devices, 1),
        (put_on_devices, -1),
    ],
)
def test_the_author_s_constraints_are_taken_out_wherever_they_are(make, order) -> None:
    devices = np.array(jax.devices()[:8][::order])
    of = analyse(make(NamedSharding(Mesh(devices, ("data",)), P("data"))))
    found = {b.name: b.candidate.layout for b in baselines(of.space)}
    assert found.keys() >= {"as annotated", "replicated", "data parallel"}
    for name in ("as annotated", "replicated", "data parallel"):
        judge(of, found[name])
        assert worst_error(of, run(of, found[name]), run_plain(of)) < 1e-5


def test_what_is_put_on_devices_is_a_baseline_as_constraints_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    found = inputs(put_on_devices(NamedSharding(mesh, P("data"))))
    assert found == {"state['w']": (("data",), ()), "batch": (("data",), ())}
