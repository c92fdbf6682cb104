"""Rung 1: asks the partitioner, in process, what a layout makes of every operation."""

import time

import numpy as np

from autoshard.analysis import Analysis
from autoshard.compat import shardings
from autoshard.compat.judged import Communication, Judged
from autoshard.cost import Constants, CostModel
from autoshard.errors import LayoutError, PartitionerRefused
from autoshard.layout import Layout
from autoshard.partitioned import Partition, partitioned
from autoshard.rungs.failures import declined
from autoshard.rungs.gathers import copying_s
from autoshard.rungs.halos import exchanged, joining_s, reaching
from autoshard.rungs.kernel_shares import kernel_shares
from autoshard.rungs.live_memory import copied_whole, peak_of, received
from autoshard.rungs.own_sends import own_collectives
from autoshard.rungs.sending import collectives_of, in_place
from autoshard.rungs.shares import Origins
from autoshard.rungs.shifting import shifting_collectives
from autoshard.space import Space
from autoshard.specs import Specs
from autoshard.trial import Estimate, Failure, Rung

_TEMPORARIES = (0.95, 1.3)
"""Which share of the temporaries judged here those of the compiled program are, from to.

So of nine in ten of 239 programs of `results/fidelity`, of sixteen cases, of which 16 to 32 MiB
were said.
"""


class Propagator:
    """Judges layouts of one analysed program. Not thread-safe: modules share a context."""

    def __init__(self, analysis: Analysis):
        self._analysis = analysis
        self._attributes = shardings.Attributes(analysis.module.context)
        self._origins = Origins(analysis.kernels)

    def specs(self, space: Space, layout: Layout) -> Specs:
        """Every sharding of a layout that the partitioner may be asked about.

        Raises:
          LayoutError: the layout does not belong to the space, or the step to another mesh.
        """
        specs = space.specs(layout)
        pinned = self._analysis.program.pinned_mesh
        if pinned is not None and specs.mesh != pinned:
            # Shardy would end the process: the module names axes this mesh does not have.
            raise LayoutError(f"the step runs on the mesh {dict(pinned)} only")
        return specs

    def judge(
        self, space: Space, layout: Layout, cost: CostModel, partition: Partition | None = None
    ) -> Estimate | Failure:
        """Predicts a step of one layout.

        Args:
          partition: what the partitioner made of it, where that was asked; None to ask.

        Returns:
          A Failure where the layout does not belong to the space or the partitioner refuses it.
        """
        start = time.perf_counter()
        try:
            specs, judged = self.specs(space, layout), None
            if partition is not None:
                judged = partition.judged
                start -= partition.elapsed_s
            elif specs.mesh:
                judged = partitioned(self._analysis, specs, self._attributes)
        except (LayoutError, PartitionerRefused) as error:
            return declined(error, time.perf_counter() - start)
        return self._estimate(specs, judged, cost, start)

    def _estimate(
        self, specs: Specs, judged: Judged | None, cost: CostModel, start: float
    ) -> Estimate:
        analysis = self._analysis
        program, kernels = analysis.program, analysis.kernels
        shares = self._origins.shares(specs, judged)
        sizes, trips = shares.sizes, kernels.trips

        communication = self._placed(judged, cost.constants)
        halos = reaching(shares)
        collectives = [
            *collectives_of(communication, trips, sizes, cost.constants),
            *own_collectives(analysis, shares, cost.constants),
            *exchanged(halos, kernels, sizes),
            *shifting_collectives(analysis, shares, cost.constants),
        ]
        beside = received(kernels, communication, halos, cost.constants) + copied_whole(shares)
        block = peak_of(kernels, shares.local, beside)
        arguments = [shares.local[v] for v in kernels.argument_values]
        peak = sum(arguments) + block
        work = kernel_shares(shares, halos, cost.constants)
        compute_s = work.seconds(cost, peak)
        compute_s += copying_s(communication, trips, sizes, peak, cost)
        compute_s += joining_s(halos, kernels, peak, cost)
        compute_s += cost.fresh_s(block, _TEMPORARIES) + cost.handing_s(len(program.inputs))
        communication_s = cost.collectives_s(collectives, specs.mesh)
        state_count = len(program.state)
        return Estimate(
            rung=Rung.PROPAGATE,
            time_s=compute_s + communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            peak_memory_bytes=int(peak),
            state_bytes=int(sum(arguments[:state_count])),
            flops=float(np.dot(work.flops, work.trips)),
            bytes_accessed=float(np.dot(work.traffic, work.trips)),
            op_count=int(work.trips.sum()),
            collectives=tuple(collectives),
            dropped=specs.dropped,
            unmodelled=tuple((o, 0.0) for o in analysis.axes.opaque),
            assumptions=kernels.assumptions,
            elapsed_s=time.perf_counter() - start,
            exposed_s=communication_s,
        )

    def _placed(self, judged: Judged | None, constants: Constants) -> list[Communication]:
        """The partitioner's collectives where a compiler puts them.

        What branches send that are not taken is left out.
        """
        trips = self._analysis.kernels.trips
        sent = [
            one for one in (judged.communication if judged else ()) if trips.get(one.block, 1.0)
        ]
        return in_place(sent, constants, self._analysis.invariants)
