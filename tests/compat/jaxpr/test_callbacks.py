"""What of a step exists only in the process that traced it: prints go, all else is refused."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compat.jaxpr import callbacks as process_bound
from autoshard.compat.jaxpr import jaxprs
from autoshard.errors import WorkloadError
from autoshard.program.program import trace
from autoshard.records.trial import Measurement, Trial
from tests.programs import shaped


def workload(of_batch: Callable[[jax.Array], jax.Array]) -> autoshard.Workload:
    def step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(of_batch(batch @ w) ** 2))(state)
        return state - 0.1 * gradient, loss

    return autoshard.Workload(step=step, init=lambda: jnp.ones((16, 16)) / 16, batch=shaped(32, 16))


def chatty(x: jax.Array) -> jax.Array:
    """Prints everywhere: in order, in a scan, in a branch, a loop's condition, a manual region."""
    jax.debug.print("{}", x[0, 0], ordered=True)

    def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        jax.debug.callback(lambda v: None, x[0, 0])
        return jnp.tanh(x), None

    def taken(x: jax.Array) -> jax.Array:
        jax.debug.print("taken {}", x[0, 0], ordered=True)
        return x * 2.0

    x, _ = jax.lax.scan(turn, x, None, length=3)
    x = jax.lax.cond(jnp.sum(x) > 0, taken, lambda x: x, x)

    def more(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        jax.debug.print("turn {}", pair[0])
        return pair[0] < 2

    _, ahead = jax.lax.while_loop(
        more, lambda pair: (pair[0] + 1, pair[1] * 0.5), (0, jax.lax.stop_gradient(x))
    )
    return x + ahead


def test_what_only_shows_values_is_left_out_and_told() -> None:
    program = trace(workload(chatty), ())
    assert len(program.shows) == 4 and all(line.startswith(__file__) for line in program.shows)
    for closed in (program.step, program.plain):
        assert not closed.jaxpr.effects
        names = {eqn.primitive.name for eqn in jaxprs.equations(closed.jaxpr)}
        assert not names & process_bound._PRINTS and {"scan", "while", "cond"} <= names
        again, lines = process_bound.without_prints(closed)
        assert again is closed and lines == ()


def test_prints_in_manual_regions_go_too() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))

    def region(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return x * 2.0

    mapped = jax.shard_map(region, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    program = trace(workload(mapped), ())
    assert len(program.shows) == 1 and not program.step.jaxpr.effects


def test_a_step_that_prints_is_searched_and_runs(calibration: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autoshard.search(
            lambda: workload(chatty),
            jax.devices()[:8],
            budget=autoshard.Budget(candidates=4, compiles=1, profiles=0),
            calibration=calibration,
        )
    (note,) = [note for note in plan.evidence.notes if "plan shows no values" in note]
    assert note.count(__file__) == 4
    state, metrics = plan.step(plan.init(), plan.put(np.ones((32, 16), np.float32)))
    quiet = jax.jit(workload(lambda x: chatty(x)).step)
    want, loss = quiet(jnp.ones((16, 16)) / 16, jnp.ones((32, 16)))
    np.testing.assert_allclose(state, want, rtol=1e-5)
    np.testing.assert_allclose(metrics, loss, rtol=1e-5)


def test_init_is_looked_at_too() -> None:
    work = workload(jnp.tanh)

    def showing() -> jax.Array:
        jax.debug.print("{}", work.init()[0, 0], ordered=True)
        return work.init()

    program = trace(dataclasses.replace(work, init=showing), ())
    assert len(program.shows) == 1
    assert not program.init.jaxpr.effects and not program.plain_init.jaxpr.effects


def test_an_init_that_only_this_process_can_run_is_run_here(calibration: Any) -> None:
    """It may read the weights that training goes on from."""
    work = workload(jnp.tanh)
    kept = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)

    def reading() -> jax.Array:
        return jax.pure_callback(lambda: kept, jax.ShapeDtypeStruct(kept.shape, kept.dtype))

    plan = autoshard.search(
        lambda: dataclasses.replace(work, init=reading),
        jax.devices()[:8],
        budget=autoshard.Budget(candidates=4, compiles=2, profiles=2, rounds=2),
        calibration=calibration,
    )
    assert isinstance(plan.trial, Trial) and isinstance(plan.trial.profiled, Measurement)
    assert plan.trial.profiled.numerics == "exact" and plan.check().passed
    np.testing.assert_array_equal(plan.init(), kept)


def pure(x: jax.Array) -> jax.Array:
    shown = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + jax.pure_callback(np.sin, shown, jax.lax.stop_gradient(x))


def ordered(x: jax.Array) -> jax.Array:
    io_callback(lambda v: None, None, jax.lax.stop_gradient(x)[0, 0], ordered=True)
    return x


@custom_partitioning
def divided(x: jax.Array) -> jax.Array:
    return x * 2.0


divided.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: x * 2.0, result.sharding, ()),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i j -> i j",
)


def routine(x: jax.Array) -> jax.Array:
    made = jax.ffi.ffi_call("a_routine_of_mine", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return x + made(jax.lax.stop_gradient(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (pure, "calls a Python function"),
        (ordered, "calls a Python function"),
        (lambda x: x + divided(jax.lax.stop_gradient(x)), "custom_partitioning"),
        (routine, "jax.ffi"),
    ],
)
def test_what_no_other_process_can_run_is_refused_with_its_line(
    function: Callable[[jax.Array], jax.Array], words: str
) -> None:
    def in_a_loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (function(x), None), x, None, length=2)[0]

    for one in (function, in_a_loop):
        with pytest.raises(WorkloadError, match=rf"test_callbacks\.py:\d+ .*{words}"):
            trace(workload(one), ())
