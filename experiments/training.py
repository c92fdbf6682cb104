"""The training loop: runs a plan, reports loss and throughput, evaluates, keeps what it made."""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
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
      step: steps done, those of earlier calls included.
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
    done: int = 0,
    evaluation: Evaluation | None = None,
    log: Callable[[str], None] = print,
    log_every: int = 20,
    figures: pathlib.Path | None = None,
    checkpoint_folder: pathlib.Path | None = None,
) -> tuple[Any, list[Progress]]:
    """Trains for `steps` steps and returns the last state and the log.

    What an earlier run left is kept: where a path is taken, the first vacant one of `<path>-2`,
    `<path>-3` is chosen, before the first step.

    Args:
      batches: host batches; `steps` of them are taken, or as many as there are, which is told.
      units_per_step: tokens (or whatever `unit` says) in a batch.
      state: where to go on; else `plan.init()`.
      done: steps that `state` has behind it.
      log: is given one line of text every `log_every` steps.
      figures: file that takes the log, one line of JSON each, before the checkpoint is saved.
      checkpoint_folder: where the last state is saved with orbax, named by the steps behind it;
        also if the figures cannot be written, and whatever ends the loop before its time.
    """
    figures = figures and vacant(figures)
    checkpoint = checkpoint_folder and vacant(checkpoint_folder / f"{done + steps:06d}")
    state = plan.init() if state is None else state
    evaluate = plan.jit(evaluation.metrics) if evaluation else None
    held_out = [plan.put(batch) for batch in evaluation.batches] if evaluation else []
    history: list[Progress] = []
    timed_steps, timed_s = 0, 0.0

    def report(step: int, loss: float, last: bool) -> None:
        nonlocal timed_steps, timed_s
        validation_loss = None
        if evaluate and evaluation and (last or step % evaluation.every == 0):
            losses = [float(evaluate(state, batch)["loss"]) for batch in held_out]
            validation_loss = float(np.mean(losses))
        if last or step == done + 1 or step % log_every == 0 or validation_loss is not None:
            line = Progress(
                step=step,
                loss=loss,
                units_per_s=timed_steps * units_per_step / timed_s if timed_steps else None,
                validation_loss=validation_loss,
            )
            history.append(line)
            log(_text(line, unit))
            timed_steps, timed_s = 0, 0.0

    def keep() -> None:
        try:
            if figures is not None:
                figures.parent.mkdir(parents=True, exist_ok=True)
                lines = [json.dumps(dataclasses.asdict(line)) for line in history]
                figures.write_text("\n".join(lines) + "\n", encoding="utf-8")
                log(f"figures: {figures}")
        finally:
            if checkpoint is not None:
                checkpoints.save(checkpoint, state)
                log(f"checkpoint: {checkpoint}")

    step, loss = done, float("nan")
    try:
        for number, batch in enumerate(itertools.islice(batches, steps), start=done + 1):
            started = time.perf_counter()
            state, metrics = plan.step(state, plan.put(batch))
            step = number
            loss = float(metrics["loss"])  # waits, so that the clock sees the step
            if step > done + 1:  # the first step may compile
                timed_steps, timed_s = timed_steps + 1, timed_s + time.perf_counter() - started
            report(step, loss, last=step == done + steps)
    except BaseException:
        leaves = jax.tree.leaves(state)
        donated = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
        if step > done:
            folder = None if donated else checkpoint_folder
            checkpoint = folder and vacant(folder / f"{step:06d}")
            keep()
        raise

    if step < done + steps:
        log(f"the batches ended after {step - done} of {steps} steps")
        checkpoint = checkpoint_folder and vacant(checkpoint_folder / f"{step:06d}")
        missed = evaluation is not None and history and history[-1].validation_loss is None
        if history and (missed or history[-1].step < step):
            report(step, loss, last=True)
    keep()
    return state, history


def vacant(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of `<path>-2`, `<path>-3` and so on that nothing has."""
    others = (path.with_stem(f"{path.stem}-{i}") for i in itertools.count(2))
    return next(p for p in itertools.chain((path,), others) if not p.exists())


def _text(line: Progress, unit: str) -> str:
    parts = [f"step {line.step:5d}", f"loss {line.loss:.4f}"]
    if line.units_per_s is not None:
        parts.append(f"{line.units_per_s:,.0f} {unit}/s")
    if line.validation_loss is not None:
        parts.append(f"validation loss {line.validation_loss:.4f}")
    return "  ".join(parts)
