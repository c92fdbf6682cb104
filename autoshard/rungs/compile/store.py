"""Compiled programs on their way from rung 2 to rung 3, in most cases from process to process.

Both run what the same compiler made, so that it need not be made twice; on a GPU, where compiling
times many kernels, it would not even be the same. Whatever cannot be kept or read is compiled
again: nothing depends on this but time.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import jax

from autoshard.compat.xla.executable import Executable, load_module, serialized
from autoshard.records.atomic_files import write_atomically
from autoshard.records.module import Module


def keep(executable: Executable, folder: Path) -> None:
    """Writes an executable, at once or not at all.

    Args:
      folder: of this machine and of these compilers alone; made when missing, if what it lies in
        is there: a search that has ended leaves nothing.
    """
    with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):
        folder.mkdir(exist_ok=True)
        write_atomically(_place(folder, executable.module), serialized(executable))


def kept(module: Module, devices: Sequence[jax.Device], folder: Path) -> Executable | None:
    """The executable of a module on devices like those it was compiled for; None if not there."""
    with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):
        return load_module(module, devices, _place(folder, module).read_bytes())
    return None


def is_kept(module: Module, folder: Path) -> bool:
    """Whether there is an executable of a module; `kept` may still find that it cannot be read."""
    return _place(folder, module).exists()


def _place(folder: Path, module: Module) -> Path:
    return folder / module.digest
