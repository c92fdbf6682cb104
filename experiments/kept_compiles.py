"""Compiled programs in a folder: what one compiler made of a module once, it is not asked again."""

import gzip
import hashlib
import os
import pathlib
import pickle
import threading

import jax

from autoshard.compat.compilers import compiler_version
from autoshard.module import Module
from autoshard.rungs.compile_job import CompileResult, compile_in_process, request_for
from autoshard.target import Target
from autoshard.trial import Failure, Kind


def compiled(
    module: Module, target: Target, folder: pathlib.Path, time_limit_s: float
) -> CompileResult | Failure:
    """What `folder` holds for this module, target and compiler; else compiles it in a worker.

    A crash or a time limit is not kept: it may not come again.

    Args:
      folder: of this machine's own runs, since what lies there is unpickled.
      time_limit_s: for the compiler, seconds.
    """
    path = folder / f"{_digest(module, target)}.pickle.gz"
    if path.exists():
        with gzip.open(path) as file:
            kept: CompileResult | Failure = pickle.load(file)
        return kept
    found = compile_in_process(request_for(module, target, str(folder), time_limit_s))
    if not isinstance(found, Failure) or found.kind is Kind.OOM:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        with gzip.open(part, "wb") as file:
            pickle.dump(found, file)
        part.replace(path)
    return found


def _digest(module: Module, target: Target) -> str:
    """Of all that decides what the compiler makes of a module."""
    text = hashlib.sha256(module.stablehlo)
    away = not target.is_here
    compiler = compiler_version(target.lowering_platform) if away else ""
    order = target.order(module.mesh) if away else ()
    where = (module.mesh, target.hardware, order, compiler, jax.__version__)
    text.update(repr(where).encode())
    return text.hexdigest()[:24]
