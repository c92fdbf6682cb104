"""Compiling for hardware that is not here: the public topologies, and the compile-only client.

`jax.jit` would need the Python function on the topology's devices; a Module has only StableHLO
bytes. The call that jit ends in for such devices is `client.compile` (jaxlib 0.10-0.12).
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import jax.interpreters.mlir as jax_mlir
from jax.experimental import topologies
from jaxlib import xla_client
from jaxlib.mlir import ir

from autoshard.compat.xla.executable import MemoryUse, compile_options, memory_use
from autoshard.records.module import Module

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would ask a cloud server where it is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a lock file admits one process
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no driver whose version could be checked
}
"""What a process must find in its environment before it imports jax."""

XLA_FLAGS = "--xla_gpu_autotune_level=0"  # autotuning would run kernels

# What XLA:GPU says where it has fused a product into a kernel of Triton's and finds no tiling for
# it (jax 0.10.2: "Couldn't find ...", 0.11.2: "No supported ..."; of a ViT's rows of 197 tokens).
# Autotuning, which is off, would have taken the library.
_NO_TILING = ("Couldn't find output tile sizes", "No supported config found for HLO")
_LIBRARY_ALONE = ("xla_gpu_enable_triton_gemm", False)
_ASSUMED = "all products left to cuBLAS: without autotuning XLA:GPU found no tiling for some"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a compiler must know of devices that are not here; pickles small.

    Attributes:
      platform: "tpu" or "cuda".
      topology: the compiler's own name, such as `v5p:4x4x4`, or `1x8x8` (slices x hosts x devices).
      options: what else `get_topology_desc` is told, as (name, value) pairs.
    """

    platform: str
    topology: str
    options: tuple[tuple[str, object], ...] = ()


def environment(inherited: dict[str, str]) -> dict[str, str]:
    """The environment of a process that compiles for hardware that is not here."""
    flags = " ".join(x for x in (inherited.get("XLA_FLAGS", ""), XLA_FLAGS) if x)
    return {**inherited, **ENVIRONMENT, "XLA_FLAGS": flags}


@functools.lru_cache(maxsize=4)
def devices_of(hardware: Hardware) -> tuple[jax.Device, ...]:
    """The devices of a topology, in the order of its name.

    Raises:
      RuntimeError: the environment is not that of `environment`.
      jax.errors.JaxRuntimeError: the compiler knows no such topology.
    """
    if any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
        raise RuntimeError(
            "a compiler without devices needs autoshard.compat.deviceless.ENVIRONMENT"
        )
    found = topologies.get_topology_desc(
        platform=hardware.platform, topology_name=hardware.topology, **dict(hardware.options)
    )
    return tuple(found.devices)


def compile_without_devices(
    module: Module, hardware: Hardware, order: tuple[int, ...]
) -> tuple[MemoryUse, str, tuple[str, ...]]:
    """Compiles a module with the target's own compiler.

    Args:
      order: for each place of the module's mesh, major to minor, the number of the device.

    Returns:
      What one device needs, the optimized HLO of the program it runs, and what had to be assumed.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refused, with its text.
    """
    found = devices_of(hardware)
    devices = [found[i] for i in order] if order else list(found)
    options = compile_options(module, [d.id for d in devices])
    if hardware.platform == "cuda":
        # Of machine code nothing is asked: the HLO is the same, and a fifth of the time is saved.
        options.executable_build_options.debug_options.xla_backend_optimization_level = 0
    try:
        return *_compiled(module, devices, options), ()
    except jax.errors.JaxRuntimeError as error:
        if not any(text in str(error) for text in _NO_TILING):
            raise
        options.env_option_overrides = [_LIBRARY_ALONE]
        return *_compiled(module, devices, options), (_ASSUMED,)


def _compiled(
    module: Module, devices: Sequence[jax.Device], options: xla_client.CompileOptions
) -> tuple[MemoryUse, str]:
    # These clients take a module, not its bytes.
    with jax_mlir.make_ir_context() as context:
        parsed = ir.Module.parse(module.stablehlo, context)
        executable = devices[0].client.compile(
            parsed, xla_client.DeviceList(tuple(devices)), options
        )
    return memory_use(executable), executable.hlo_modules()[0].to_string()
