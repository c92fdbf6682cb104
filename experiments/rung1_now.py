"""Asks the current rung 1 about stored layouts of the zoo's models. Compiles and runs nothing."""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from autoshard.lowering.problem import make_problem, trace_all
from autoshard.program.program import Program
from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate
from autoshard.rungs.propagate import Propagator
from autoshard.target.cost import Constants, CostModel
from autoshard.target.target import find_target
from experiments.ranks import Parts
from experiments.samples import Sample
from experiments.zoo.cases import case

_FREE_MEMORY: Mapping[str, Any] = {
    "bandwidth_bytes_per_s": 1e30,
    "fresh_s_per_byte": 0.0,
}
"""Constants by which memory traffic and fresh pages take no time."""


def predictions(sample: Sample, zero_bytes: bool = False) -> list[Parts]:
    """What the current rung 1 says of each program of a sample, in order.

    JAX must have at least `sample.devices` CPU devices.

    Args:
      zero_bytes: no byte costs time, see `constants_of`.

    Raises:
      ValueError: rung 1 refuses a layout that ran.
    """
    target = find_target(jax.devices()[: sample.devices])
    subject = make_problem(_traced(sample.case), target, "free", None)
    cost = CostModel(constants_of(sample.constants, zero_bytes))
    propagator_of = functools.cache(Propagator)  # the annotated step has an analysis of its own
    found = []
    for program in sample.programs:
        layout = Candidate.from_json(program["candidate"]).layout
        said = propagator_of(subject.analysis_for(layout)).judge(subject.space, layout, cost)
        if not isinstance(said, Estimate):
            raise ValueError(f"{sample.name}: rung 1 refuses {program['name']}: {said.message}")
        found.append(Parts(said.compute_s, said.communication_s))
    return found


def constants_of(stored: Mapping[str, Any], zero_bytes: bool = False) -> Constants:
    """The stored constants that the library still has; what is not stored keeps its default.

    Args:
      zero_bytes: no byte costs time. Memory traffic, fresh pages and the payloads of collectives
        are free; FLOPs, launches and the latencies of collectives remain.
    """
    fields = {field.name for field in dataclasses.fields(Constants)}
    constants = Constants.from_json({k: v for k, v in stored.items() if k in fields})
    if not zero_bytes:
        return constants
    links = tuple(dataclasses.replace(link, s_per_byte=0.0) for link in constants.links)
    changed = {k: v for k, v in _FREE_MEMORY.items() if k in fields}
    return dataclasses.replace(constants, links=links, **changed)


@functools.lru_cache(maxsize=1)
def _traced(name: str) -> Program:
    (program,), _ = trace_all(case(name, "shrunk").workload, None, False)
    return program


def in_processes(
    samples: Sequence[Sample], zero_bytes: bool, processes: int
) -> Iterator[list[Parts]]:
    """Yields `predictions` of each sample, in order, from processes with 8 CPU devices each."""
    with concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=use_cpu_devices
    ) as pool:
        yield from pool.map(functools.partial(predictions, zero_bytes=zero_bytes), samples)


def use_cpu_devices() -> None:
    """Gives this process 8 fake CPU devices, before JAX has made any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
