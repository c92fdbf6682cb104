"""The yardstick: one fixed program, run in every round beside the programs of a case.

Predictions are for the machine as it was calibrated, at its best; a sample is taken on the machine
as it is in that hour, which on shared hosts may be half as fast. How many times as long as rung 2
says the yardstick takes is the pace of the machine in those rounds: predictions are compared with
step times divided by it. What rung 2 gets wrong of the yardstick itself is the same for all cases,
and goes into the factors that are fitted on all families but one (`leave_out`).
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import Workload
from autoshard.budget import Budget, Callback
from autoshard.compat.executable import MemoryUse
from autoshard.cost import CostModel
from autoshard.driver.compiling import Compiling
from autoshard.driver.ledger import Ledger, Row
from autoshard.journal import Journal
from autoshard.module import Module
from autoshard.rungs.bench_client import ChildBench
from autoshard.strategy.baselines import baselines
from autoshard.trial import Estimate, Failure
from experiments.fidelity_parts import sampling
from experiments.fidelity_parts.store import Store, Task
from experiments.fidelity_parts.timing import MeasuringError, Rounded

NAME = "yardstick"
"""Of the program among those of a round, and in the results."""

_LAYOUT = "tensor parallel"  # with all-reduces between the products, not all of them at the end
_ROWS, _WIDTH, _DEPTH = 512, 512, 4

_TURN = 5
"""Steps in a turn of the yardstick: all of a case's figures are divided by what it took."""


@dataclasses.dataclass(frozen=True, slots=True)
class YardstickCase:
    """A perceptron's train step: products, elementwise work, all-reduces; tens of ms on 2 cores."""

    name: str = NAME
    family: str = NAME

    def sample(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((_ROWS, _WIDTH)).astype(np.float32)

    def workload(self) -> Workload:
        def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.mean((y - x) ** 2)

        def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            value, slopes = jax.value_and_grad(loss)(weights, x)
            return [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)], value

        def init() -> list[jax.Array]:
            keys = jax.random.split(jax.random.key(0), _DEPTH)
            return [jax.random.normal(key, (_WIDTH, _WIDTH)) / _WIDTH**0.5 for key in keys]

        return Workload(
            step=step,
            init=init,
            batch=jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32),
            sample=lambda key: self.sample(0),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """The compiled program, with what rung 2 says of it.

    Attributes:
      ledger: of the yardstick alone, on the devices of the task.
    """

    ledger: Ledger
    module: Module
    estimate: Estimate


def prepared(
    task: Task,
    store: Store,
    journal: Journal,
    executables: pathlib.Path | None,
    callbacks: tuple[Callback, ...] = (),
    cost: CostModel | None = None,
) -> Yardstick:
    """Compiles the yardstick for the task's devices; what the journal has is not compiled again.

    Args:
      executables: where a bench finds what was compiled; None where it is not run.
      cost: what prices it; None for this machine's own.

    Raises:
      MeasuringError: it cannot be compiled.
    """
    ledger = sampling.open_ledger(
        task, YardstickCase(), store, journal, seed=0, budget=Budget(), callbacks=callbacks
    )
    ledger.executables = executables
    ledger.cost = cost or ledger.cost
    space = ledger.subjects[0].space
    candidate = next(b.candidate for b in baselines(space) if b.name == _LAYOUT)
    row: Row = sampling.judged(ledger, candidate)
    ledger.rows.append(row)
    compiling = Compiling(ledger, None)
    with compiling.opened():
        compiling.compile([0], 1.0)
    module, estimate = ledger.module_of(row), row.compiled
    for outcome in (module, estimate):
        if isinstance(outcome, Failure):
            raise MeasuringError(f"the yardstick cannot be compiled: {outcome.message}")
    assert isinstance(module, Module) and isinstance(estimate, Estimate)
    return Yardstick(ledger=ledger, module=module, estimate=estimate)


class Beside(Rounded):
    """A bench for the programs of a case, and one of its own for the yardstick.

    Their inputs differ, and what the one holds in memory the other should not feel.
    """

    def __init__(self, programs: ChildBench, yardstick: ChildBench):
        self._programs, self._yardstick = programs, yardstick

    def load(self, name: str, module: Module) -> MemoryUse | Failure:
        return self._of(name).load(name, module)

    def run(self, name: str, steps: int) -> tuple[float, ...] | Failure:
        if name != NAME:
            return self._programs.run(name, steps)
        # Its process has slept since its last turn; that of the programs has not.
        woken = self._yardstick.run(name, 1)
        return woken if isinstance(woken, Failure) else self._yardstick.run(name, _TURN)

    def unload(self, name: str) -> None:
        self._of(name).unload(name)

    def renew(self) -> None:
        self._programs.renew()
        self._yardstick.renew()

    def _of(self, name: str) -> ChildBench:
        return self._yardstick if name == NAME else self._programs


def pace(found: Mapping[str, Any], measured: Mapping[str, float]) -> float | None:
    """How many times as long as rung 2 says the yardstick took; None where it was not run.

    Args:
      found: the result of a sample.
      measured: step times of its rounds, seconds, the yardstick's among them.
    """
    seconds = measured.get(NAME)
    said = (found.get(NAME) or {}).get("rung2")
    return None if seconds is None or not said else seconds / float(said["time_s"])
