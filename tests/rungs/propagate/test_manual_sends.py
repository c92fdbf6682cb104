"""What a user's own `shard_map` computes and sends counts in rung 1 as in the compiled program."""

import collections
import types
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from autoshard.compat.shardy import stablehlo
from autoshard.compat.xla.executable import compile_module
from autoshard.lowering.lower import lower_step
from autoshard.program.analysis import analyse as analyse_for
from autoshard.program.program import trace
from autoshard.records.layout import Layout, rules
from autoshard.records.trial import Collective, Estimate
from autoshard.rungs.compile import hlo
from autoshard.rungs.propagate.manual_sends import collective_of
from autoshard.rungs.propagate.operations import operations_of
from autoshard.target.cost import CostModel
from autoshard.workload import Workload
from tests.analysed import CONSTANTS, analyse, propagator, target
from tests.programs import normal, shaped, train

MESH = (("data", 2), ("model", 4))
CPU = CostModel(CONSTANTS)
DEVICES = jax.devices()[:8]
ROWS, WIDE, OUT, TURNS = 64, 128, 256, 3


def region(body, in_specs, out_specs, **options):  # type: ignore[no-untyped-def]
    mesh = AbstractMesh(
        tuple(n for _, n in MESH), tuple(m for m, _ in MESH), axis_types=(AxisType.Auto,) * 2
    )
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def summed(x, up, down):  # type: ignore[no-untyped-def]
    """Megatron's pair of products."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "model")

    return region(body, (P("data"), P(None, "model"), P("model")), P("data"))(x, up, down)


def ring(x, up, down):  # type: ignore[no-untyped-def]
    """Parts travel around the devices of an axis, in a loop."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        def turn(_, x):  # type: ignore[no-untyped-def]
            x = jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])
            return jnp.tanh(x @ up) @ down

        return jax.lax.fori_loop(0, TURNS, turn, x)

    return region(body, (P(("data", "model")), P(), P()), P(("data", "model")))(x, up, down)


def exchanged(x, up, down):  # type: ignore[no-untyped-def]
    """The other collectives."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        whole = jax.lax.all_gather(x, "model", axis=0, tiled=True)
        parts = jax.lax.all_to_all(whole @ up, "model", 1, 0, tiled=True)
        added = jnp.sum(parts.reshape(4, *whole.shape[:1], -1), axis=0)
        return jax.lax.psum_scatter(added @ down, "model", scatter_dimension=0, tiled=True)

    specs = (P(("data", "model")), P(None, None), P("model"))
    return region(body, specs, P(("data", "model")), check_vma=False)(x, up, down)


def partly(x, up, down):  # type: ignore[no-untyped-def]
    """Only one axis is the user's; the partitioner has the other."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "model")

    specs = (P(), P(None, "model"), P("model"))
    return region(body, specs, P(), axis_names={"model"})(x, up, down)


def looking_up(x, up, down):  # type: ignore[no-untyped-def]
    """Lookups in a region over some axes: what is found is divided over the partitioner's."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        rows = jnp.clip(jnp.abs(x[:, 0]).astype(jnp.int32), 0, up.shape[0] - 1)
        return x + jax.lax.psum(up[rows] @ down, "model")

    specs = (P(), P(None, "model"), P("model"))
    return region(body, specs, P(), axis_names={"model"})(x, up, down)


def narrow(x, up, down):  # type: ignore[no-untyped-def]
    """What is only cast or broadcast before it is sent, goes in or comes out is written there."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        each = jax.lax.all_gather(jnp.tanh(x), "model")  # one more dimension
        found = (jnp.sum(each, 0) * x).astype(jnp.bfloat16) @ up
        return jax.lax.psum((found * found) @ down, "data").astype(jnp.float32)

    inside = region(body, (P(None, "model"), P("model"), P()), P(), check_vma=False)
    return inside(x, up.astype(jnp.bfloat16), down.astype(jnp.bfloat16))


def chosen(x, up, down):  # type: ignore[no-untyped-def]
    """Of two branches the one that computes more counts; the other sends nothing."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        def much(x):  # type: ignore[no-untyped-def]
            return jax.lax.psum(jnp.tanh(x @ up) @ down, "model")

        def little(x):  # type: ignore[no-untyped-def]
            return jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])

        return jax.lax.cond(jnp.sum(x) > 0, much, little, x)

    specs = (P("data"), P(None, "model"), P("model"))
    return region(body, specs, P("data"), check_vma=False)(x, up, down)


def unevenly(x, up, down):  # type: ignore[no-untyped-def]
    """Three devices of each four add up, one is alone; the gradient is not asked for."""

    def body(x, up, down):  # type: ignore[no-untyped-def]
        made = jnp.tanh(x @ up) @ down
        of_three = jax.lax.psum(
            jax.lax.stop_gradient(made), "model", axis_index_groups=[[0], [1, 2, 3]]
        )
        return made + of_three

    specs = (P("data"), P(None, "model"), P("model"))
    return region(body, specs, P("data"), check_vma=False)(x, up, down)


def stacked(x, up, down):  # type: ignore[no-untyped-def]
    """A region in a loop."""

    def layer(x, _):  # type: ignore[no-untyped-def]
        return jnp.tanh(summed(x, up, down)), None

    return jax.lax.scan(layer, x, None, length=TURNS)[0]


def step_of(function) -> Workload:  # type: ignore[no-untyped-def]
    def loss(params, x):  # type: ignore[no-untyped-def]
        return jnp.mean((function(x, params["up"], params["down"]) - x) ** 2)

    def init():  # type: ignore[no-untyped-def]
        return {"up": normal(0, WIDE, OUT), "down": normal(1, OUT, WIDE)}

    return train(loss, init, shaped(ROWS, WIDE))


EVERY = [summed, ring, exchanged, partly, looking_up, narrow, chosen, unevenly, stacked]


def both(workload: Workload) -> tuple[Estimate, hlo.HloCounts]:
    """What rung 1 says of a batch divided over `data`, and what stands in the compiled program."""
    of = analyse(workload)
    assert of.space.meshes == (MESH,)
    batch = next(a.name for a in of.space.axes.axes if a.is_batch)
    layout = Layout(mesh=MESH, activation_rules=rules({batch: "data"}))
    estimate = propagator(of.analysis).judge(of.space, layout, CPU)
    assert isinstance(estimate, Estimate), estimate
    program = compile_module(lower_step(of.analysis, of.space.specs(layout), target()), DEVICES)
    return estimate, hlo.count(hlo.parse(program.hlo_text), MESH)


def sent(collectives: Iterable[Collective]) -> collections.Counter[tuple[str, tuple[str, ...]]]:
    """Bytes of a step, by kind and mesh axes."""
    found: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for one in collectives:
        found[one.kind, one.mesh_axes] += one.bytes * one.count
    return found


@pytest.mark.parametrize("function", EVERY)
def test_a_manual_region_counts_as_compiled(function) -> None:  # type: ignore[no-untyped-def]
    estimate, counts = both(step_of(function))
    assert estimate.flops == pytest.approx(counts.flops, rel=0.05)
    assert 0.5 < estimate.bytes_accessed / counts.bytes_accessed < 1.1
    predicted, compiled = sent(estimate.collectives), sent(counts.collectives)
    if function is narrow:  # XLA:CPU sends bfloat16 as float32
        predicted, compiled = (collections.Counter(f.keys()) for f in (predicted, compiled))
    if function is stacked:  # XLA:CPU gathers in front of the loop what the loop does not change
        gathered = ("all_gather", ("data", "model"))
        assert 0.9 < predicted.pop(gathered) / compiled.pop(gathered) <= TURNS
    assert predicted == compiled


@pytest.mark.parametrize("platform", ["tpu", "cuda"])  # XLA:CPU has none
def test_a_ragged_exchange_sends_its_rows(platform: str) -> None:
    def body(x, ends):  # type: ignore[no-untyped-def]
        ends = ends[0]
        room = jnp.zeros((2 * x.shape[0], x.shape[1]))
        return jax.lax.ragged_all_to_all(x, room, ends, ends, ends, ends, axis_name="model")

    def step(state, batch):  # type: ignore[no-untyped-def]
        inside = region(body, (P("model"), P("model")), P("model"), check_vma=False)
        return state, {"sum": jnp.sum(inside(batch["x"], batch["ends"]))}

    batch = {"x": shaped(ROWS, WIDE), "ends": shaped(4, 4, dtype=jnp.int32)}
    program = trace(Workload(step=step, init=lambda: jnp.zeros(()), batch=batch))
    (sent,) = operations_of(analyse_for(program, platform)).sent
    found = collective_of(sent, MESH, 1.0, 1)
    assert found is not None and (found.kind, found.mesh_axes) == ("all_to_all", ("model",))
    assert found.bytes == ROWS // 4 * WIDE * 4


def test_custom_calls_in_a_region_are_named() -> None:
    def factors(x, up, down):  # type: ignore[no-untyped-def]
        body = jax.lax.linalg.cholesky
        square = x.T @ x + jnp.eye(WIDE)
        return x @ region(body, (P(),), P(), check_vma=False)(square)

    def named(function) -> list[str]:  # type: ignore[no-untyped-def]
        return [
            what for what in analyse(step_of(function)).analysis.axes.opaque if "custom" in what
        ]

    assert named(factors) and not named(summed)


def test_partners_that_are_not_understood_are_an_error() -> None:
    """Read as nobody they would make what is sent free."""

    send = types.SimpleNamespace(
        name="stablehlo.all_reduce", attributes={"replica_groups": "#stablehlo.something<else>"}
    )
    with pytest.raises(ValueError, match="not understood"):
        stablehlo.partners_of(send)


def test_a_state_that_a_region_makes_anew_lies_where_the_old_one_lay() -> None:
    def change(state):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda x: jnp.sin(jnp.cos(x)), state)

    def init():  # type: ignore[no-untyped-def]
        return {"up": normal(0, WIDE, OUT), "down": normal(1, OUT, WIDE)}

    def inside(state, batch):  # type: ignore[no-untyped-def]
        return region(change, (P(),), P())(state), {"sum": jnp.sum(batch)}

    def plain(state, batch):  # type: ignore[no-untyped-def]
        return change(state), {"sum": jnp.sum(batch)}

    peaks = []
    for step in (plain, inside):
        of = analyse(Workload(step=step, init=init, batch=shaped(ROWS, WIDE)))
        estimate = propagator(of.analysis).judge(of.space, Layout(mesh=MESH), CPU)
        assert isinstance(estimate, Estimate), estimate
        peaks.append(estimate.peak_memory_bytes)
    assert peaks[0] == peaks[1]
