"""A search keeps tensor parallelism off slow links, by what rung 1 predicts alone."""

import math

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.records.subaxes import places_of_axes
from autoshard.records.trial import Estimate, Failure, Kind, Stage
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.space.baselines import baselines
from autoshard.space.moves import axis_swaps, moves
from autoshard.target.catalogue import catalogue
from autoshard.target.target import Target
from autoshard.target.topology import parse_topology
from autoshard.tuner.journal import Journal
from autoshard.tuner.propagating import propagate_all
from autoshard.tuner.state import SearchState
from autoshard.tuner.strategy.base import Trial
from autoshard.tuner.strategy.beam import Beam
from autoshard.tuner.strategy.one_axis import one_axis_layouts

# So long that all devices pay, though gradients then cross the slow links.
LAYERS, WIDTH, HIDDEN, LENGTH = 4, 4096, 16384, 16384


def attending(sequences: int) -> autoshard.Workload:
    """Blocks of attention and two matrices, on too few sequences for data parallelism alone."""

    def init():
        shapes = {"q": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        params = {n: jnp.zeros((LAYERS, *s), jnp.bfloat16) for n, s in shapes.items()}
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    def block(x, layer):
        scores = jnp.einsum("btd,bsd->bts", x @ layer["q"], x) * WIDTH**-0.5
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    def step(state, batch):
        def loss(params):
            out, _ = jax.lax.scan(jax.checkpoint(block), batch, params)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    batch = jax.ShapeDtypeStruct((sequences, LENGTH, WIDTH), jnp.bfloat16)
    return autoshard.Workload(step=step, init=init, batch=batch)


def target_of(name: str) -> Target:
    """A target whose compiler need not be installed."""
    topology = parse_topology(name, catalogue())
    return Target(
        devices=(),
        platform={"cuda": "gpu"}.get(topology.chip.platform, topology.chip.platform),
        device_kind=topology.chip.device_kind,
        given=(),
        memory_bytes=int(topology.chip.usable_bytes.value),
        memory_source="the catalogue",
        shared_host=False,
        topology=topology,
    )


@pytest.mark.parametrize(("name", "sequences"), [("h100:8x8", 8), ("v5e:2x4*2", 2)])
def test_a_search_keeps_tensor_parallelism_off_slow_links(name, sequences, tmp_path):
    target = target_of(name)
    subject = make_problem(trace(attending(sequences), (), False), target, "free", None)
    ledger = SearchState(
        problems=[subject],
        target=target,
        cost=cost_model(target),
        budget=autoshard.Budget(candidates=150, compiles=1, profiles=0),
        journal=Journal(),
        callbacks=(),
        seed=0,
        limit_bytes=target.memory_bytes,
        folder=tmp_path,
    )
    propagate_all(ledger, None, 1.0)
    fitting = [
        row
        for row in ledger.trials
        if isinstance(row.propagated, Estimate)
        and row.propagated.peak_memory_bytes <= ledger.limit_bytes
    ]
    best = min(fitting, key=lambda row: row.propagated.time_s).candidate.layout
    data = dict(best.activation_rules).get("batch", ())
    tensor = {
        axis for name, axes in best.activation_rules if name != "batch" for axis in axes
    } - set(data)
    group = [target.order(best.mesh)[place] for place in places_of_axes(sorted(tensor), best.mesh)]
    positions = [target.topology.positions[device] for device in group]
    # Data parallelism takes all slow links there are, the other axes a whole host or slice.
    assert math.prod(dict(best.mesh)[axis] for axis in data) == sequences
    assert len(group) == target.device_count // sequences
    assert len({(p.slice, p.host if target.platform == "gpu" else 0) for p in positions}) == 1


def test_the_same_rules_over_other_links_are_asked_for_first() -> None:
    target = target_of("h100:8x8")
    space = make_problem(trace(attending(8), (), False), target, "free", None).space
    start = next(b.candidate for b in baselines(space) if b.name == "FSDP x TP")
    first = list(axis_swaps(space, start))
    assert first == list(moves(space, start))[: len(first)] and first
    assert all(sorted(c.layout.mesh) != sorted(start.layout.mesh) for c in first)
    failure = Failure(kind=Kind.UNSUPPORTED, stage=Stage.PROPAGATE, message="")
    beam = Beam(target.memory_bytes)
    history = tuple(
        Trial(candidate=c, propagated=failure) for c in (start, *one_axis_layouts(space))
    )
    for seed in range(3):
        assert set(first) <= set(beam.ask(space, seed, history))
