"""What a user's own `shard_map` computes and sends counts in rung 1 as in the compiled program."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from autoshard import hlo
from autoshard.compat.executable import compile_module
from autoshard.layout import Layout, rules
from autoshard.lowering import lower_step
from autoshard.workload import Workload
from tests.analysed import analyse, judge, target
from tests.programs import normal, shaped, train

MESH = (("data", 2), ("model", 4))
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


def step_of(function) -> Workload:  # type: ignore[no-untyped-def]
    def loss(params, x):  # type: ignore[no-untyped-def]
        return jnp.mean((function(x, params["up"], params["down"]) - x) ** 2)

    def init():  # type: ignore[no-untyped-def]
        return {"up": normal(0, WIDE, OUT), "down": normal(1, OUT, WIDE)}

    return train(loss, init, shaped(ROWS, WIDE))


@pytest.mark.parametrize("function", [summed, ring, exchanged, partly])
def test_a_manual_region_counts_as_compiled(function) -> None:  # type: ignore[no-untyped-def]
    of = analyse(step_of(function))
    assert of.space.meshes == (MESH,)
    batch = next(a.name for a in of.space.axes.axes if a.is_batch)
    layout = Layout(mesh=MESH, compute=rules({batch: "data"}))
    estimate = judge(of, layout)
    program = compile_module(lower_step(of.analysis, of.space.specs(layout), target()), DEVICES)
    counts = hlo.count(hlo.parse(program.hlo_text), MESH)
    assert estimate.flops == pytest.approx(counts.flops, rel=0.05)
    sent: collections.Counter[object] = collections.Counter()
    wanted: collections.Counter[object] = collections.Counter()
    for found, ones in ((sent, estimate.collectives), (wanted, counts.collectives)):
        for c in ones:
            found[c.kind, c.mesh_axes] += c.bytes * c.count
    assert sent == wanted
    assert not any("manual" in what for what, _ in estimate.unmodelled)
