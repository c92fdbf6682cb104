"""The bench: runs candidates on the devices of this process, from one initial state.

For CPU targets it lives in a killable child (`runner_client.ChildRunner`), for accelerators in the
process that owns them. Not modelled here: several processes that share one program.
"""

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, overload

import jax
import numpy as np

from autoshard.compat.xla.executable import (
    Executable,
    MemoryUse,
    compile_module,
    float_types,
    has_host_callback,
)
from autoshard.records.layout import MeshShape
from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport, ReferenceLost
from autoshard.records.trial import Failure, Kind, Stage
from autoshard.rungs.compile.store import keep, kept
from autoshard.rungs.profile import numerics
from autoshard.rungs.profile.chunked import chunked_map
from autoshard.rungs.profile.numerics import Reference, Trajectory
from autoshard.rungs.worker.failures import failure_of
from autoshard.target import host

_MOST_EXECUTABLES = 32
"""At most so many executables stay in a process, but for those of programs that are loaded.

XLA:CPU maps every kernel of a program into the process. One step took 1140 mappings, another 1800,
and Linux allows a process 65530.
"""


class Runner(Protocol):
    """What measures candidates, here or in a child. Failures are returned, never raised.

    Attributes:
      renew: goes over to a new process, where what is loaded is loaded again and starts from the
        initial state; None if this process itself measures.
    """

    @property
    def renew(self) -> Callable[[], None] | None: ...

    def set_inputs(
        self, init: Module | Sequence[np.ndarray], batches: Sequence[Sequence[np.ndarray]]
    ) -> Failure | None:
        """Sets what every program starts from; the programs loaded so far start again.

        Args:
          init: the initial state as host arrays, or a module without inputs whose outputs it is;
            the module runs once, on the host if it is for CPUs, and the state stays there.
          batches: at least one batch, each the batch leaves in order; steps cycle through them.
        """

    def load(self, name: str, module: Module) -> MemoryUse | Failure:
        """Compiles a program, once as long as it is the same, and places its state and batches."""

    def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
        """Runs steps, each on the state of the last; wall time of `steps` of them in seconds.

        A sample is the time from calling the program to all its outputs being ready; where steps
        run ahead (`runs_ahead`), from the end of one step to the end of the next.
        """

    def trace(self, name: str, folder: str, steps: int) -> str | Failure:
        """Runs `steps` steps under the profiler; returns the folder, for `traces.read_trace`."""

    def unload(self, name: str) -> None:
        """Frees the arrays of a program; loading it again starts from the initial state."""

    def trust(self, name: str, module: Module, steps: int = 2) -> Failure | None:
        """Runs a program some steps from the initial state, for others to be compared with it.

        The last one trusted is the reference. Nothing of it stays on the devices.
        """

    def numerics(self, name: str, reference: str) -> NumericsReport | ReferenceLost | Failure:
        """Compares a loaded program with the reference; it then starts again.

        Raises:
          KeyError: the reference is another, or there is none.
        """

    def finite(self, name: str, steps: int = 2) -> Failure | None:
        """Runs a loaded program from the initial state: what was finite must be so afterwards."""


@dataclasses.dataclass(slots=True)
class _Entry:
    """A loaded program; its arrays are None until the next run needs them."""

    module: Module
    digest: str
    state: list[jax.Array] | None = None
    batches: list[list[jax.Array]] | None = None
    steps: int = 0


class LocalRunner:
    """A `Runner` on this process's devices.

    Args:
      placed: the devices at the places of a module's mesh, major to minor; by default the first of
        `jax.devices()`.
      executables: folder with what rung 2 has compiled, maybe in another process, and that takes
        what this one compiles; None for none.
    """

    renew = None

    def __init__(
        self,
        placed: Callable[[MeshShape], Sequence[jax.Device]] | None = None,
        executables: Path | None = None,
    ):
        self._placed = placed
        self._executables = executables
        self._initial: tuple[np.ndarray, ...] | None = None
        self._batches: tuple[tuple[np.ndarray, ...], ...] = ()
        self._entries: dict[str, _Entry] = {}
        self._compiled: dict[str, Executable] = {}  # by digest of the module, the oldest first
        self._reference: tuple[str, Reference] | None = None

    def set_inputs(
        self, init: Module | Sequence[np.ndarray], batches: Sequence[Sequence[np.ndarray]]
    ) -> Failure | None:
        if not batches:
            raise ValueError("got no batch, expected at least one")
        with _Catching() as caught:
            self._reference = None
            for name in self._entries:
                self.unload(name)
            if isinstance(init, Module):
                host = host_devices() if self._placed and init.platform == "cpu" else []
                made = (compile_module(init, host) if host else self._compile(init)).run([])
                init = [np.array(array) for array in made]
            self._initial = tuple(init)
            self._batches = tuple(tuple(batch) for batch in batches)
        return caught.failure

    def load(self, name: str, module: Module) -> MemoryUse | Failure:
        if (refused := _calling_back(module)) is not None:
            return refused
        with _Catching() as caught:
            entry = self._entry(name, module)
            self._place(entry)
            return self._executable(entry).memory
        self._entries.pop(name, None)
        self._compiled.pop(module.digest, None)
        return caught.expect()

    def _entry(self, name: str, module: Module) -> _Entry:
        entry, digest = self._entries.get(name), module.digest
        if entry is None or entry.digest != digest:
            if entry is not None:
                self._compiled.pop(entry.digest, None)
            entry = _Entry(module=module, digest=digest)
            self._executable(entry)
            self._entries[name] = entry
        return entry

    def _executable(self, entry: _Entry) -> Executable:
        if entry.digest not in self._compiled:
            placed = {other.digest for other in self._entries.values() if other.state is not None}
            idle = [digest for digest in self._compiled if digest not in placed]
            for digest in idle[: max(0, len(self._compiled) + 1 - _MOST_EXECUTABLES)]:
                del self._compiled[digest]
            self._compiled[entry.digest] = self._compile(entry.module)
        return self._compiled[entry.digest]

    def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
        entry = self._entries[name]
        with _Catching() as caught:
            return self._run(entry, steps)
        self.unload(name)  # donated arrays are gone
        return caught.expect()

    def trace(self, name: str, folder: str, steps: int) -> str | Failure:
        entry = self._entries[name]
        # A profiler may run already, of the user's own; the disk may be full.
        with _Catching(RuntimeError, OSError) as caught:
            self._place(entry)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with jax.profiler.trace(folder, profiler_options=options), _no_garbage_collection():
                (self._ends if _ahead(entry) else self._waiting)(entry, steps)
            return folder
        self.unload(name)
        return caught.expect()

    def unload(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None:
            entry.state = entry.batches = None
            entry.steps = 0

    def trust(self, name: str, module: Module, steps: int = 2) -> Failure | None:
        self._reference = None
        if (refused := _calling_back(module)) is not None:
            return refused
        with _Catching() as caught:
            executable = self._executable(self._entry(name, module))
            self.unload(name)
            made = numerics.reference(
                self._start(),
                float_types(executable.module),
                self._batches_of(steps),
                lambda state, batches: self._trajectory(executable, state, batches),
                _room_bytes(executable),
            )
            self._reference = (name, made)
        return caught.failure

    def numerics(self, name: str, reference: str) -> NumericsReport | Failure:
        trusted, against = self._reference or ("", None)
        if against is None or trusted != reference:
            raise KeyError(f"{reference!r} is not the reference, which is {trusted!r}: trust it")
        self.unload(name)
        with _Catching() as caught:
            executable = self._executable(self._entries[name])
            got = self._trajectory(executable, self._start(), self._batches_of(against.steps))
            return numerics.compare(got, against, *_paths(executable.module))
        return caught.expect()

    def finite(self, name: str, steps: int = 2) -> Failure | None:
        self.unload(name)
        with _Catching() as caught:
            executable = self._executable(self._entries[name])
            got = self._trajectory(executable, self._start(), self._batches_of(steps))
            return numerics.not_finite(got, self._start(), *_paths(executable.module))
        return caught.expect()

    def _trajectory(
        self,
        executable: Executable,
        state: Sequence[np.ndarray],
        batches: Sequence[Sequence[np.ndarray]],
    ) -> Trajectory:
        count = executable.module.state_count
        arrays = []
        for i in range(count):  # one by one: a perturbed leaf is made as it is read
            arrays += jax.block_until_ready(executable.place([state[i]], first=i))
        metrics = []
        for batch in batches:
            outputs = executable.run([*arrays, *executable.place(batch, first=count)])
            arrays = outputs[:count]
            metrics.append(tuple(_copies(array) for array in outputs[count:]))
        return Trajectory(state=_OnDevices(arrays), metrics=tuple(metrics))

    def _run(self, entry: _Entry, steps: int) -> tuple[float, ...]:
        self._place(entry)
        with _no_garbage_collection():
            if not _ahead(entry):
                return self._waiting(entry, steps)
            ends = self._ends(entry, steps + 2)
            return tuple(end - before for before, end in itertools.pairwise(ends))

    def _waiting(self, entry: _Entry, steps: int) -> tuple[float, ...]:
        """Runs steps, none before the one before it has ended; wall time of each."""
        samples = []
        for _ in range(steps):
            begin = time.perf_counter()
            jax.block_until_ready(self._step(entry))
            samples.append(time.perf_counter() - begin)
        return tuple(samples)

    def _ends(self, entry: _Entry, steps: int) -> list[float]:
        """Runs steps, each called before the one before it has ended; when each but the last ended.

        What tells the end of a step is its metrics: the next one takes its state. An end is noticed
        when the next call has returned, which may be in the midst of that step, where its program
        waits for the host. So all ends count alike late, and the last, which no call follows, does
        not count.
        """
        ends = []
        metrics = self._step(entry)[entry.module.state_count :]
        for _ in range(steps - 1):
            following = self._step(entry)[entry.module.state_count :]
            jax.block_until_ready(metrics)
            ends.append(time.perf_counter())
            metrics = following
        jax.block_until_ready((entry.state, metrics))
        return ends

    def _step(self, entry: _Entry) -> list[jax.Array]:
        """Calls a program on the state of its last step and the next batch; its outputs."""
        state, batches = self._place(entry)
        outputs = self._executable(entry).run([*state, *batches[entry.steps % len(batches)]])
        entry.state = outputs[: entry.module.state_count]
        entry.steps += 1
        return outputs

    def _place(self, entry: _Entry) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        if entry.state is None or entry.batches is None:
            executable, count = self._executable(entry), entry.module.state_count
            entry.state = executable.place(self._start())
            entry.batches = [executable.place(batch, first=count) for batch in self._batches]
            jax.block_until_ready((entry.state, entry.batches))
        return entry.state, entry.batches

    def _compile(self, module: Module) -> Executable:
        if self._placed is not None:
            devices = self._placed(module.mesh)
        else:
            devices = jax.devices()[: module.device_count]
        if self._executables is None:
            return compile_module(module, devices)
        if (found := kept(module, devices, self._executables)) is None:
            found = compile_module(module, devices)
            keep(found, self._executables)
        return found

    def _start(self) -> tuple[np.ndarray, ...]:
        if self._initial is None:
            raise RuntimeError("set_inputs must be called, and succeed, before anything is loaded")
        return self._initial

    def _batches_of(self, steps: int) -> list[tuple[np.ndarray, ...]]:
        return [self._batches[i % len(self._batches)] for i in range(steps)]


def runs_ahead(platform: str) -> bool:
    """Whether a step is called while the one before it runs, as a training loop does.

    Accelerators then wait for the host only where its share of a step takes longer than theirs.
    Not on CPU devices: there two steps would share the cores.
    """
    return platform != "cpu"


def _ahead(entry: _Entry) -> bool:
    """Whether an entry's steps run ahead: without metrics nothing tells when one has ended."""
    module = entry.module
    return runs_ahead(module.platform) and len(module.outputs) > module.state_count


def _paths(module: Module) -> tuple[list[str], list[str]]:
    """The pytree paths of the state and of the metrics."""
    paths = [spec.path for spec in module.outputs]
    return paths[: module.state_count], paths[module.state_count :]


def _calling_back(module: Module) -> Failure | None:
    if not has_host_callback(module):
        return None
    return Failure(
        stage=Stage.PROFILE,
        kind=Kind.UNSUPPORTED,
        message="the step calls back into Python (jax.debug.print, pure_callback, ...); "
        "such a program cannot be measured from its bytes: remove the call",
    )


_ROOM = 0.8
"""The share of the host's free memory that a comparison may take."""


def _room_bytes(executable: Executable) -> int | None:
    """Host memory for the states of a comparison; None where the host does not say.

    On CPU devices the program itself takes its memory from the host.
    """
    left = host.available_bytes()
    if left is None:
        return None
    module = executable.module
    if module.platform == "cpu":
        left -= executable.memory.peak_bytes * module.device_count
    return max(0, int(_ROOM * left))


class _OnDevices(Sequence[numerics.Copies]):
    """The distinct copies of arrays, read from the devices at each access."""

    def __init__(self, arrays: Sequence[jax.Array]):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    @overload
    def __getitem__(self, index: int) -> numerics.Copies: ...

    @overload
    def __getitem__(self, index: slice) -> list[numerics.Copies]: ...

    def __getitem__(self, index: int | slice) -> numerics.Copies | list[numerics.Copies]:
        if isinstance(index, slice):
            return [_copies(array) for array in self._arrays[index]]
        return _copies(self._arrays[index])


def _copies(array: jax.Array) -> numerics.Copies:
    """The distinct values of an array as its devices hold it: copy r takes each index's r-th shard.

    Compared bit for bit, so that copies that agree on a NaN are one. The host holds one shard of a
    replica at a time beside the distinct copies.
    """
    held: dict[str, list[jax.Shard]] = {}
    for shard in sorted(array.addressable_shards, key=lambda s: s.device.id):
        held.setdefault(repr(shard.index), []).append(shard)
    distinct: list[np.ndarray] = []
    for replica in range(len(next(iter(held.values())))):
        shards = [parts[replica] for parts in held.values()]
        if distinct and all(_same(distinct[0][s.index], _read(s)) for s in shards):
            continue
        whole = np.empty(array.shape, array.dtype)
        for shard in shards:
            whole[shard.index] = _read(shard)
        if not any(_same(whole, other) for other in distinct):
            distinct.append(whole)
    return tuple(distinct)


def _read(shard: jax.Shard) -> np.ndarray:
    return np.asarray(_alone(shard))


def _alone(shard: jax.Shard) -> jax.Array:
    """A shard as an array of its own, without a copy.

    A JAX array keeps the host's copy once it is read: that of this one goes with it.
    """
    data = shard.data
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return all(chunked_map(np.array_equal, *(x.reshape(-1).view(np.uint8) for x in (a, b))))


def host_devices() -> list[jax.Device]:
    """The host as JAX's one device; [] where JAX was told to use accelerators alone."""
    try:
        return jax.local_devices(backend="cpu")[:1]
    except RuntimeError:
        return []


class _Catching:
    """Turns the runtime's errors into a failure; the program's own mistakes stay exceptions.

    Args:
      more: errors of other kinds that are no mistakes.
    """

    failure: Failure | None = None

    def __init__(self, *more: type[Exception]):
        self._kinds = (jax.errors.JaxRuntimeError, MemoryError, *more)

    def __enter__(self) -> Self:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, self._kinds):
            self.failure = failure_of(error, Stage.PROFILE, time.perf_counter() - self._begin)
        return self.failure is not None

    def expect(self) -> Failure:
        assert self.failure is not None
        return self.failure


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector must not run inside a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
