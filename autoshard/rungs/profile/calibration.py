"""Calibration: short measurements on a live target that give the cost model its constants.

The probes (`probes`) are matrix products, a chain of transcendental operations, memory traffic,
many tiny kernels, on a host a block too large for the allocator to keep, and each collective in the
smallest and the largest group. The catalogue entry of an accelerator, where there is one, gives the
clock of the compiler's estimates and the rates of other dtypes than bf16 and f32.

Samples are taken in rounds over every probe, and the least of each counts: other work on the
machine only ever adds time, and on a busy machine the medians of a probe and of the empty program
that is subtracted from it can come in the wrong order. The least of a few seconds is luck too. It
is drawn several times, and the median over the draws counts. `calibrations` keeps the result.
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

from autoshard.records.precision import precise_rates
from autoshard.records.trial import COLLECTIVE_KINDS
from autoshard.rungs.profile.probes import Run, fitting, on_accelerator, on_host, program
from autoshard.target.catalogue import Chip
from autoshard.target.cost import (
    FRESH_FROM_BYTES,
    GATHERS_AT_ONCE,
    SUMS_APART,
    Constants,
    LinkCost,
)
from autoshard.target.host import cores
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.target import Target

REVISION = 23
_ROUNDS, _FEW_ROUNDS = 8, 3
_DRAWS = 3  # one draw alone is off by a tenth
_LONG_S = 0.05  # what takes longer is disturbed less, and has few rounds
_REPEATS = 8  # collectives in one program, so that dispatch does not count
# Bytes that all devices together touch in a turn, several times the last cache of a host, and the
# numbers of turns.
_TOUCHED_BYTES = 256 << 20
_FEW_TURNS, _MANY_TURNS = 2, 6
_TINY = 64  # products in the probe of fixed costs, each with one scaling after it
_BUSY_DEVICES = 8  # at most, in the probes of memory: on all of a large mesh these take gigabytes
_SMALL, _LARGE = 2048, 1 << 17  # float32 elements on one device of a fake mesh
_LARGEST = 1 << 24  # on an accelerator, whose links move 1 MiB in the time of a dispatch


def calibrate(target: Target, draws: int = _DRAWS) -> Constants:
    """Measures a target: below 10 s on two cores; probes of an accelerator are larger.

    Args:
      draws: how often all is measured; the median counts.
    """
    n = target.device_count
    mesh = target.mesh((("x", n),) if n > 1 else ())
    few = min(n, _BUSY_DEVICES, cores())

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
        for turns in (_FEW_TURNS, _MANY_TURNS):
            touched = _TOUCHED_BYTES // 4 // few
            probes["memory", turns] = program(_scaled(turns), some, touched, in_place=True)
        probes["nothing of few"] = program(lambda x: x + 1.0, some, 8)
        probes["kept"] = program(_written(width), some, 8)
        probes["fresh"] = program(_written(FRESH_FROM_BYTES // 4 + width), some, 8)
    else:
        idle_s = least_of_rounds({"nothing": probes["nothing"]})["nothing"]
        sized = on_accelerator(mesh, target.memory_bytes, idle_s)
        # An all-gather holds one part of each device, and what is made of them.
        large = max(fitting(_LARGEST, 16 * n, target.memory_bytes // 4), 2 * small)
    probes |= {name: probe.run for name, probe in sized.items()}
    sizes = {group: (_divided(small, group), _divided(large, group)) for group in groups_of(n)}
    for group, both in sizes.items():
        for kind in COLLECTIVE_KINDS:
            for size in both:
                probes[kind, group, size] = _collective(target, kind, group, size)
    seconds = median_of_draws(probes, draws)
    idle = seconds["nothing"]

    def above(name: object) -> float:
        return max(seconds[name] - idle, 1e-7)

    links = []
    for group, (few_elements, many) in sizes.items():
        for kind in COLLECTIVE_KINDS:
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
    return Constants(
        device=target.device_kind,
        device_count=n,
        contract_flops_per_s=rates["product" if shared else "product f32"],
        contract_by_dtype=() if shared else rates_by_dtype(rates, chip),
        element_flops_per_s=rates["elements"],
        bandwidth_bytes_per_s=bandwidth_bytes_per_s(seconds) if shared else rates["copy"],
        launch_s=above("kernels") / (2 * _TINY * work),
        gathers_by_dimension=target.platform not in GATHERS_AT_ONCE,
        folds_sums=target.platform not in SUMS_APART,
        fresh_s_per_byte=fresh_s_per_byte(seconds, few, 4 * width) if shared else 0.0,
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


def bandwidth_bytes_per_s(seconds: Mapping[object, float]) -> float:
    """Bytes a second that all devices of a host read and write together, beyond the caches.

    The difference of two numbers of turns has neither the dispatch in it nor the making of the
    result.

    Args:
      seconds: of the probes ("memory", turns).
    """
    short, long = (seconds["memory", turns] for turns in (_FEW_TURNS, _MANY_TURNS))
    once_s = (long - short) / (_MANY_TURNS - _FEW_TURNS)
    # On a busy machine the shorter loop may have been held up as long as the longer one ran: a
    # turn takes no less than half of what it takes with everything beside it.
    return 2.0 * _TOUCHED_BYTES / max(once_s, long / _MANY_TURNS / 2)


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
