"""Calibration: short measurements on a live target that give the cost model its constants.

Matrix products, a chain of transcendental operations, memory traffic (`probes`; on a host loops
over less and over more than its caches hold), many tiny kernels, many arrays, a block too large for
the allocator to keep, transposes, and each collective in the smallest and the largest group. What
is not measured on an accelerator comes from its catalogue entry, where it has one: the clock of the
compiler's estimates, and the rates of other dtypes than bf16 and f32. All samples are taken in
rounds over every probe, and the least of each is used: what else runs on the machine only ever adds
time, and on a busy one the medians of a probe and of the empty program that is taken off it can
come in the wrong order. The least of some seconds is luck too: it is drawn several times, and the
median over the draws is taken (`docs/decisions/0017`). `calibrations` keeps what is found.
"""

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.catalogue import Chip
from autoshard.cost import (
    FRESH_FROM_BYTES,
    GATHERS_AT_ONCE,
    GATHERS_OUTERMOST,
    KINDS,
    MOVES_INVARIANTS,
    ONE_BY_ONE,
    SUMS_APART,
    Constants,
    LinkCost,
)
from autoshard.hlo import parse
from autoshard.hlo.loops import most_parts
from autoshard.live_chips import chip_of_kind
from autoshard.precision import precise_rates
from autoshard.probes import PATCHED_FEATURES, Run, fitting, on_accelerator, on_host, program
from autoshard.target import Target

REVISION = 22
_ROUNDS, _FEW_ROUNDS = 15, 5  # the least of 5 was seen to put 2 devices above 4
_DRAWS = 5  # of 6 s each on two cores; one alone is off by a tenth
_LONG_S = 0.05  # what takes longer is disturbed less, and has few rounds
_REPEATS = 8  # collectives in one program, so that dispatch does not count
# What all devices touch in a turn, bytes, and how many turns: the last is several times the last
# cache of a host.
_TOUCHED = {
    4 << 20: (64, 192),
    16 << 20: (16, 48),
    64 << 20: (4, 12),
    128 << 20: (2, 6),
    256 << 20: (2, 6),
}
_ARRAYS = 64  # of a program that does next to nothing
_TINY = 64  # products in the probe of fixed costs, each with one scaling after it
# float32, 3 MB on each device; no powers of two, whose columns share cache sets. Each of 64 sets
# comes to have 24 of its lines, twice as many as the first caches of newer processors hold.
_MATRIX = 1520, 500
_ALIGNED = 512, 512  # their columns take two sets
_SUMMED = 512, 256  # products on each device; it has one array of them, or two of half the rows
_FRESH_DEVICES = 8  # enough to keep every core busy; on all of a large mesh it would be gigabytes
_SMALL, _LARGE = 2048, 1 << 18  # float32 elements on one device of a fake mesh
_LARGEST = 1 << 24  # on an accelerator, whose links move 1 MiB in the time of a dispatch


def calibrate(target: Target, draws: int = _DRAWS) -> Constants:
    """Measures a target: thirty to forty seconds on two cores; probes of an accelerator are larger.

    Args:
      draws: how often all is measured; the median counts.
    """
    n = target.device_count
    mesh = target.mesh((("x", n),) if n > 1 else ())
    few = min(n, _FRESH_DEVICES)

    width = 1 << 20
    probes: dict[object, Run] = {
        "nothing": program(lambda x: x + 1.0, mesh, 8),
        "kernels": program(_many_products, mesh, 8, 8),
    }
    shared = target.shared_host
    small = _SMALL
    if shared:
        # Of a gather over all every device holds all, and they share one memory.
        large = max(fitting(_LARGE, 16 * n, target.memory_bytes // 4), 2 * small)
        sized = on_host(mesh)
        some = Mesh(np.array(target.devices[:few]), ("x",))
        for bytes_, both in _TOUCHED.items():
            for turns in both:
                probes["memory", bytes_, turns] = program(_scaled(turns), some, bytes_ // 4 // few)
        probes["arrays"] = _of_arrays(mesh)
        probes["nothing of few"] = program(lambda x: x + 1.0, some, 8)
        probes["kept"] = program(_written(width), some, 8)
        probes["fresh"] = program(_written(FRESH_FROM_BYTES // 4 + width), some, 8)
        probes["straight"] = program(lambda x: x * 1.5, some, *_MATRIX)
        probes["transposed"] = program(_swapped, some, *_MATRIX)
        probes["aligned"] = program(lambda x: x * 1.5, some, *_ALIGNED)
        probes["collided"] = program(_swapped, some, *_ALIGNED)
        for way, dimension in (("along", 2), ("across", 1)):
            probes["summed", way, 1] = program(_summed(dimension, 1), some, *_SUMMED)
            probes["summed", way, 2] = program(_summed(dimension, 2), some, *_SUMMED)
    else:
        idle_s = least_of_rounds({"nothing": probes["nothing"]})["nothing"]
        sized = on_accelerator(mesh, target.memory_bytes, idle_s)
        # An all-gather holds one part of each device, and what is made of them.
        large = max(fitting(_LARGEST, 16 * n, target.memory_bytes // 4), 2 * small)
    probes |= {name: probe.run for name, probe in sized.items()}
    sizes = {group: (_divided(small, group), _divided(large, group)) for group in groups_of(n)}
    for group, both in sizes.items():
        for kind in KINDS:
            for size in both:
                probes[kind, group, size] = _collective(target, kind, group, size)
    seconds = median_of_draws(probes, draws)
    idle = seconds["nothing"]

    def above(name: object) -> float:
        return max(seconds[name] - idle, 1e-7)

    links = []
    for group, (few_elements, many) in sizes.items():
        for kind in KINDS:
            short, long = (
                max(seconds[kind, group, s] - idle, 1e-7) / _REPEATS for s in (few_elements, many)
            )
            payload = {"all_gather": group}.get(kind, 1)
            s_per_byte = max(long - short, 1e-12) / ((many - few_elements) * 4 * payload)
            latency = max(short - s_per_byte * few_elements * 4 * payload, 1e-7)
            links.append(
                LinkCost(kind=kind, group_size=group, latency_s=latency, s_per_byte=s_per_byte)
            )
    # On a shared host the rates are the host's: the work of all devices over the elapsed time.
    work = n if shared else 1
    rates = {name: work * probe.amount / above(name) for name, probe in sized.items()}
    chip = None if shared else chip_of_kind(target.device_kind)
    by_touched = bandwidths(seconds) if shared else ()
    return Constants(
        device=target.device_kind,
        device_count=n,
        contract_flops_per_s=rates["product" if shared else "product f32"],
        contract_by_dtype=() if shared else rates_by_dtype(rates, chip),
        element_flops_per_s=rates["elements"],
        bandwidth_bytes_per_s=by_touched[-1][1] if shared else rates["copy"],
        bandwidths=by_touched,
        launch_s=above("kernels") / (2 * _TINY * work),
        array_s=above("arrays") / ((_ARRAYS - 1) * n) if shared else 0.0,
        gathers_by_dimension=target.platform not in GATHERS_AT_ONCE,
        folds_sums=target.platform not in SUMS_APART,
        one_by_one=target.platform in ONE_BY_ONE,
        gathers_outermost=target.platform in GATHERS_OUTERMOST,
        moves_invariants=target.platform in MOVES_INVARIANTS,
        fresh_s_per_byte=fresh_s_per_byte(seconds, few, 4 * width) if shared else 0.0,
        transposed_s=transposed_s(seconds, few) if shared else 0.0,
        collided_s=collided_s(seconds, few) if shared else 0.0,
        degenerate_s=degenerate_s(seconds, few, "along") if shared else 0.0,
        degenerate_across_s=degenerate_s(seconds, few, "across") if shared else 0.0,
        turned_flops_per_s=rates["turned convolution"] if shared else 0.0,
        unvectorized_flops_per_s=min(rates["unvectorized"], rates["elements"]) if shared else 0.0,
        least_rows=max(1.0, rates["product"] / rates["single rows"]) if shared else 1.0,
        patch_s=patch_s(rates) if shared else 0.0,
        loop_parts=_loop_parts(target) if shared else 1,
        shared=shared,
        forms_reduce_scatter=n > 1 and _forms_reduce_scatter(target),
        links=tuple(links),
        date=datetime.date.today().isoformat(),
        clock_hz=chip.clock_hz.value if chip and chip.clock_hz else 0.0,
        source=f"{chip.name} {chip.digest}" if chip else "",
    )


def groups_of(devices: int) -> tuple[int, ...]:
    """The sizes of groups that are measured: the smallest that all devices make, and all of them.

    >>> groups_of(8), groups_of(6), groups_of(9), groups_of(5), groups_of(1)
    ((2, 8), (2, 6), (3, 9), (5,), ())
    """
    divisors = [size for size in range(2, devices + 1) if devices % size == 0]
    return tuple(dict.fromkeys((divisors[0], devices))) if divisors else ()


def _divided(size: int, group: int) -> int:
    """The least number of elements, no fewer than these, of which each of a group has as many."""
    return -(-size // group) * group


def rates_by_dtype(
    measured: Mapping[str, float], chip: Chip | None
) -> tuple[tuple[str, float], ...]:
    """Operations a second of products by dtype, sorted: as measured, or as catalogued.

    Args:
      measured: with entries "product bf16" and "product f32".
      chip: what it says of other dtypes, and of arithmetic in f32 for products without TF32, is
        taken to be reached as far as bf16 reaches its own peak.
    """
    found = {name: measured[f"product {name}"] for name in ("bf16", "f32")}
    if chip is not None:
        reached = found["bf16"] / chip.flops["bf16"].value
        found = {dtype: figure.value * reached for dtype, figure in chip.flops.items()} | found
        elements = chip.element_flops.value * reached
        found |= precise_rates(chip.platform, found["f32"], elements)
    return tuple(sorted(found.items()))


def median_of_draws(
    probes: Mapping[object, Run], draws: int, clock: Callable[[], float] = time.perf_counter
) -> dict[object, float]:
    """Seconds of each probe: the median over draws, each of which is the least of some rounds."""
    drawn = [least_of_rounds(probes, clock) for _ in range(draws)]
    return {name: statistics.median(draw[name] for draw in drawn) for name in probes}


def least_of_rounds(
    probes: Mapping[object, Run], clock: Callable[[], float] = time.perf_counter
) -> dict[object, float]:
    """Seconds of each probe: the least of its samples, taken in rounds over all of them."""
    seconds = dict.fromkeys(probes, math.inf)
    for probe in probes.values():
        probe()
    for number in range(_ROUNDS):
        for name, probe in probes.items():
            if number < _FEW_ROUNDS or seconds[name] < _LONG_S:
                start = clock()
                probe()
                seconds[name] = min(seconds[name], clock() - start)
    return seconds


def bandwidths(seconds: Mapping[object, float]) -> tuple[tuple[int, float], ...]:
    """Bytes a second that all devices of a host read and write together, by what they touch in all.

    Beyond the caches a byte takes longer: what is touched less is no slower, whatever a turn of
    so little takes to begin. The difference of two numbers of turns has neither the dispatch in it
    nor the making of the result.

    Args:
      seconds: of the probes ("memory", bytes, turns).
    """
    found: list[tuple[int, float]] = []
    for bytes_, (few, many) in reversed(_TOUCHED.items()):
        short, long = (seconds["memory", bytes_, turns] for turns in (few, many))
        once_s = (long - short) / (many - few)
        # On a busy machine the shorter loop may have been held up as long as the longer one ran: a
        # turn takes no less than half of what it takes with everything beside it.
        rate = 2.0 * bytes_ / max(once_s, long / many / 2)
        found.append((bytes_, max(rate, found[-1][1]) if found else rate))
    return tuple(reversed(found))


def fresh_s_per_byte(seconds: Mapping[object, float], devices: int, kept_bytes: int) -> float:
    """What a byte of a block takes that is too large to be kept, beyond one of a block that is.

    Args:
      seconds: of the probes "kept", "fresh", which writes `FRESH_FROM_BYTES` more on each device,
        and "nothing of few".
      devices: that took part.
      kept_bytes: what "kept" writes on each device.
    """
    fresh_bytes = FRESH_FROM_BYTES + kept_bytes
    kept, fresh = (seconds[name] - seconds["nothing of few"] for name in ("kept", "fresh"))
    return max(0.0, fresh - fresh_bytes / kept_bytes * kept) / (devices * fresh_bytes)


def transposed_s(seconds: Mapping[object, float], devices: int) -> float:
    """What an element takes that a loop transposes, beyond one that it takes in order.

    Args:
      seconds: of the probes "straight" and "transposed".
      devices: that took part.
    """
    beyond = seconds["transposed"] - seconds["straight"]
    return max(0.0, beyond) / (devices * math.prod(_MATRIX))


def collided_s(seconds: Mapping[object, float], devices: int) -> float:
    """The same of elements whose lines push each other out of the cache; no less than of others.

    Args:
      seconds: of the probes "aligned" and "collided", and of those of `transposed_s`.
      devices: that took part.
    """
    beyond = (seconds["collided"] - seconds["aligned"]) / (devices * math.prod(_ALIGNED))
    return max(beyond, transposed_s(seconds, devices))


def degenerate_s(seconds: Mapping[object, float], devices: int, way: str) -> float:
    """What a product takes that is summed beside a dimension of one, beyond one beside two.

    Args:
      seconds: of the probes ("summed", way, 1) and ("summed", way, 2).
      devices: that took part.
      way: "along" where what is added up lies densely, or "across".
    """
    beyond = seconds["summed", way, 1] - seconds["summed", way, 2]
    return max(0.0, beyond) / (devices * math.prod(_SUMMED))


def patch_s(rates: Mapping[str, float]) -> float:
    """What an element of a patch takes beyond the products that it goes into.

    Args:
      rates: elements a second of the probe "patches", operations a second of "product".
    """
    return max(0.0, 1 / rates["patches"] - 2 * PATCHED_FEATURES / rates["product"])


def _summed(dimension: int, arrays: int) -> Callable[[jax.Array], jax.Array]:
    """A program that sums products over a dimension of so many arrays on each device."""

    def summed(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] * arrays, x.shape[1] // arrays, x.shape[2])
        return jnp.sum(x * (x + 1.0), axis=dimension)

    return summed


def _swapped(x: jax.Array) -> jax.Array:
    """A program that transposes a matrix on each device."""
    return jnp.swapaxes(x, 1, 2) * 1.5


def _written(width: int) -> Callable[[jax.Array], jax.Array]:
    """A program that reads next to nothing and writes `width` elements on each device."""
    return lambda x: jnp.broadcast_to(x[:, :1], (x.shape[0], width))


def _scaled(turns: int) -> Callable[[jax.Array], jax.Array]:
    """A program that reads and writes an array so often, in place.

    How often is known only when it runs: XLA (jax 0.12) makes one pass of turns that it can count.
    """

    def scaled(x: jax.Array) -> jax.Array:
        times = jnp.where(x[0, 0] > 1e30, 0, turns)
        return jax.lax.fori_loop(0, times, lambda _, y: y * 1.0001 + 1e-9, x)

    return scaled


def _of_arrays(mesh: Mesh) -> Run:
    """A program that is given many small arrays and hands them back in place, as steps do."""
    over = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    state = [jax.device_put(np.zeros(mesh.size, np.float32), over) for _ in range(_ARRAYS)]
    step = jax.jit(
        lambda x, *rest: (x + 1.0, *rest), out_shardings=over, donate_argnums=range(_ARRAYS)
    )
    compiled = step.lower(*state).compile()

    def run() -> object:
        state[:] = compiled(*state)
        return jax.block_until_ready(state)

    return run


def _many_products(x: jax.Array) -> jax.Array:
    """A chain of kernels too small to take time of their own."""
    for _ in range(_TINY):
        x = jnp.einsum("nij,njk->nik", x, x) * 0.1
    return x


def _forms_reduce_scatter(target: Target) -> bool:
    """Asks the compiler: is a product summed over a mesh axis and cut along it one operation?"""
    n = target.device_count
    mesh = target.mesh((("x", n),))
    columns, rows = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((None, "x"), ("x", None)))
    shape = jax.ShapeDtypeStruct((64 * n, 64 * n), jnp.float32)
    product = jax.jit(lambda a, b: a @ b, in_shardings=(columns, rows), out_shardings=rows).lower(
        shape, shape
    )
    return "reduce-scatter" in (product.compile().as_text() or "")


def _loop_parts(target: Target) -> int:
    """Asks the compiler: in how many parts do the host's threads share a large loop?"""
    n = target.device_count
    mesh = target.mesh((("x", n),) if n > 1 else ())
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    shape = jax.ShapeDtypeStruct((4096 * n, 1024), jnp.float32, sharding=rows)
    return most_parts(parse(jax.jit(lambda x: x * 1.5).lower(shape).compile().as_text() or ""))


def _collective(target: Target, kind: str, group: int, size: int) -> Run:
    """A program that runs one collective `_REPEATS` times, each on the result of the last."""
    n = target.device_count
    mesh = target.mesh((("y", n // group), ("x", group)) if group < n else (("x", n),))
    every = tuple(mesh.axis_names)

    def body(x: jax.Array) -> jax.Array:
        x = x.reshape(group, -1)
        for _ in range(_REPEATS):
            if kind == "all_reduce":
                x = jax.lax.psum(x, "x") * 0.5
            elif kind == "all_gather":
                x = jax.lax.all_gather(x, "x", tiled=True)[: x.shape[0]] * 1.5
            elif kind == "reduce_scatter":
                y = jax.lax.psum_scatter(x, "x", tiled=True) * 0.5
                x = jnp.concatenate([y] * group)
            elif kind == "all_to_all":
                x = jax.lax.all_to_all(x, "x", 0, 0, tiled=True) * 1.5
            else:
                ring = [(i, (i + 1) % group) for i in range(group)]
                x = jax.lax.ppermute(x, "x", ring) * 1.5
        return x.reshape(1, -1)

    spec = PartitionSpec(every)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    array = jax.jit(lambda: jnp.full((n, size), 0.5, jnp.float32), out_shardings=sharding)()
    compiled = jax.jit(mapped).lower(array).compile()
    return lambda: jax.block_until_ready(compiled(array))
