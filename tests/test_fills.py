"""When the array that the gradient of a lookup is added to is filled: early on GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import CostModel
from autoshard.driver import Subject
from autoshard.lowering import lower_step
from autoshard.pricing import catalogued
from autoshard.program import trace
from autoshard.rungs.compile_job import CompileResult, compile_in_process, request_for
from autoshard.rungs.propagate import Propagator
from autoshard.subjects import make_subject
from autoshard.target import Target, find_target
from autoshard.topology import Topology
from autoshard.trial import Estimate
from autoshard.workload import Workload
from tests.analysed import baseline
from tests.hardware import gpu, needs, tpu

ROWS, WIDTH, LAYERS, BATCH, LENGTH = 8192, 128, 6, 8, 128
TABLE_BYTES = 4 * ROWS * WIDTH


def _looked_up() -> Workload:
    """A table much larger than anything else, layers in a loop."""

    def step(state, tokens):
        def loss(state):
            x = state["table"][tokens]
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, state["layers"])
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    def init():
        return {"table": jnp.ones((ROWS, WIDTH)), "layers": jnp.ones((LAYERS, WIDTH, WIDTH))}

    return Workload(step=step, init=init, batch=jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))


def _subject(target: Target) -> Subject:
    return make_subject(trace(_looked_up(), (), False), target, "free", None)


def _filled_from(topology: Topology) -> tuple[int, int]:
    """(position from which the gradient of the table has a buffer, where the last loop begins)."""
    here = find_target(jax.devices()[:8])
    there = dataclasses.replace(here, devices=(), topology=topology, shared_host=False)
    kernels = _subject(there).analysis.kernels
    (made,) = (
        v
        for v in np.flatnonzero(kernels.live_from >= 0).tolist()
        if kernels.value_bytes[v] == TABLE_BYTES and kernels.parents[v] < 0
    )
    loops = [kernels.positions[tag] for tag in kernels.ends]
    return int(kernels.live_from[made]), max(loops)


def test_a_gradient_has_its_buffer_before_the_loop_on_gpus_alone() -> None:
    from_, loop = _filled_from(gpu(1, 8))
    assert from_ <= loop
    from_, loop = _filled_from(tpu(2, 4))
    assert from_ > loop


@pytest.mark.deviceless
def test_memory_is_what_the_compiler_says(tmp_path) -> None:
    needs("cuda")
    target = find_target("h100:1x2")
    of = _subject(target)
    layout = baseline(of.space, "data parallel")
    assert target.topology is not None
    judged = Propagator(of.analysis).judge(of.space, layout, CostModel(catalogued(target.topology)))
    assert isinstance(judged, Estimate)
    module = lower_step(of.analysis, of.space.specs(layout), target)
    compiled = compile_in_process(request_for(module, target, str(tmp_path), 120.0))
    assert isinstance(compiled, CompileResult), compiled
    assert judged.peak_memory_bytes == pytest.approx(compiled.memory.peak_bytes, rel=0.1)
