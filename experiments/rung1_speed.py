"""How fast is rung 1?

Question: candidates a second, on one core, for the train step of a 24-layer scanned GPT (d 4096,
  sequence 2048) on 64 devices; and how long the analysis takes before the first of them.
Command: python -m experiments.rung1_speed
Cost: a minute; no device, nothing is allocated.
Expected: at least 25 candidates a second, analysis under half a second.

The figures of 2026-11-21 in results/rung1_speed are of the model as it was before: without norms,
biases, positions and a causal mask, its head no transposed embedding: a smaller program, of which
the expectation is too.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import random
import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from autoshard.program.analysis import analyse
from autoshard.program.program import trace
from autoshard.records.trial import COLLECTIVE_KINDS, Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.space.meshes import mesh_shapes
from autoshard.space.space import Space
from autoshard.target.cost import Constants, CostModel, LinkCost
from autoshard.target.host import machine
from autoshard.workload import Workload
from models import plain_gpt

BATCH = 64  # sequences

_DEVICES = flags.DEFINE_integer("devices", 64, "Devices of the mesh; none needs to be here.")
_LAYERS = flags.DEFINE_integer("layers", 24, "Layers, scanned.")
_CANDIDATES = flags.DEFINE_integer("candidates", 300, "Random candidates to judge.")
_OUT = flags.DEFINE_string("out", "", "Folder for the figures as JSON; none by default.")


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = dataclasses.replace(plain_gpt.GPT3_6_7B, layers=_LAYERS.value)
    workload = Workload(
        step=functools.partial(plain_gpt.step, config),
        init=functools.partial(plain_gpt.init, config),
        batch=jax.ShapeDtypeStruct((BATCH, config.sequence + 1), jnp.int32),
    )
    start = time.perf_counter()
    program = trace(workload)
    traced_s = time.perf_counter() - start
    analysed_s = []
    for _ in range(5):
        start = time.perf_counter()
        analysis = analyse(program, "cpu")
        analysed_s.append(time.perf_counter() - start)
    space = Space(
        program=program,
        axes=analysis.axes,
        sites=tuple(analysis.sites.sites),
        used_leaves=analysis.sites.used_leaves,
        meshes=tuple(mesh_shapes(_DEVICES.value, (), ordered=False)),
    )
    rng = random.Random(0)
    drawn = [space.sample(rng) for _ in range(_CANDIDATES.value)]
    layouts = [c.layout for c in drawn if c is not None]
    propagator, cost = Propagator(analysis), CostModel(_constants())
    elapsed_s = []
    for layout in layouts:
        start = time.perf_counter()
        outcome = propagator.judge(space, layout, cost)
        elapsed_s.append(time.perf_counter() - start)
        assert isinstance(outcome, Estimate), outcome
    figures = {
        "trace_s": traced_s,
        "analysis_s": statistics.median(analysed_s),
        "candidates": len(layouts),
        "candidates_per_s": len(elapsed_s) / sum(elapsed_s),
        "median_s": statistics.median(elapsed_s),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"trace            {traced_s:.3f} s")
    print(f"analysis         {figures['analysis_s']:.3f} s (median of 5)")
    print(f"candidates       {figures['candidates_per_s']:.1f} a second on one core")
    if _OUT.value:
        folder = pathlib.Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"jax-{jax.__version__}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _constants() -> Constants:
    """Round figures: the speed of rung 1 does not depend on them."""
    return Constants(
        device="any",
        device_count=_DEVICES.value,
        contract_flops_per_s=5e14,
        element_flops_per_s=5e13,
        bandwidth_bytes_per_s=3e12,
        launch_s=3e-6,
        shared=False,
        forms_reduce_scatter=True,
        links=tuple(
            LinkCost(kind=k, group_size=g, latency_s=1e-5, s_per_byte=1e-11)
            for k in COLLECTIVE_KINDS
            for g in (2, 64)
        ),
        date="",
    )


if __name__ == "__main__":
    app.run(main)
