"""Calibration: short measurements on a live target that give the cost model its constants.

A matrix product, a chain of transcendental operations, a copy, many tiny kernels, a block too large
for the allocator to keep, and each collective in the smallest and the largest group. All samples
are taken in rounds over every probe, and the least of each is used: what else runs on the machine
only ever adds time, and on a busy one the medians of a probe and of the empty program that is taken
off it can come in the wrong order. What is kept is a JSON file with the date and a digest; a target
is calibrated once.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cost import FRESH_FROM_BYTES, GATHERS_AT_ONCE, KINDS, Constants, LinkCost
from autoshard.target import Target

REVISION = 5
_ROUNDS = 5
_REPEATS = 8  # collectives in one program, so that dispatch does not count
_TINY = 64  # products in the probe of fixed costs, each with one scaling after it
_FRESH_DEVICES = 8  # enough to keep every core busy; on all of a large mesh it would be gigabytes
_SMALL, _LARGE = 2048, 1 << 18  # float32 elements on one device


def calibrate(target: Target) -> Constants:
    """Measures a target, a few seconds."""
    n = target.device_count
    mesh = target.mesh((("x", n),) if n > 1 else ())
    few = min(n, _FRESH_DEVICES)

    def jit(
        function: Callable[..., jax.Array], *shape: int, mesh: Mesh = mesh
    ) -> Callable[[], object]:
        over = NamedSharding(mesh, PartitionSpec("x"))
        shape = (mesh.size, *shape)
        array = jax.jit(lambda: jnp.full(shape, 0.5, jnp.float32), out_shardings=over)()
        compiled = jax.jit(function, out_shardings=over).lower(array).compile()
        return lambda: jax.block_until_ready(compiled(array))

    side = 384
    width = 1 << 20
    probes: dict[object, Callable[[], object]] = {
        "nothing": jit(lambda x: x + 1.0, 8),
        "product": jit(lambda x: jnp.einsum("nij,njk->nik", x, x), side, side),
        "elements": jit(lambda x: jnp.tanh(x * 0.5 + 1.0) * x + jnp.exp(-x), width // 4),
        "copy": jit(lambda x: x * 1.5, width),
        "kernels": jit(_many_products, 8, 8),
    }
    shared = target.shared_host
    if shared:
        some = Mesh(np.array(target.devices[:few]), ("x",))
        probes["nothing of few"] = jit(lambda x: x + 1.0, 8, mesh=some)
        probes["kept"] = jit(_written(width), 8, mesh=some)
        probes["fresh"] = jit(_written(FRESH_FROM_BYTES // 4 + width), 8, mesh=some)
    groups = sorted({2, n} & set(range(2, n + 1))) if n > 1 else []
    for group in groups:
        for kind in KINDS:
            for size in (_SMALL, _LARGE):
                probes[kind, group, size] = _collective(target, kind, group, size)
    samples: dict[object, list[float]] = {name: [] for name in probes}
    for probe in probes.values():
        probe()
    for _ in range(_ROUNDS):
        for name, probe in probes.items():
            start = time.perf_counter()
            probe()
            samples[name].append(time.perf_counter() - start)
    seconds = {name: min(s) for name, s in samples.items()}
    idle = seconds["nothing"]

    def above(name: object) -> float:
        return max(seconds[name] - idle, 1e-7)

    links = []
    for group in groups:
        for kind in KINDS:
            small, large = (
                max(seconds[kind, group, s] - idle, 1e-7) / _REPEATS for s in (_SMALL, _LARGE)
            )
            payload = {"all_gather": group}.get(kind, 1)
            s_per_byte = max(large - small, 1e-12) / ((_LARGE - _SMALL) * 4 * payload)
            latency = max(small - s_per_byte * _SMALL * 4 * payload, 1e-7)
            links.append(
                LinkCost(kind=kind, group_size=group, latency_s=latency, s_per_byte=s_per_byte)
            )
    # On a shared host the rates are the host's: the work of all devices over the elapsed time.
    work = n if shared else 1
    return Constants(
        device=target.device_kind,
        device_count=n,
        contract_flops_per_s=work * 2.0 * side**3 / above("product"),
        element_flops_per_s=work * 7.0 * (width // 4) / above("elements"),
        bandwidth_bytes_per_s=work * 8.0 * width / above("copy"),
        launch_s=above("kernels") / (2 * _TINY * work),
        gathers_by_dimension=target.platform not in GATHERS_AT_ONCE,
        fresh_s_per_byte=fresh_s_per_byte(seconds, few, 4 * width) if shared else 0.0,
        shared=shared,
        forms_reduce_scatter=n > 1 and _forms_reduce_scatter(target),
        links=tuple(links),
        date=datetime.date.today().isoformat(),
    )


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


def _collective(target: Target, kind: str, group: int, size: int) -> Callable[[], object]:
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


def calibrated(target: Target, folder: str | os.PathLike[str] | None = None) -> Constants:
    """The constants of a target, from the file of an earlier calibration if there is one.

    Args:
      folder: where calibrations are kept; default `~/.cache/autoshard`.
    """
    keep = pathlib.Path(folder) if folder is not None else pathlib.Path.home() / ".cache/autoshard"
    identity = "|".join(
        [
            str(REVISION),
            target.platform,
            target.device_kind,
            str(target.device_count),
            jax.__version__,
            _host(),
        ]
    )
    path = keep / f"calibration-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        constants = Constants.from_json(data["constants"])
        if data["digest"] == constants.digest:
            return constants
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or damaged: measure
    constants = calibrate(target)
    with _suppressing_os_errors():
        keep.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(
            json.dumps(
                {
                    "identity": identity,
                    "date": constants.date,
                    "digest": constants.digest,
                    "constants": constants.to_json(),
                },
                indent=1,
            ),
            encoding="utf-8",
        )
        partial.replace(path)
    return constants


def _suppressing_os_errors() -> contextlib.suppress:
    return contextlib.suppress(OSError)  # a cache that cannot be written is only slower


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """What tells one host from another: its name, its processors, its memory."""
    model = ""
    with _suppressing_os_errors():
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}|{os.cpu_count()}|{np.__version__}"
