"""Rung 2: what the target's own compiler made of a candidate, as an Estimate."""

from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Rung
from autoshard.rungs.compile import hlo
from autoshard.rungs.compile.hlo.timeline import timeline
from autoshard.rungs.compile.job import CompileResult
from autoshard.target.cost import CostModel, MeshPrices


def estimate_of(module: Module, compiled: CompileResult, cost: CostModel) -> Estimate:
    """Counts a compiled program and prices it with the model that rung 1 uses too.

    Raises:
      hlo.HloError: the compiler's text has something this version cannot read.
    """
    parsed = hlo.parse(compiled.hlo_text)
    counts = hlo.count(parsed, module.mesh)
    memory = compiled.memory
    line = timeline(parsed, module.mesh, MeshPrices(cost, module.mesh))
    time_s, compute_s, communication_s = line.total_s, line.compute_s, line.communication_s
    exposed_s = line.exposed_s
    if cost.constants.shared:
        # The devices of a fake mesh take turns on the host's cores: nothing overlaps.
        compute_s += cost.fresh_s(memory.temporaries_bytes)
        time_s, exposed_s = compute_s + communication_s, communication_s
    sizes = dict(module.mesh)
    state_bytes = 0
    for array in module.inputs[: module.state_count]:
        ways = 1
        for axes in array.spec:
            for m in axes:
                ways *= sizes[m]
        state_bytes += array.bytes // ways
    return Estimate(
        rung=Rung.COMPILE,
        time_s=time_s,
        compute_s=compute_s,
        communication_s=communication_s,
        peak_memory_bytes=memory.peak_bytes,
        state_bytes=state_bytes,
        flops=counts.flops,
        bytes_accessed=counts.bytes_accessed,
        op_count=counts.op_count,
        collectives=counts.collectives,
        unmodelled=line.unmodelled,
        assumptions=compiled.assumptions + line.assumptions,
        warnings=compiled.warnings,
        elapsed_s=compiled.elapsed_s,
        exposed_s=exposed_s,
    )
