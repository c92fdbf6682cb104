"""The training loop: runs a plan, reports loss and throughput, evaluates, keeps checkpoints."""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from experiments import checkpoints


class RunnablePlan(Protocol):
    """The part of `autoshard.Plan` that training needs."""

    def init(self) -> Any: ...

    def put(self, batch: Any) -> Any: ...

    # Properties, so that a plain function in a field fits as well as a method.
    @property
    def step(self) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]: ...

    @property
    def jit(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is computed on held-out batches, and when.

    Attributes:
      metrics: (state, batch) -> dict of scalars with "loss"; run through `plan.jit`.
      batches: the held-out batches, used again each time.
      every: steps between two evaluations; the last step is always evaluated.
    """

    metrics: Callable[[Any, Any], dict[str, Any]]
    batches: tuple[Any, ...]
    every: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of the log.

    Attributes:
      step: steps done.
      loss: of the last batch.
      units_per_s: throughput since the line before, evaluation and compilation left out.
      validation_loss: mean over the held-out batches, where they were evaluated.
    """

    step: int
    loss: float
    units_per_s: float | None = None
    validation_loss: float | None = None


def train(
    plan: RunnablePlan,
    batches: Iterable[Any],
    steps: int,
    *,
    units_per_step: int,
    unit: str = "tokens",
    state: Any = None,
    evaluation: Evaluation | None = None,
    log: Callable[[str], None] = print,
    log_every: int = 20,
    checkpoint_folder: pathlib.Path | None = None,
) -> tuple[Any, list[Progress]]:
    """Trains for `steps` steps and returns the last state and the log.

    Args:
      batches: host batches; `steps` of them are taken.
      units_per_step: tokens (or whatever `unit` says) in a batch.
      state: where to go on; else `plan.init()`.
      log: is given one line of text every `log_every` steps.
      checkpoint_folder: where the last state is saved with orbax, if anywhere.
    """
    state = plan.init() if state is None else state
    evaluate = plan.jit(evaluation.metrics) if evaluation else None
    held_out = [plan.put(batch) for batch in evaluation.batches] if evaluation else []
    history: list[Progress] = []
    timed_steps, timed_s = 0, 0.0

    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        started = time.perf_counter()
        state, metrics = plan.step(state, plan.put(batch))
        loss = float(metrics["loss"])  # waits, so that the clock sees the step
        if step > 1:  # the first step may compile
            timed_steps, timed_s = timed_steps + 1, timed_s + time.perf_counter() - started

        last = step == steps
        validation_loss = None
        if evaluate and evaluation and (last or step % evaluation.every == 0):
            losses = [float(evaluate(state, batch)["loss"]) for batch in held_out]
            validation_loss = float(np.mean(losses))
        if last or step == 1 or step % log_every == 0 or validation_loss is not None:
            line = Progress(
                step=step,
                loss=loss,
                units_per_s=timed_steps * units_per_step / timed_s if timed_steps else None,
                validation_loss=validation_loss,
            )
            history.append(line)
            log(_text(line, unit))
            timed_steps, timed_s = 0, 0.0

    if checkpoint_folder is not None:
        log(f"checkpoint: {checkpoints.save(checkpoint_folder, steps, state)}")
    return state, history


def _text(line: Progress, unit: str) -> str:
    parts = [f"step {line.step:5d}", f"loss {line.loss:.4f}"]
    if line.units_per_s is not None:
        parts.append(f"{line.units_per_s:,.0f} {unit}/s")
    if line.validation_loss is not None:
        parts.append(f"validation loss {line.validation_loss:.4f}")
    return "  ".join(parts)
