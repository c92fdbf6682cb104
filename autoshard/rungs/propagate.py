"""Rung 1: asks the partitioner, in process, what a layout makes of every operation."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.analysis import Analysis
from autoshard.compat import shardings, stablehlo
from autoshard.compat.judged import Communication, Judged
from autoshard.compat.partitioner import REFUSALS
from autoshard.compat.reshards import Division
from autoshard.convolutions import FEW_FEATURES
from autoshard.cost import Constants, CostModel
from autoshard.degenerate import elements
from autoshard.errors import LayoutError
from autoshard.kernels import KernelTable
from autoshard.layout import Layout
from autoshard.operations import OwnSend
from autoshard.partitioned import Partition, partitioned
from autoshard.rows import MANY
from autoshard.rungs.failures import declined
from autoshard.rungs.gathers import copies_of
from autoshard.rungs.halos import NO_HALO, Halo, Reaching, exchanged, halo_of, joining_s
from autoshard.rungs.own_sends import collective_of
from autoshard.rungs.sending import folded, in_place, sent_in_step
from autoshard.sites import site_of_location
from autoshard.space import Space
from autoshard.specs import Specs
from autoshard.subaxes import ways
from autoshard.trial import Collective, Estimate, Failure, Rung
from autoshard.vectorization import PART_BYTES, is_vectorized

_DECLINED: tuple[type[Exception], ...] = (LayoutError, *REFUSALS)

_OFF_BY = 0.25
"""How far the temporaries judged here are off those of the compiled program, as a share.

In nine samples of `results/fidelity` medians of 4 to 52 %, in five of them 9 to 32 %.
"""


class _Received(NamedTuple):
    """A buffer that a collective writes: bytes, needed between two positions."""

    first: int
    last: int
    bytes: float


class Propagator:
    """Judges layouts of one analysed program. Not thread-safe: modules share a context."""

    def __init__(self, analysis: Analysis):
        self._analysis = analysis
        self._attributes = shardings.Attributes(analysis.module.context)
        kernels = analysis.kernels
        self._site_values = {site: value for value, site in kernels.site_values}
        self._results = {
            first + k: (tag, k)
            for tag, (first, count) in kernels.tags.items()
            for k in range(count)
        }
        self._arguments = {value: i for i, value in enumerate(kernels.argument_values)}

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
            return self._estimate(specs, judged, cost, start)
        except _DECLINED as error:
            return declined(error, time.perf_counter() - start)

    def _estimate(
        self, specs: Specs, judged: Judged | None, cost: CostModel, start: float
    ) -> Estimate:
        analysis = self._analysis
        program, kernels = analysis.program, analysis.kernels
        sizes = dict(specs.mesh)

        n = len(kernels.value_bytes)
        divided = np.full(n, np.inf if judged else 1.0)
        contracted = {}
        regathered: dict[int, float] = {}
        copies: list[_Received] = []
        collectives: list[Collective] = []
        communication: list[Communication] = []
        halos: list[Reaching] = []
        if judged:
            for value, axes in zip(kernels.argument_values, judged.argument_axes, strict=True):
                divided[value] = ways(axes, sizes)
            for numbers, said in (
                (kernels.tags, judged.shards),
                (kernels.entries, judged.entries),
            ):
                for tag, shards in said.items():
                    first, count = numbers.get(tag, (0, 0))
                    for k in range(count):
                        divided[first + k] = ways(shards[k], sizes)
            site_of = dict(kernels.site_values)
            for value in np.flatnonzero(kernels.parents >= 0).tolist():
                placed = specs.sites.get(site_of.get(value, -1))
                if placed is not None and not any(placed.open):
                    divided[value] = ways((m for dim in placed.spec for m in dim), sizes)
                elif value in site_of or divided[value] == np.inf:
                    # The partitioner keeps no constraint, the user's own neither.
                    divided[value] = divided[kernels.parents[value]]
            contracted = {
                kernels.tags[tag][0]: ways(axes, sizes)
                for tag, axes in judged.contracted.items()
                if tag in kernels.tags
            }
            regathered = self._regathered(judged, sizes, divided)
            copies = self._copied_whole(judged, sizes, divided)
            communication = self._placed(judged, cost.constants)
            collectives = self._collectives(communication, judged, sizes, cost.constants)
            halos = self._halos(judged, sizes, kernels.value_bytes / divided)
            collectives += exchanged(halos, kernels, sizes)
        local = kernels.value_bytes / divided
        ways_of_kernel = divided[kernels.kernel_value].copy()
        for k, value in enumerate(kernels.kernel_value):
            if value in contracted:
                ways_of_kernel[k] = contracted[value]
        flops = kernels.kernel_flops / ways_of_kernel
        for one, halo in halos:
            flops[one.kernel] *= halo.work
        traffic = local[kernels.kernel_value] * kernels.kernel_writes + np.bincount(
            kernels.read_kernel,
            weights=local[kernels.read_value] * kernels.read_scale,
            minlength=len(kernels.kernel_value),
        )
        for k, value in enumerate(kernels.kernel_value):
            traffic[k] += regathered.get(value, 0.0)
        summed = {value for value, parts in contracted.items() if parts > divided[value]}
        moves = [product < 0 or product in summed for product in kernels.transposed_product]
        crossing = (kernels.value_elements / divided)[kernels.transposed_value] * moves
        crossing = crossing * kernels.transposed_arrays
        transposed, collided = (
            np.bincount(
                kernels.transposed_kernel, weights=weights, minlength=len(kernels.kernel_value)
            )
            for weights in crossing * self._lines(judged, sizes).T
        )
        along, across = self._degenerate(judged, sizes).T
        rows, patches = self._rows_and_patches(judged, sizes, moves, cost.constants)
        alive = np.isfinite(ways_of_kernel)
        trips = np.where(alive, kernels.kernel_trips, 0.0)
        received = self._received(communication, halos, cost.constants) + copies
        block = _peak_of(kernels, local, received)
        arguments = [local[v] for v in kernels.argument_values]
        peak = sum(arguments) + block
        compute_s = cost.kernels_s(
            flops,
            traffic,
            trips,
            kernels.kernel_dtypes,
            transposed=transposed,
            collided=collided,
            degenerate=along,
            degenerate_across=across,
            rows=rows,
            patches=patches,
            turned=kernels.kernel_turned,
            touched=_touched(kernels, traffic, trips, peak),
            vectorized=self._vectorized(judged, sizes, flops, traffic, cost.constants),
        )
        compute_s += self._copying_s(communication, sizes, peak, cost)
        compute_s += joining_s(halos, kernels, peak, cost)
        compute_s += cost.fresh_s(block, _OFF_BY) + cost.handing_s(len(program.inputs))
        communication_s = cost.collectives_s(collectives, specs.mesh)
        state_count = len(program.state)
        return Estimate(
            rung=Rung.PROPAGATE,
            time_s=compute_s + communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            peak_memory_bytes=int(peak),
            state_bytes=int(sum(arguments[:state_count])),
            flops=float(np.dot(flops, trips)),
            bytes_accessed=float(np.dot(traffic, trips)),
            op_count=int(trips.sum()),
            collectives=tuple(collectives),
            dropped=specs.dropped,
            unmodelled=tuple((o, 0.0) for o in analysis.axes.opaque),
            assumptions=kernels.assumptions,
            elapsed_s=time.perf_counter() - start,
            exposed_s=communication_s,
        )

    def _vectorized(
        self,
        judged: Judged | None,
        sizes: dict[str, int],
        flops: np.ndarray,
        traffic: np.ndarray,
        constants: Constants,
    ) -> np.ndarray | bool:
        """Which kernels do not do their arithmetic element by element (`vectorization`)."""
        if not constants.unvectorized_flops_per_s:
            return True
        kernels = self._analysis.kernels
        loops = np.flatnonzero(kernels.kernel_loops)
        of_value = dict(zip(kernels.kernel_value[loops].tolist(), loops.tolist(), strict=True))
        extents = kernels.kernel_extents.astype(float)
        for tag, results in judged.dims.items() if judged else ():
            first, count = kernels.tags.get(tag, (0, 0))
            for value, dims in enumerate(results[:count], first):
                if value in of_value and any(dims):
                    extents[of_value[value], : len(dims)] /= [ways(axes, sizes) for axes in dims]
        parts = np.clip(traffic // PART_BYTES, 1, constants.loop_parts)
        parts = np.where((parts == 2) & (flops > traffic), 3, parts)  # for arithmetic, some more
        return ~kernels.kernel_loops | is_vectorized(np.ceil(extents), parts)

    def _lines(self, judged: Judged | None, sizes: dict[str, int]) -> np.ndarray:
        """(t, 2) `cache_lines.Lines` of what kernels transpose: of a device's part of it."""
        kernels = self._analysis.kernels
        found = [
            turn.lines(_local(extents, self._dims(value, judged), sizes))
            for value, extents, turn in zip(
                kernels.transposed_value.tolist(),
                kernels.transposed_extents,
                kernels.transposed_turns,
                strict=True,
            )
        ]
        return np.array(found).reshape(-1, 2)

    def _dims(self, value: int, judged: Judged | None) -> Division:
        """Mesh axes of each dimension of a value; none where the partitioner does not say."""
        if judged is None:
            return ()
        if value in self._arguments:
            return judged.argument_dims[self._arguments[value]]
        tag, k = self._results.get(value, (-1, 0))
        results = judged.dims.get(tag, ())
        parent = int(self._analysis.kernels.parents[value])
        if len(results) <= k and parent >= 0:
            return self._dims(parent, judged)
        return results[k] if k < len(results) else ()

    def _degenerate(self, judged: Judged | None, sizes: dict[str, int]) -> np.ndarray:
        """(k, 2) `degenerate.Elements` of each kernel."""
        kernels = self._analysis.kernels
        found = np.zeros((len(kernels.kernel_value), 2))
        for one in kernels.summed_products:
            here = _made(judged, one.tag, one.extents, sizes)
            found[one.kernel] += elements(here, one.dimension)
        return found

    def _rows_and_patches(
        self, judged: Judged | None, sizes: dict[str, int], moves: list[bool], constants: Constants
    ) -> tuple[np.ndarray, np.ndarray]:
        """(k,) rows of the result of each product that has few (else `MANY`), and elements of
        patches that are copied for a convolution: on one device.

        Args:
          moves: (t,) whether a transpose is made; else the product before it is turned around.
        """
        kernels = self._analysis.kernels
        count = len(kernels.kernel_value)
        rows, patches = np.full(count, MANY), np.zeros(count)
        if constants.least_rows > 1.0:
            turned = {
                product
                for product, made in zip(kernels.transposed_product.tolist(), moves, strict=True)
                if product >= 0 and not made
            }
            few = constants.least_rows * math.prod(sizes.values())
            for one in kernels.rowed_products:
                around = int(kernels.kernel_value[one.kernel]) in turned
                dimensions = one.columns if around else one.dimensions
                if math.prod(one.extents[d] for d in dimensions) < few:
                    here = _made(judged, one.tag, one.extents, sizes)
                    rows[one.kernel] = max(math.prod(here[d] for d in dimensions), 1)
        for kernel in kernels.convolutions if constants.shared else ():
            if kernel.said.turned:
                continue
            made = _made(judged, kernel.tag, kernel.extents, sizes)
            data = _local(kernel.data_extents, self._dims(kernel.data, judged), sizes)
            said = kernel.said
            if said.fits and max(data[said.read], made[said.made]) > FEW_FEATURES:
                rows[kernel.kernel] = max(made[said.row], 1)
            else:
                axes = judged.operands.get(kernel.tag, ()) if judged else ()
                patches[kernel.kernel] = said.patches / (ways(axes[0], sizes) if axes else 1)
        return rows, patches

    def _halos(self, judged: Judged, sizes: dict[str, int], local: np.ndarray) -> list[Reaching]:
        """Convolutions of which a device needs more than its own part."""
        found = []
        for one in self._analysis.kernels.convolutions:
            data = self._dims(one.data, judged)
            read = judged.operands.get(one.tag, ())
            if not any(data) or not read:
                continue
            (made, *_) = judged.dims.get(one.tag) or ((),)
            by = self._dims(one.by, judged)
            halo = halo_of(one.said, data, by, made, float(local[one.data]), sizes)
            if read[0] != frozenset(m for dim in data for m in dim):  # gathered in between
                halo = Halo((), 0.0, halo.work)
            if halo != NO_HALO:
                found.append(Reaching(one, halo))
        return found

    def _regathered(
        self, judged: Judged, sizes: dict[str, int], divided: np.ndarray
    ) -> dict[int, float]:
        """By the value it makes, what a product reads beyond what was made: gathered in between."""
        found: dict[int, float] = {}
        for tag, _, extra in self._gathered_operands(judged, sizes, divided):
            made = self._analysis.kernels.tags[tag][0]
            found[made] = found.get(made, 0.0) + extra
        return found

    def _gathered_operands(
        self, judged: Judged, sizes: dict[str, int], divided: np.ndarray
    ) -> Iterator[tuple[int, int, float]]:
        """Tag and operand of products that read more of it than was made, and how many bytes."""
        kernels = self._analysis.kernels
        for tag, operands in kernels.operands.items():
            for value, axes in zip(operands, judged.operands.get(tag, ()), strict=False):
                read = ways(axes, sizes)
                if read < divided[value] < math.inf:
                    yield tag, value, kernels.value_bytes[value] * (1 / read - 1 / divided[value])

    def _copied_whole(
        self, judged: Judged, sizes: dict[str, int], divided: np.ndarray
    ) -> list[_Received]:
        """Copies of operands that were gathered and are needed in another order: beyond those of a
        device's own part (`KernelTable.scratch`)."""
        kernels = self._analysis.kernels
        early = {(one.value, one.last): one.first for one in kernels.scratch}
        copied = []
        for tag, value, extra in self._gathered_operands(judged, sizes, divided):
            if (kernels.tags[tag][0], value) in kernels.copied:
                last = kernels.positions[tag]
                copied.append(_Received(early.get((value, last), last), last, extra))
        return copied

    def _trips_of(self, send: OwnSend, constants: Constants) -> float:
        """How often it is sent: of what a loop does not change once, where a compiler does so."""
        loop = None
        if constants.moves_invariants:
            loop = self._analysis.invariants.in_front_of(send.tag, send.origin)
        return self._analysis.kernels.trips[send.tag if loop is None else loop]

    def _placed(self, judged: Judged, constants: Constants) -> list[Communication]:
        """The partitioner's collectives where a compiler puts them.

        What branches send that are not taken is left out.
        """
        trips = self._analysis.kernels.trips
        sent = [one for one in judged.communication if trips.get(one.block, 1.0)]
        return in_place(sent, constants, self._analysis.invariants)

    def _turns(self, one: Communication) -> float:
        """How often it is sent in a step."""
        return self._analysis.kernels.trips.get(one.block, 1.0)

    def _collectives(
        self,
        communication: list[Communication],
        judged: Judged,
        sizes: dict[str, int],
        constants: Constants,
    ) -> list[Collective]:
        """What is sent, by the user's own manual regions too."""
        kernels = self._analysis.kernels
        collectives = []
        for one, (kind, axes, bytes_) in sent_in_step(communication, sizes, constants):
            collectives.append(
                Collective(
                    kind=kind,
                    group_size=ways(axes, sizes),
                    mesh_axes=axes,
                    bytes=int(bytes_),
                    count=int(self._turns(one)),
                    source=stablehlo.source_of(one.location),
                )
            )
        mesh = tuple(sizes.items())
        users = (
            collective_of(send, mesh, self._trips_of(send, constants), ways(parts[0], sizes))
            for send in kernels.sent
            if kernels.trips[send.tag] and (parts := judged.shards.get(send.tag))
        )
        return collectives + [one for one in users if one is not None]

    def _received(
        self, communication: list[Communication], halos: list[Reaching], constants: Constants
    ) -> list[_Received]:
        """The buffers that receive what is sent, and those that it is joined in."""
        kernels = self._analysis.kernels
        spikes = []
        for one in communication:
            position = kernels.positions.get(one.tag, 0)
            # A constraint's gather makes a value of its own.
            site = site_of_location(one.location) if one.kind == "all_gather" else None
            if one.moved:  # the loop reads it in every turn
                until = kernels.ends[one.tag]
                own = None if site is None else self._site_values.get(site)
                spikes += _around(kernels, own, _Received(position, until, one.after))
            elif not folded(one, constants) and site is None:
                spikes.append(_Received(position, position + 1, one.after))
        for convolution, halo in halos:
            position = kernels.positions.get(convolution.tag, 0)
            spikes.append(_Received(position, position + 1, halo.bytes))
        return spikes

    def _copying_s(
        self,
        communication: list[Communication],
        sizes: dict[str, int],
        peak: float,
        cost: CostModel,
    ) -> float:
        """Seconds of the copies that gathers need (`gathers`)."""
        if not cost.constants.gathers_outermost:
            return 0.0
        copies = [
            (*copy, self._turns(one)) for one in communication for copy in copies_of(one, sizes)
        ]
        bytes_, transposed, collided, turns = np.array(copies).reshape(-1, 4).T
        return cost.kernels_s(
            np.zeros(len(copies)),
            bytes_,
            turns,
            [""] * len(copies),
            transposed=transposed,
            collided=collided,
            touched=np.full(len(copies), peak),
        )


def _local(extents: Sequence[int], dims: Division, sizes: dict[str, int]) -> list[int]:
    """What a device has of dimensions of these extents that mesh axes divide."""
    if not any(dims):
        return list(extents)
    return [math.ceil(n / ways(axes, sizes)) for n, axes in zip(extents, dims, strict=True)]


def _made(
    judged: Judged | None, tag: int, extents: Sequence[int], sizes: dict[str, int]
) -> list[int]:
    """What a device has of the first result of an operation."""
    (dims, *_) = (judged and judged.dims.get(tag)) or ((),)
    return _local(extents, dims, sizes)


def _touched(
    kernels: KernelTable, traffic: np.ndarray, trips: np.ndarray, peak: float
) -> np.ndarray:
    """(k,) bytes touched before a kernel's memory comes up again: of the step, or a loop's turn."""
    count = len(kernels.loops_around)
    inside = kernels.kernel_turns >= 0
    of = kernels.kernel_turns[inside]
    in_step = np.bincount(of, weights=(traffic * trips)[inside], minlength=count)
    turns = np.array(kernels.loop_turns)
    for loop in range(count):  # inner ones come before those that they stand in
        if kernels.loops_around[loop] >= 0:
            in_step[kernels.loops_around[loop]] += in_step[loop]
    touched = np.full(len(traffic), peak)
    per_turn = in_step / np.maximum(turns, 1.0)
    for loop in reversed(range(count)):  # what runs once comes up again with what is around it
        around = kernels.loops_around[loop]
        if turns[loop] <= (turns[around] if around >= 0 else 1.0):
            per_turn[loop] = per_turn[around] if around >= 0 else peak
    touched[inside] = np.minimum(per_turn[of], peak)
    return touched


def _around(kernels: KernelTable, value: int | None, received: _Received) -> list[_Received]:
    """The part of the time in which a value does not hold what was received."""
    if value is None or kernels.live_from[value] < 0:
        return [received]
    first, last = int(kernels.live_from[value]), int(kernels.live_to[value])
    parts = received._replace(last=first - 1), received._replace(first=last + 1)
    return [part for part in parts if part.first <= part.last]


def _peak_of(kernels: KernelTable, local: np.ndarray, spikes: list[_Received]) -> float:
    """Largest sum of live buffers over the step, bytes; arguments not included."""
    change = np.zeros(kernels.length + 2)
    sizes, live_to = buffers(kernels, local)
    held = kernels.live_from >= 0
    np.add.at(change, kernels.live_from[held], sizes[held])
    np.add.at(change, live_to[held] + 1, -sizes[held])
    for value, scale, first, last in kernels.scratch:
        change[first] += scale * local[value]
        change[last + 1] -= scale * local[value]
    for first, last, bytes_ in spikes:
        change[first] += bytes_
        change[min(last + 1, len(change) - 1)] -= bytes_
    return float(np.cumsum(change).max(initial=0.0))


def buffers(kernels: KernelTable, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of each buffer, that of the largest value in it; position of its last need).

    A constraint that keeps the size of what it constrains is the same array; else it is another
    one, and what it constrains is not needed any longer for its sake.
    """
    bytes_ = np.where(np.isfinite(local), local, 0.0)
    sizes = np.zeros(len(local))
    np.maximum.at(sizes, kernels.buffer, bytes_)
    live_to = kernels.live_to.copy()
    constraints = np.flatnonzero(kernels.parents >= 0)
    parents = kernels.parents[constraints]
    same = bytes_[constraints] == bytes_[parents]
    sizes[constraints[same]] = 0.0
    kept = kernels.buffer[parents]
    for c, buffer, one in zip(
        constraints[::-1].tolist(), kept[::-1].tolist(), same[::-1].tolist(), strict=True
    ):
        until = live_to[c] if one else kernels.live_from[c]
        if until > live_to[buffer]:
            live_to[buffer] = until
    return sizes, live_to
