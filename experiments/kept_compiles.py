"""Compiled programs in a folder: what one compiler made of a module once, it is not asked again."""

import concurrent.futures
import dataclasses
import gzip
import hashlib
import os
import pathlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax

from autoshard.records.trial import Failure, Kind
from autoshard.rungs.compile.job import CompileRequest, CompileResult, compile_in_process

_WORKERS = 2


class KeptCompiles(concurrent.futures.Executor):
    """Answers `compile_in_process` from a folder, or by a worker whose answer then stands there.

    With it a change of the cost model asks no compiler again: compiled programs are priced anew.
    """

    def __init__(self, folder: pathlib.Path):
        """
        Args:
          folder: of this machine's own runs, since what lies there is unpickled.
        """
        self._folder = folder
        self._pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, "compile")

    def submit(  # type: ignore[override]  # of the functions there are it takes one
        self, fn: Callable[..., Any], request: CompileRequest, /
    ) -> concurrent.futures.Future[CompileResult | Failure]:
        if fn is not compile_in_process:
            raise ValueError(f"got {fn}, expected compile_in_process")
        return self._pool.submit(self._answer, request)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _answer(self, request: CompileRequest) -> CompileResult | Failure:
        """A crash or a time limit is not kept: it may not come again."""
        path = self._folder / f"{_digest(request)}.pickle.gz"
        if path.exists():
            with gzip.open(path) as file:
                kept: CompileResult | Failure = pickle.load(file)
            return kept
        found = compile_in_process(request)
        if not isinstance(found, Failure) or found.kind is Kind.OOM:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
            with gzip.open(part, "wb") as file:
                pickle.dump(found, file)
            part.replace(path)
        return found


def _digest(request: CompileRequest) -> str:
    """Of all that decides what the compiler makes of a module."""
    module = request.module
    text = hashlib.sha256(module.stablehlo)
    said = [field.name for field in dataclasses.fields(CompileResult)]
    where = (module.mesh, request.hardware, request.order, request.compilers, jax.__version__, said)
    text.update(repr(where).encode())
    return text.hexdigest()[:24]
