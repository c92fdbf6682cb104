"""Compiling and running a Module with the client itself: the only jaxlib names rungs 2 and 3 need.

`jax.jit` would need the Python function; a Module has only StableHLO bytes. The same client call
that jit ends in (`client.compile_and_load`, jaxlib 0.10-0.12) takes the bytes, gives the same
program, and `execute_sharded` runs it on arrays that already lie where the program wants them.
Everything here is physical: PRNG keys are their uint32 words, and nothing is resharded or cast.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
import jax.interpreters.mlir as jax_mlir
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import lapack, xla_client
from jaxlib.mlir import ir

from autoshard.compat.shardy.stablehlo import PRODUCTS, dtype_of, precision_of
from autoshard.records.arithmetic import part_of_complex
from autoshard.records.module import ArraySpec, Module
from autoshard.records.precision import effective_matmul_dtype, operand_dtype

_FLOAT_TYPE = re.compile(r"(?<=[<x])(f64|f32|bf16|f16|f8E\w+|f6E\w+|f4E\w+)[>,]")
_LAPACK = b"lapack_"
_MOST_PARAMETERS = 2000  # of a program for TPUs, that are not one tuple
_CALLBACK = re.compile(rb"python_(?:cpu|gpu)_callback")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What one device needs to run a program, as its compiler says, in bytes.

    Attributes:
      arguments_bytes, outputs_bytes: the local parts of all inputs and outputs.
      aliased_bytes: the part of the outputs that reuses donated arguments.
      temporaries_bytes: the block allocated for everything between.
      peak_bytes: arguments + outputs - aliased + temporaries, or the backend's own peak where that
        is larger. The backend's alone is not enough: XLA:CPU leaves the temporaries out of it
        (3 + 16 kB reported with 131 kB of temporaries, jaxlib 0.10.2 and 0.12.0), and elsewhere it
        counts what is live, while the temporaries are allocated as one block.
    """

    arguments_bytes: int
    outputs_bytes: int
    aliased_bytes: int
    temporaries_bytes: int
    peak_bytes: int


class Executable:
    """A compiled Module on its devices. Made by `compile_module`."""

    def __init__(self, module: Module, devices: Sequence[jax.Device], loaded: object):
        self.module = module
        self._loaded = loaded
        # A mesh must have an axis for NamedSharding to know its devices.
        axes = module.mesh or (("_", 1),)
        grid = np.array(devices, dtype=object).reshape([size for _, size in axes])
        self._mesh = Mesh(grid, tuple(name for name, _ in axes))
        self.input_shardings = tuple(self._sharding(spec) for spec in module.inputs)
        self.output_shardings = tuple(self._sharding(spec) for spec in module.outputs)
        self._handlers: list[object] | None = None

    def _sharding(self, spec: ArraySpec) -> NamedSharding:
        parts = [axes[0] if len(axes) == 1 else (axes or None) for axes in spec.spec]
        return NamedSharding(self._mesh, PartitionSpec(*parts))

    @property
    def memory(self) -> MemoryUse:
        """The memory one device needs; the fullest device where they differ is not told apart."""
        return memory_use(self._loaded)

    @property
    def hlo_text(self) -> str:
        """The optimized HLO of the program one device runs."""
        return self._loaded.hlo_modules()[0].to_string()  # type: ignore[attr-defined]

    def place(self, values: Sequence[np.ndarray], *, first: int = 0) -> list[jax.Array]:
        """Puts host values on the devices, sharded as the inputs of the module.

        Args:
          values: whole arrays, for the inputs `first`, `first` + 1, ...
          first: index of the input that `values[0]` is for.

        Returns:
          Arrays that share no memory with `values`, so that donating them is harmless.

        Raises:
          ValueError: a value has not the shape or dtype of its input.
        """
        stop = first + len(values)
        specs = self.module.inputs[first:stop]
        if len(specs) != len(values):
            raise ValueError(
                f"got {len(values)} values from input {first} on, "
                f"expected at most {len(self.module.inputs) - first}"
            )
        placed: list[jax.Array] = []
        for value, spec, sharding in zip(
            values, specs, self.input_shardings[first:stop], strict=True
        ):
            if value.shape != spec.shape or value.dtype != np.dtype(spec.dtype):
                raise ValueError(
                    f"{spec.path}: got {value.dtype}{list(value.shape)}, "
                    f"expected {spec.dtype}{list(spec.shape)}"
                )
            part = functools.partial(_part, value)
            with jax.enable_x64(True):  # else 64-bit values would be cast
                placed.append(jax.make_array_from_callback(spec.shape, sharding, part))
        return placed

    def run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Runs the program once; returns before it has finished, as jit does.

        Args:
          arrays: all inputs, as `place` or an earlier run returned them. Donated ones are consumed.

        Raises:
          ValueError: the number or the sharding of the arrays is wrong.
          jax.errors.JaxRuntimeError: the runtime failed (may also come when blocking on a result).
        """
        if len(arrays) != len(self.input_shardings):
            raise ValueError(f"got {len(arrays)} arrays, expected {len(self.input_shardings)}")
        for array, sharding, spec in zip(
            arrays, self.input_shardings, self.module.inputs, strict=True
        ):
            if array.sharding is not sharding and array.sharding != sharding:
                raise ValueError(f"{spec.path}: got {array.sharding}, expected {sharding}")
        results = self._loaded.execute_sharded(list(arrays))  # type: ignore[attr-defined]
        if self._handlers is not None:
            return results.consume_with_handlers(self._handlers)
        # The first time jax checks that the shards are those of the sharding; later it need not.
        outputs: list[jax.Array] = [
            jax.make_array_from_single_device_arrays(spec.shape, sharding, shards)
            for spec, sharding, shards in zip(
                self.module.outputs,
                self.output_shardings,
                results.disassemble_into_single_device_arrays(),
                strict=True,
            )
        ]
        self._handlers = [_result_handler(array) for array in outputs]
        return outputs


def _part(value: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """A copy of one shard: the CPU client would otherwise keep the caller's own memory."""
    return np.array(value[index])


def _result_handler(array: jax.Array) -> object:
    """Assembles outputs like `array` in C++: 200 leaves on 8 devices are 1600 shards."""
    make = xla_client.array_result_handler
    try:  # jaxlib < 0.12: its checks refuse one-device shardings, and jax skips them too
        return make(array.aval, array.sharding, True, _skip_checks=True)
    except TypeError:
        return make(array.aval, array.sharding, True)


def compile_module(module: Module, devices: Sequence[jax.Device]) -> Executable:
    """Compiles a module for live devices of one client, in device order of the module's mesh.

    Args:
      devices: exactly `module.device_count` devices, major to minor over `module.mesh`.

    Raises:
      ValueError: the number of devices is wrong.
      jax.errors.JaxRuntimeError: the compiler refused, with its text.
    """
    _prepare(module)
    options = compile_options(module, [device.id for device in devices])
    loaded = devices[0].client.compile_and_load(
        module.stablehlo, xla_client.DeviceList(tuple(devices)), options
    )
    return Executable(module, devices, loaded)


def serialized(executable: Executable) -> bytes:
    """An executable for `load_module`: of the same jaxlib, on a machine of the same kind.

    Raises:
      jax.errors.JaxRuntimeError: its backend has no such form.
    """
    return executable._loaded.serialize()  # type: ignore[attr-defined]


def load_module(module: Module, devices: Sequence[jax.Device], data: bytes) -> Executable:
    """What `compile_module` gave another process, for devices of the same numbers.

    Args:
      data: of `serialized`, of the same module.

    Raises:
      ValueError: the number of devices is wrong.
      jax.errors.JaxRuntimeError: the client does not take it.
    """
    _prepare(module)
    options = compile_options(module, [device.id for device in devices])
    loaded = devices[0].client.deserialize_executable(
        data, xla_client.DeviceList(tuple(devices)), options
    )
    return Executable(module, devices, loaded)


def _prepare(module: Module) -> None:
    """Loads what the program calls."""
    if _LAPACK in module.stablehlo:
        # jax loads LAPACK's routines when it lowers a call to one; bytes are not lowered again,
        # and a call to a routine that is not loaded ends the process (jaxlib 0.10-0.12).
        lapack.prepare_lapack_call("geqrf", np.dtype(np.float32))


def compile_options(module: Module, ids: Sequence[int]) -> xla_client.CompileOptions:
    """How to compile a module for devices of these ids, major to minor over its mesh."""
    count = module.device_count
    if len(ids) != count:
        raise ValueError(f"got {len(ids)} devices, expected {count} for mesh {module.mesh}")
    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = count
    options.device_assignment = xla_client.DeviceAssignment.create(np.array(ids).reshape(1, count))
    # As `jit` has it (dispatch.should_tuple_args, jax 0.10 and 0.12): a TPU's lists are bounded.
    options.parameter_is_tupled_arguments = (
        module.platform == "tpu" and len(module.inputs) > _MOST_PARAMETERS
    )
    build = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = count
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    return options


def memory_use(executable: object) -> MemoryUse:
    """What one device needs to run an executable of XLA, loaded or not."""
    stats = executable.get_compiled_memory_stats()  # type: ignore[attr-defined]
    total = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return MemoryUse(
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temporaries_bytes=stats.temp_size_in_bytes,
        peak_bytes=max(total, stats.peak_memory_in_bytes),
    )


def float_types(module: Module) -> frozenset[str]:
    """The floating-point types (MLIR names: f32, bf16, ...) that the program computes in.

    Those of its values, and those that its products cut f32 to on its platform: tf32, bf16.
    """
    with jax_mlir.make_ir_context() as context:
        parsed = ir.Module.parse(module.stablehlo, context)
        text = str(parsed.operation.get_asm(large_elements_limit=8))
        cut: set[str] = set()

        def visit(operation: ir.Operation) -> ir.WalkResult:
            if operation.name not in PRODUCTS:
                return ir.WalkResult.ADVANCE
            if part_of_complex(dtype_of(operation.operands[0])) == "f32":
                cut.add(
                    operand_dtype(
                        effective_matmul_dtype("f32", *precision_of(operation)), module.platform
                    )
                )
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(visit)
    return frozenset(_FLOAT_TYPE.findall(text)) | (cut - {""})


def has_host_callback(module: Module) -> bool:
    """Whether the program calls back into Python; then it cannot run from its bytes alone."""
    return _CALLBACK.search(module.stablehlo) is not None
