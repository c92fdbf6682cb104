"""Asks the target's own compiler about many modules. Runs nothing."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Iterator

from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.job import compile_in_process, request_for
from autoshard.target.cost import CostModel
from autoshard.target.target import Target

_WORKERS = 2


def estimates(
    modules: Iterable[Module],
    target: Target,
    cost: CostModel,
    time_limit_s: float,
    log: Callable[[str], None] = lambda _: None,
) -> Iterator[Estimate | Failure]:
    """What rung 2 says of each module, in order; two workers compile.

    Args:
      time_limit_s: of one compilation.
      log: is given a line of text after each module.
    """
    request = functools.partial(request_for, target=target, folder=None, time_limit_s=time_limit_s)
    asked = list(modules)
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        answers = pool.map(compile_in_process, map(request, asked))
        for number, (module, answer) in enumerate(zip(asked, answers, strict=True), start=1):
            log(f"{number} of {len(asked)}")
            yield answer if isinstance(answer, Failure) else estimate_of(module, answer, cost)
