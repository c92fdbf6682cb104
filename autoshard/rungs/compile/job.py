"""Rung 2's question to the compiler: one module, compiled in a worker that may crash or hang."""

import dataclasses
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from autoshard.compat.xla.compilers import compilers_here
from autoshard.compat.xla.deviceless import Hardware, compile_without_devices
from autoshard.compat.xla.executable import MemoryUse, compile_module
from autoshard.errors import WorkerError
from autoshard.records.module import Module
from autoshard.records.trial import Failure, Stage
from autoshard.rungs.compile.store import keep
from autoshard.rungs.worker import process as worker_module
from autoshard.rungs.worker.failures import failure_of
from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings, worker_here
from autoshard.target.host import cores, peak_bytes
from autoshard.target.target import Target

FIRST_PEAK_BYTES = 3 << 30
"""The memory that a compile is taken to need until one has been seen."""

_MOST_WORKERS = 16

_NICE = 5
"""Compilers stand back: the search keeps its core, and the user's machine stays at hand."""

_REMAT = "Involuntary full rematerialization"
_SHARDINGS = re.compile(r"sharding (\{.*?\}) to (\{.*?\}) (?:efficiently|without)")
_OP = re.compile(
    r"HLO operation:? %\S+ = (?P<shape>\([^)]*\)|[\w]+\[[^\]]*\])\S* (?P<opcode>[\w-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What the compiler made of a module.

    Attributes:
      memory: for one device.
      hlo_text: the optimized program of one device.
      warnings: the partitioner's involuntary full rematerializations, each once.
      elapsed_s: time compiling, seconds, without starting a worker.
      peak_bytes: the most memory that the worker has held so far; 0 where nothing tells, or where
        the search's own process compiled.
      assumptions: sentences on what the compiler had to be told, besides the module.
    """

    memory: MemoryUse
    hlo_text: str
    warnings: tuple[str, ...]
    elapsed_s: float
    assumptions: tuple[str, ...] = ()
    peak_bytes: int = 0


def workers_for(free_bytes: int | None, peak_bytes: int) -> int:
    """How many programs may compile at once on this machine: at least 1.

    Args:
      free_bytes: memory of the host for all of them; None where nothing tells.
      peak_bytes: memory for one of them.
    """
    room = _MOST_WORKERS if free_bytes is None else free_bytes // peak_bytes
    return max(1, min(cores(), room, _MOST_WORKERS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """All that a process needs to compile a candidate; pickles small.

    Attributes:
      hardware: what to compile for where it is not here; None for CPU devices of the worker's own.
      order: for each place of the module's mesh the number of the hardware's device.
      compilers: what the answer must come from, as `compilers_here` says it.
      executables: folder that takes the executable, for `executables.kept`; None for none.
    """

    module: Module
    time_limit_s: float
    settings: WorkerSettings
    hardware: Hardware | None = None
    order: tuple[int, ...] = ()
    compilers: str = ""
    executables: Path | None = None


def request_for(
    module: Module,
    target: Target,
    folder: str | None,
    time_limit_s: float,
    executables: Path | None = None,
) -> CompileRequest:
    """How to compile a module for a target in a worker: for CPUs, or for what is not here.

    Args:
      folder: for the worker's output; None where it may run on another machine, see WorkerSettings.
      executables: takes the executable, where the target is here; None for none.
    """
    return CompileRequest(
        module=module,
        time_limit_s=time_limit_s,
        settings=WorkerSettings(
            platform="cpu",
            device_count=target.device_count if target.is_here else 1,
            folder=folder,
            deviceless=not target.is_here,
            nice=_NICE,
        ),
        hardware=target.hardware,
        order=() if target.is_here else target.order(module.mesh),
        compilers=compilers_here(target.hardware.platform if target.hardware else None),
        executables=executables if target.is_here else None,
    )


def compile_module_job(
    module: Module,
    time_limit_s: float,
    worker: WorkerProcess,
    hardware: Hardware | None = None,
    order: tuple[int, ...] = (),
    executables: Path | None = None,
) -> CompileResult | Failure:
    """Compiles `module` in `worker`, for CPU devices of its own or for hardware that is not here.

    A worker for CPUs must have at least `module.device_count` devices, one for other hardware must
    have been started as `deviceless`.
    """
    return worker.call(
        _compile,
        module,
        hardware,
        order,
        executables,
        stage=Stage.COMPILE,
        time_limit_s=time_limit_s,
    )


def compile_in_process(request: CompileRequest) -> CompileResult | Failure:
    """`compile_module_job` in this thread's own worker: submit it to any Executor.

    Raises:
      WorkerError: this machine has other compilers, or other options for them, than the search.
    """
    here = compilers_here(request.hardware.platform if request.hardware else None)
    if request.compilers and here != request.compilers:
        raise WorkerError(
            f"{platform.node()} compiles with {here}, the search expects {request.compilers}:"
            " install the same versions there, and set the same XLA_FLAGS and LIBTPU_INIT_ARGS"
        )
    worker = worker_here(request.settings)
    return compile_module_job(
        request.module,
        request.time_limit_s,
        worker,
        request.hardware,
        request.order,
        request.executables,
    )


def compile_on(
    module: Module, devices: Sequence[jax.Device], executables: Path | None = None
) -> CompileResult | Failure:
    """Compiles `module` in this process: it alone can, where it holds live accelerators.

    Args:
      executables: takes the executable, for `executables.kept`; None for none.
    """
    start = time.perf_counter()
    try:
        executable = compile_module(module, devices)
    except (RuntimeError, NotImplementedError) as error:
        return failure_of(error, Stage.COMPILE, time.perf_counter() - start)
    elapsed_s = time.perf_counter() - start
    if executables is not None:
        keep(executable, executables)
    return CompileResult(
        memory=executable.memory,
        hlo_text=executable.hlo_text,
        warnings=(),
        elapsed_s=elapsed_s,
    )


def _compile(
    module: Module, hardware: Hardware | None, order: tuple[int, ...], executables: Path | None
) -> CompileResult | Failure:
    """Runs in the worker."""
    before = os.fstat(2).st_size
    begin = time.perf_counter()
    try:
        assumptions: tuple[str, ...] = ()
        if hardware is not None:
            memory, text, assumptions = compile_without_devices(module, hardware, order)
        else:
            executable = compile_module(module, jax.devices()[: module.device_count])
            memory, text = executable.memory, executable.hlo_text
        elapsed_s = time.perf_counter() - begin
        if hardware is None and executables is not None:
            keep(executable, executables)
        return CompileResult(
            memory=memory,
            hlo_text=text,
            warnings=rematerializations(_written_since(before)),
            elapsed_s=elapsed_s,
            assumptions=assumptions,
            peak_bytes=peak_bytes(),
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return failure_of(error, Stage.COMPILE, time.perf_counter() - begin)


def _written_since(offset: int) -> str:
    """What this worker wrote to stderr from `offset` bytes on; "" outside a worker."""
    if worker_module.log_path is None:
        return ""
    with open(worker_module.log_path, "rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def rematerializations(stderr: str) -> tuple[str, ...]:
    """The involuntary full rematerializations in XLA's output, one short line each, each once.

    A line names the operation and its source as far as XLA does: a module without locations leaves
    only opcode and local shape.
    """
    lines = (_rematerialization(line) for line in stderr.splitlines() if _REMAT in line)
    return tuple(dict.fromkeys(lines))


def _rematerialization(line: str) -> str:
    shardings, op = _SHARDINGS.search(line), _OP.search(line)
    if shardings is None or op is None:
        return line[line.index(_REMAT) :]
    text = f"full rematerialization of {op['opcode']} {op['shape']}"
    text += f" from {shardings[1]} to {shardings[2]}"
    name, source = _OP_NAME.search(line), _SOURCE.search(line)
    if name:
        text += f" in {name[1]}"
    if source:
        text += f" at {source[1]}:{source[2]}" if source[2] else f" at {source[1]}"
    return text
