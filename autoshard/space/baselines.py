"""Baselines: the layouts people write by hand, found by structure and never by name."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from autoshard.program.axes import owned
from autoshard.records.layout import Candidate, Gather, Layout, MeshShape
from autoshard.space.meshes import factorizations
from autoshard.space.space import Space

_WHOLE = {
    Gather.SMALL_REPLICATED: "FSDP, small whole",
    Gather.PER_STEP: "FSDP, gathered once",
    Gather.PARAMS_REPLICATED: "ZeRO-1",
}

DATA_PARALLEL = frozenset({"data parallel"})
FSDP = frozenset({"FSDP", _WHOLE[Gather.SMALL_REPLICATED], _WHOLE[Gather.PER_STEP]})
"""Names of the same layout, but for what is gathered when."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A named layout that people write by hand."""

    name: str
    candidate: Candidate


def baselines(space: Space) -> tuple[Baseline, ...]:
    """Replicated, data parallel, FSDP, tensor parallel and FSDP x TP on every mesh, "as annotated".

    FSDP comes four times: every array that divides is sharded; or all but the smallest; or so, but
    parameters are gathered once a step (Megatron-LM's distributed optimizer keeps its float32
    parameters so); or all but parameters: ZeRO-1 (Rajbhandari et al. 2020, section 5.1). Where
    activations meet parameters of their own, those are divided too: experts (EP) that the data
    chooses, and other blocks (block TP). Each comes alone and with FSDP, and with small arrays (a
    router's weights) divided as the blocks are, or replicated.

    Those the space does not contain (a batch that does not divide, a fixed mesh of another shape)
    are left out. Tensor parallel may appear several times: one for each way to choose axes so that
    no weight is cut twice; and one more, in which each weight in a row is cut by columns.
    """
    count = math.prod(n for _, n in space.meshes[0]) if space.meshes else 1
    found: list[Baseline] = []
    seen: set[Layout] = set()

    def add(name: str, layout: Layout) -> None:
        candidate = space.candidate(layout)
        if candidate.layout not in seen and space.contains(candidate) is None:
            seen.add(candidate.layout)
            found.append(Baseline(name=name, candidate=candidate))

    def add_whole(name: str, layout: Layout) -> None:
        effective = space.effective(layout)
        if effective.gather is layout.gather:  # a level that says the same goes by its own name
            add(name, effective)

    if space.annotated is not None:
        add("as annotated", Layout(mesh=space.annotated.specs.mesh, as_annotated=True))
    meshes = list(space.meshes)
    flat = meshes[0]
    add("replicated", space.layout(flat, {}, {}))
    for mesh in meshes:
        every = tuple(name for name, _ in mesh)
        spread = dict.fromkeys(_batch_axes(space, count), every)
        add("data parallel", space.layout(mesh, spread, _carried(space, spread)))
        shards = _storage(space, count, every)
        fsdp = space.layout(mesh, spread, shards)
        add("FSDP", fsdp)
        for whole, name in _WHOLE.items():
            add_whole(name, dataclasses.replace(fsdp, gather=whole))
        for cut in _tensor_axes(space, count):
            to = dict.fromkeys(cut, every)
            add("tensor parallel", space.layout(mesh, to, to))
        chain = _chain(space, count)
        to = dict.fromkeys(chain, every)  # weights in a row by columns
        by_columns = space.layout(mesh, to, to, chain)
        add("tensor parallel", space.effective(by_columns))
    for mesh in _two_axis_meshes(space, count):
        (data, n), (model, m) = mesh
        for cut in _tensor_axes(space, m):
            to = dict.fromkeys(cut, (model,))
            shards = dict.fromkeys(_storage(space, n, (data,), taken=cut), (data,))
            compute = {**dict.fromkeys(_batch_axes(space, n), (data,)), **to}
            both = space.layout(mesh, compute, {**shards, **to})
            add("FSDP x TP", both)
            add_whole("FSDP x TP, gathered once", dataclasses.replace(both, gather=Gather.PER_STEP))
            add("data x TP", space.layout(mesh, compute, {**_carried(space, compute), **to}))
    for way, owners in _owners(space).items():
        for mesh in filter(None, [*meshes, *_two_axis_meshes(space, count)] if owners else ()):
            every, (last, m) = tuple(name for name, _ in mesh), mesh[-1]
            to = {axis: (last,) for axis in owners if space.axes.axis(axis).size % m == 0}
            compute = {**dict.fromkeys(_batch_axes(space, count), every), **to}
            if to and len(mesh) <= 2:
                shards = _storage(space, count, every, taken=owners)
                for name, stored in (("FSDP", shards), ("data", _carried(space, compute))):
                    layout = space.layout(mesh, compute, {**stored, **to})
                    add(f"{name} x {way}", layout)
                    small = space.canonical(dataclasses.replace(layout, small_replicated=True))
                    if small.small_replicated:
                        add(f"{name} x {way}, small replicated", small)
    return tuple(found)


def _batch_axes(space: Space, ways: int) -> list[str]:
    """The axes along which examples lie, without those of leaves that so many ways do not divide.

    Positions and the like lie beside the examples. Where nothing divides, all are named: the space
    then refuses the layout and can say why.
    """
    found = [a for a in space.axes.axes if a.is_batch and not a.is_loop]
    divided = [a for a in found if any(size % ways == 0 for size in a.sizes)]
    return [a.name for a in divided or found]


def _carried(space: Space, compute: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Of compute rules those for examples that the state holds too: a memory of each of them."""
    axes = {a.name for a in space.axes.axes if a.is_batch and not a.is_data}
    return {axis: to for axis, to in compute.items() if axis in axes}


def _owners(space: Space) -> dict[str, list[str]]:
    """Axes along which each element of an activation meets a parameter of its own.

    They are experts (EP) where the data chooses along them, as a router does. Otherwise they are
    blocks, such as heads that have a matrix each (block TP).
    """
    found = [space.axes.axis(name) for name in owned(space.sites, space.axes.sites)]
    kept = [a for a in found if not a.is_batch and not a.is_loop and not a.is_data]
    return {
        "EP": [a.name for a in kept if a.is_selected],
        "block TP": [a.name for a in kept if not a.is_selected],
    }


def _two_axis_meshes(space: Space, count: int) -> list[MeshShape]:
    names = tuple(dict.fromkeys(name for mesh in space.meshes for name, _ in mesh))[:2]
    if len(names) < 2:
        return []
    allowed = {tuple(sorted(n for _, n in mesh)) for mesh in space.meshes}
    return [
        tuple(zip(names, shape, strict=True))
        for shape in factorizations(count, 2)
        if len(shape) == 2 and tuple(sorted(shape)) in allowed
    ]


def _storage(
    space: Space, ways: int, to: tuple[str, ...], taken: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Axes that together shard as much of the state as can be, each leaf once: FSDP's choice.

    Examples that the state holds are divided as those of the batch are. Of a dimension that holds
    several axes the first alone can be divided.

    Args:
      taken: axes that other mesh axes divide.
    """
    sized = []
    for leaf, dims in zip(space.program.state, space.axes.inputs, strict=False):
        ruled = dims[: len(leaf.shape)]  # not the words of a PRNG key
        first = (next(iter(dim), (None, 1)) for dim in ruled)
        held = {axis for axis, size in first if axis is not None and size % ways == 0}
        sized.append((leaf.bytes, held))
    usable = [
        a.name
        for a in space.axes.axes
        if not a.is_loop and not a.is_data and a.name not in set(taken)
    ]
    batch = {a.name for a in space.axes.axes if a.is_batch}
    chosen: list[str] = []
    while True:
        open_ = [(size, held) for size, held in sized if not held & set(chosen)]
        gains = {a: sum(size for size, held in open_ if a in held) for a in usable}
        best = max(gains, key=lambda a: (a in batch and gains[a] > 0, gains[a]), default=None)
        if best is None or gains[best] == 0:
            return dict.fromkeys(chosen, to)
        chosen.append(best)


def _chain(space: Space, ways: int) -> list[str]:
    """Axes that one product makes and the next one sums over, of those that so many ways divide."""
    return [a for a in space.axes.chains if space.axes.axis(a).size % ways == 0]


def _tensor_axes(space: Space, ways: int) -> list[tuple[str, ...]]:
    """Ways to cut products into columns and rows: axes that one makes and the next one sums over.

    No two axes of one choice are held by one state leaf. A choice is grown from each axis in turn,
    taking next the axis that most intermediate values hold.
    """
    chain = _chain(space, ways)
    leaves = [
        {axis for dim in dims for axis, _ in dim if axis is not None}
        for dims in space.axes.inputs[: len(space.program.state)]
    ]
    rivals = {a: {b for held in leaves if a in held for b in held if b != a} for a in chain}
    weight = {
        a: sum(
            math.prod(n for dim in dims for _, n in dim)
            for dims in space.axes.sites.values()
            if any(axis == a for dim in dims for axis, _ in dim)
        )
        for a in chain
    }
    found: list[tuple[str, ...]] = []
    for first in sorted(chain, key=lambda a: -weight[a]):
        chosen = [first]
        for a in sorted(chain, key=lambda a: -weight[a]):
            if a not in chosen and not any(a in rivals[b] for b in chosen):
                chosen.append(a)
        key = tuple(sorted(chosen))
        if key not in found:
            found.append(key)
    return found[:6]
