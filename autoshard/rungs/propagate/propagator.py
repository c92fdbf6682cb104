"""Rung 1: Shardy in process on a copy of the program, and an estimate of what comes of it.

Time is a roofline for each kernel plus alpha-beta costs of the collectives; peak memory is the
largest sum of live buffers. Not modelled: overlap of communication with computation.
"""

import time

import numpy as np

from autoshard.compat.shardy import shardings
from autoshard.compat.shardy.partitioned_program import Communication, PartitionedProgram
from autoshard.errors import LayoutError, PartitionerRefused
from autoshard.program.analysis import Analysis
from autoshard.program.sites import site_of_location
from autoshard.records.layout import Layout
from autoshard.records.trial import Estimate, Failure, Rung
from autoshard.rungs.propagate.exchanges import window_exchanges
from autoshard.rungs.propagate.kernels import find_kernels
from autoshard.rungs.propagate.local_shapes import LocalShapes, ValueOrigins
from autoshard.rungs.propagate.manual_sends import manual_collectives
from autoshard.rungs.propagate.memory import Received, find_buffers
from autoshard.rungs.propagate.operations import operations_of
from autoshard.rungs.propagate.partition import Partition, partitioned
from autoshard.rungs.propagate.spmd_collectives import is_folded, spmd_collectives
from autoshard.rungs.worker.failures import declined
from autoshard.space.space import Space
from autoshard.space.specs import Specs
from autoshard.target.cost import Constants, CostModel


class Propagator:
    """Judges layouts of one analysed program. Not thread-safe: modules share a context."""

    def __init__(self, analysis: Analysis):
        self._analysis = analysis
        self._attributes = shardings.Attributes(analysis.module.context)
        program = analysis.program
        self.operations = operations_of(analysis)
        state_count = len(program.state) if program.returns_state else 0
        self.kernels = find_kernels(self.operations)
        self.buffers = find_buffers(self.operations, self.kernels, state_count)
        self._origins = ValueOrigins(self.operations)

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
        self, specs: Specs, judged: PartitionedProgram | None, cost: CostModel, start: float
    ) -> Estimate:
        ops, kernels = self.operations, self.kernels
        local = self._origins.local_shapes(specs, judged)
        # Branches that are not taken send nothing.
        sent = [x for x in (judged.communication if judged else ()) if ops.trips.get(x.block, 1.0)]
        collectives = (
            *spmd_collectives(sent, ops.trips, local.sizes, cost.constants),
            *manual_collectives(local),
            *window_exchanges(local),
        )
        temporaries = self.buffers.peak(local.bytes, self._received(sent, cost.constants))
        arguments = [local.bytes[v] for v in ops.arguments]
        flops, traffic, trips = self._work(local)
        compute_s = cost.kernels_s(flops, traffic, trips, kernels.dtypes)
        compute_s += cost.fresh_s(temporaries)
        communication_s = cost.collectives_s(collectives, specs.mesh)
        return Estimate(
            rung=Rung.PROPAGATE,
            time_s=compute_s + communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            peak_memory_bytes=int(sum(arguments) + temporaries),
            state_bytes=int(sum(arguments[: len(self._analysis.program.state)])),
            flops=float(np.dot(flops, trips)),
            bytes_accessed=float(np.dot(traffic, trips)),
            op_count=int(trips.sum()),
            collectives=collectives,
            dropped=specs.dropped,
            unmodelled=tuple((o, 0.0) for o in self._analysis.axes.opaque),
            assumptions=tuple(dict.fromkeys(ops.assumptions)),
            elapsed_s=time.perf_counter() - start,
            exposed_s=communication_s,
        )

    def _work(self, local: LocalShapes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(k,) operations, bytes and executions of each kernel on one device."""
        kernels = self.kernels
        divided = local.divided[kernels.value].copy()
        for k, value in enumerate(kernels.value.tolist()):
            divided[k] = local.work.get(value, divided[k])
        traffic = kernels.traffic(local.bytes)
        more: dict[int, float] = {}
        for value, bytes_ in local.gathered_operands():
            more[value] = more.get(value, 0.0) + bytes_
        traffic += [more.get(value, 0.0) for value in kernels.value.tolist()]
        # The partitioner dropped what is divided into infinitely many parts.
        return kernels.flops / divided, traffic, np.where(np.isfinite(divided), kernels.trips, 0.0)

    def _received(self, sent: list[Communication], constants: Constants) -> list[Received]:
        """The buffers that receive what is sent; a constraint's gather makes a value of its own."""
        positions = self.operations.positions
        return [
            Received(positions.get(one.tag, 0), positions.get(one.tag, 0) + 1, one.after)
            for one in sent
            if not is_folded(one, constants)
            and not (one.kind == "all_gather" and site_of_location(one.location) is not None)
        ]
