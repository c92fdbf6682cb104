"""Layouts partitioned in worker processes, several at once: for programs that take seconds each."""

import concurrent.futures
import contextlib
import functools
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from autoshard.compat.shardy import shardings, stablehlo
from autoshard.errors import PartitionerRefused
from autoshard.program.analysis import Analysis
from autoshard.records.trial import Failure, Stage
from autoshard.rungs.propagate.partition import Annotations, Partition, annotations, judged
from autoshard.rungs.worker.failures import declined
from autoshard.rungs.worker.pool import worker_threads
from autoshard.rungs.worker.process import WorkerSettings, worker_here
from autoshard.space.specs import Specs

Answer: TypeAlias = "concurrent.futures.Future[Partition | Failure]"


class _Base(NamedTuple):
    """A base module as a worker is given it: with its locations, which the answers speak of."""

    digest: str
    bytecode: bytes
    site_of_tag: dict[int, int]


class Partitioners:
    """Threads with a worker process each; a partitioner that dies takes one answer with it."""

    def __init__(
        self,
        pool: concurrent.futures.Executor,
        analyses: Sequence[Analysis],
        folder: str | None,
        time_limit_s: float,
    ):
        """See `opened`."""
        self._pool = pool
        self._analyses = analyses
        self._settings = WorkerSettings(platform="cpu", device_count=1, folder=folder)
        self._time_limit_s = time_limit_s
        # AnnotatedStep when it is first asked about: of what is never asked nothing is kept.
        self._base = functools.cache(self._written)

    def ask(self, index: int, specs: Specs) -> Answer:
        """Begins with one layout.

        Args:
          index: of the analysis.
          specs: on a mesh of at least one axis.

        Returns:
          A future. Its Failure is UNSUPPORTED where the partitioner refuses, CRASH where it died
          and TIMEOUT where it was killed at the time limit; it raises WorkerError where no process
          can be started, and RuntimeError where the worker raised anything else than a refusal.
        """
        asked = annotations(self._analyses[index], specs)
        return self._pool.submit(
            _partition, self._settings, self._base(index), asked, self._time_limit_s
        )

    def _written(self, index: int) -> _Base:
        analysis = self._analyses[index]
        return _Base(
            f"{index} {analysis.digest}",
            stablehlo.bytecode(analysis.module, strip_locations=False),
            analysis.site_of_tag,
        )


@contextlib.contextmanager
def opened(
    analyses: Sequence[Analysis], workers: int, folder: str | None, time_limit_s: float
) -> Iterator[Partitioners]:
    """Partitioners of some programs, whose processes end with the block.

    Args:
      workers: how many partition at once.
      folder: for the workers' output, see WorkerSettings.
      time_limit_s: for one layout.
    """
    with worker_threads(lambda: workers, "autoshard-partition") as pool:
        yield Partitioners(pool, analyses, folder, time_limit_s)


def _partition(
    settings: WorkerSettings, base: _Base, asked: Annotations, time_limit_s: float
) -> Partition | Failure:
    """Runs in a thread of the pool. A new worker holds no module yet, nor does one begun anew."""
    call = functools.partial(
        worker_here(settings).call, stage=Stage.PROPAGATE, time_limit_s=time_limit_s
    )
    answer = call(_judge, base.digest, asked)
    if answer is None:
        answer = call(_judge_anew, base, asked)
    if isinstance(answer, _Raised):
        raise RuntimeError(f"rung 1 raised in a worker process:\n{answer.traceback}")
    assert answer is not None
    return answer


class _Raised(NamedTuple):
    """An exception in the worker that says nothing of the layout: a bug of this library."""

    traceback: str


_held: dict[str, tuple[stablehlo.Operation, shardings.Attributes, dict[int, int]]] = {}
"""In a worker: base modules by digest."""


def _judge(digest: str, asked: Annotations) -> Partition | Failure | _Raised | None:
    """Runs in the worker; None where it does not hold the module."""
    if digest not in _held:
        return None
    start = time.perf_counter()
    module, attributes, site_of_tag = _held[digest]
    try:
        found = judged(module, site_of_tag, asked, attributes)
    except PartitionerRefused as error:
        return declined(error, time.perf_counter() - start)
    except Exception:
        return _Raised(traceback.format_exc())
    return Partition(found, time.perf_counter() - start)


def _judge_anew(base: _Base, asked: Annotations) -> Partition | Failure | _Raised | None:
    """Runs in the worker."""
    module = stablehlo.from_bytecode(base.bytecode)
    _held[base.digest] = (module, shardings.Attributes(module.context), base.site_of_tag)
    return _judge(base.digest, asked)
