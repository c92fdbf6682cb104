"""The bench in one killable child: a candidate that hangs or aborts costs only itself.

XLA:CPU aborts the whole process when devices wait for each other too long; a hang has no end at
all. Either way the child dies, the candidate at fault is forgotten, and the next call starts a
child that loads what is still wanted. Candidates reloaded so start again from the initial state,
which changes no timing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from autoshard.compat.xla.executable import MemoryUse
from autoshard.errors import WorkerError
from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport, ReferenceLost
from autoshard.records.trial import Failure, Stage
from autoshard.rungs.profile.runner import LocalRunner
from autoshard.rungs.worker.process import WorkerProcess, WorkerSettings

T = TypeVar("T")


class ChildRunner:
    """A `Runner` whose programs run in a child process.

    Args:
      settings: platform, number of devices and output folder of the child.
      time_limit_s: for each load, run, trace, comparison and initialisation, seconds; beyond it
        the child is killed and the call's candidate fails with a timeout.
      executables: folder with what workers have compiled for devices like the child's; what is not
        there the child compiles, and the next child finds.

    Every method but `unload` and `close` may raise WorkerError, when no child can be started, or
    none be set up with inputs that an earlier one took.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        time_limit_s: float = 600.0,
        executables: Path | None = None,
    ):
        self._worker = WorkerProcess(settings)
        self._executables = executables
        self._time_limit_s = time_limit_s
        self._starts = 0
        self._is_set = False  # whether a child has taken the inputs
        self._inputs: tuple[Module | list[np.ndarray], list[list[np.ndarray]]] | None = None
        self._wanted: dict[str, Module] = {}
        self._lost: dict[str, Failure] = {}
        self._reference: tuple[str, Module, int] | None = None
        self._trusting = 0  # which of the children knows the reference

    def set_inputs(
        self, init: Module | Sequence[np.ndarray], batches: Sequence[Sequence[np.ndarray]]
    ) -> Failure | None:
        start = init if isinstance(init, Module) else list(init)
        self._inputs = (start, [list(batch) for batch in batches])
        self._reference = None
        self._starts = -1  # whatever child there is must be set up again
        self._is_set = False
        return self._ready()

    def load(self, name: str, module: Module) -> MemoryUse | Failure:
        self._lost.pop(name, None)
        self._wanted.pop(name, None)
        if (failure := self._ready()) is not None:
            return failure
        self._wanted[name] = module
        return self._costing(name, self._call(_load, name, module))

    def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
        if (failure := self._on(name)) is not None:
            return failure
        return self._costing(name, self._call(_run, name, steps))

    def trace(self, name: str, folder: str, steps: int) -> str | Failure:
        if (failure := self._on(name)) is not None:
            return failure
        where = str(Path(folder).absolute())
        return self._costing(name, self._call(_trace, name, where, steps))

    def unload(self, name: str) -> None:
        """Frees the arrays of a program."""
        self._lost.pop(name, None)
        self._wanted.pop(name, None)
        if self._worker.pid is not None and self._starts == self._worker.starts:
            self._call(_unload, name)

    def trust(self, name: str, module: Module, steps: int = 2) -> Failure | None:
        self._lost.pop(name, None)
        self._reference = None
        if (failure := self._ready()) is not None:
            return failure
        refused = self._call(_trust, name, module, steps)
        if refused is None:
            self._reference = (name, module, steps)
            self._trusting = self._worker.starts
        return refused

    def numerics(self, name: str, reference: str) -> NumericsReport | ReferenceLost | Failure:
        if (failure := self._on(name)) is not None:
            return failure
        if self._reference is not None and self._trusting != self._worker.starts:
            # A new child runs the reference only where it is asked to compare with it.
            if (refused := self.trust(*self._reference)) is not None:
                self._lost[reference] = refused
            if (failure := self._on(name)) is not None:
                return failure
        if reference in self._lost:
            return ReferenceLost(self._lost[reference])
        return self._costing(name, self._call(_numerics, name, reference))

    def finite(self, name: str, steps: int = 2) -> Failure | None:
        if (failure := self._on(name)) is not None:
            return failure
        return self._costing(name, self._call(_finite, name, steps))

    def renew(self) -> None:
        """Ends the child; the next call starts another, with what is loaded in this one."""
        self._worker.close()

    def close(self) -> None:
        """Ends the child and forgets every program."""
        self._worker.close()
        self._wanted.clear()

    def _on(self, name: str) -> Failure | None:
        """Makes sure that a child is there and holds `name`; else the failure that keeps it out."""
        failure = self._ready()
        if failure is None and name not in self._wanted:
            failure = self._lost.get(name)
            if failure is None:
                raise KeyError(f"{name!r} is not loaded; loaded: {sorted(self._wanted)}")
        return failure

    def _ready(self) -> Failure | None:
        """Sets up a new child where the last one died; returns what the inputs' init failed with.

        A program that fails now is lost, with its failure kept for its next use, and the child, if
        it died, is set up once more without it: at most one round for each program.
        """
        if self._inputs is None:
            raise RuntimeError("set_inputs must be called before anything is loaded")
        while self._starts != self._worker.starts or self._worker.pid is None:
            failure = self._call(_set_inputs, *self._inputs, self._executables)
            if isinstance(failure, Failure) and self._is_set:
                raise WorkerError(f"a new process cannot be set up: {failure.message}")
            if isinstance(failure, Failure):
                return failure
            self._is_set = True
            self._starts = self._worker.starts
            for name, module in list(self._wanted.items()):
                lost = self._call(_load_again, name, module)
                if lost is not None:
                    self._lost[name] = lost
                    self._wanted.pop(name, None)
                    if self._worker.pid is None:
                        break
        return None

    def _costing(self, name: str, result: T | Failure) -> T | Failure:
        """A failure of `name` costs it its place in the bench."""
        if isinstance(result, Failure):
            self._lost[name] = result
            self._wanted.pop(name, None)
            if self._worker.pid is not None:
                self._call(_unload, name)
        return result

    def _call(self, function: Callable[..., T], *args: object) -> T | Failure:
        return self._worker.call(
            function, *args, stage=Stage.PROFILE, time_limit_s=self._time_limit_s
        )


# What the child runs. It has one bench, made with its first inputs.

_bench: LocalRunner | None = None


def _set_inputs(
    init: Module | Sequence[np.ndarray],
    batches: Sequence[Sequence[np.ndarray]],
    executables: Path | None,
) -> Failure | None:
    global _bench
    _bench = _bench or LocalRunner(executables=executables)
    return _bench.set_inputs(init, batches)


def _here() -> LocalRunner:
    assert _bench is not None
    return _bench


def _load(name: str, module: Module) -> MemoryUse | Failure:
    return _here().load(name, module)


def _load_again(name: str, module: Module) -> Failure | None:
    """Loads a program and runs one step, since the first step in a process takes longer."""
    loaded = _here().load(name, module)
    ran = loaded if isinstance(loaded, Failure) else _here().run(name, 1)
    return ran if isinstance(ran, Failure) else None


def _run(name: str, steps: int) -> tuple[float, ...] | Failure:
    return _here().run(name, steps)


def _trace(name: str, folder: str, steps: int) -> str | Failure:
    return _here().trace(name, folder, steps)


def _unload(name: str) -> None:
    _here().unload(name)


def _trust(name: str, module: Module, steps: int) -> Failure | None:
    return _here().trust(name, module, steps)


def _numerics(name: str, reference: str) -> NumericsReport | Failure:
    return _here().numerics(name, reference)


def _finite(name: str, steps: int) -> Failure | None:
    return _here().finite(name, steps)
