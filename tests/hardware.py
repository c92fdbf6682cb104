"""Made-up chips and topologies with round figures, so that costs can be worked out by hand."""

import os

import pytest

from autoshard.compat.xla.compilers import compiler_version, install_command
from autoshard.target.catalogue import Chip, Figure, Link
from autoshard.target.topology import Topology


def figure(value: float, unit: str = "") -> Figure:
    return Figure(value=value, unit=unit, source="made up", date="2026-01-01")


def link(
    level: str, kind: str, bandwidth: float, domain: int | None = None, wraps_at: int | None = None
) -> Link:
    return Link(
        level=level,
        kind=kind,
        bandwidth=figure(bandwidth, "bytes/s"),
        latency=figure(0.0, "s"),
        domain=domain,
        wraps_at=wraps_at,
    )


def chip(platform: str, **changes: object) -> Chip:
    """A TPU with a torus of 1e9 bytes/s a link that wraps at 4, or a GPU with 8 to a host."""
    tpu = platform == "tpu"
    fields: dict[str, object] = {
        "name": "made-up",
        "platform": platform,
        "device_kind": "TPU v5p" if tpu else "NVIDIA made up",
        "flops": {"bf16": figure(1e14), "f32": figure(5e13)},
        "element_flops": figure(1e12),
        "memory_bytes": figure(16e9),
        "usable_bytes": figure(15e9),
        "memory_bandwidth": figure(1e12),
        "clock_hz": figure(1e9) if tpu else None,
        "launch_s": figure(1e-6),
        "devices_per_chip": 1,
        "host_shape": (2, 2, 1) if tpu else (8,),
        "dims": 3 if tpu else 2,
        "max_shape": (),
        "links": (
            (link("ici", "torus", 1e9, wraps_at=4), link("dcn", "switch", 1e7))
            if tpu
            else (link("nvlink", "switch", 1e9, domain=8), link("network", "switch", 1e8))
        ),
        "target_config": "",
    }
    return Chip(**{**fields, **changes})  # type: ignore[arg-type]


def tpu(*shape: int, slices: int = 1, **changes: object) -> Topology:
    return Topology(chip=chip("tpu", **changes), shape=shape, slices=slices)


def gpu(hosts: int, devices: int, **changes: object) -> Topology:
    return Topology(chip=chip("cuda", **changes), shape=(hosts, devices), slices=1)


def needs(platform: str) -> None:
    """Skips the test where the compiler for a platform is not installed.

    Fails it where AUTOSHARD_MUST_HAVE names the platform, as in CI: what is always skipped tests
    nothing.
    """
    if compiler_version(platform) is not None:
        return
    why = f"no compiler for {platform}: {install_command(platform)}"
    if platform in os.environ.get("AUTOSHARD_MUST_HAVE", "").split(","):
        pytest.fail(why)
    pytest.skip(why)
