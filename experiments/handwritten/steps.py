"""A case of the zoo under its hand-written layouts."""

import functools
from typing import Any, Protocol

import jax

from experiments.handwritten import trainer
from experiments.handwritten.apart import apart
from experiments.handwritten.layouts import HandLayout, Rules
from experiments.handwritten.parameters import names_of
from experiments.handwritten.rules import HAND_LAYOUTS
from experiments.handwritten.train_steps import Trained, train_step


class HandCase(Trained, Protocol):
    """What a hand-written step needs of a case; as in `experiments.zoo`."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...


def hand_steps(case: HandCase, device_count: int) -> dict[str, HandLayout]:
    """Every layout that people write for this model on so many devices, by name.

    Raises:
      ValueError: there are none for a model of this name.
    """
    if case.name not in HAND_LAYOUTS:
        raise ValueError(f"no hand layouts for {case.name!r}: expected one of {list(HAND_LAYOUTS)}")
    layouts = [
        layout for make in HAND_LAYOUTS[case.name] for layout in make(device_count, case.config)
    ]
    return {layout.name: layout for layout in layouts}


def prepare(case: HandCase, layout: HandLayout, devices: list[jax.Device]) -> trainer.Prepared:
    """The train step under `layout` on `devices`; nothing compiled, nothing allocated.

    Raises:
      ValueError: the devices that share the batch do not divide it.
    """
    rules = Rules.on(layout, devices)
    if layout.gradients_apart:
        made = train_step(case, spread=functools.partial(apart, rules=rules))
    else:
        made = train_step(case, rules.constrain)
    return trainer.prepare(
        rules,
        *made,
        functools.partial(names_of, case.name),
        case.optimizer,
        case.sample(0),
    )


def build(
    case: HandCase, layout: HandLayout, devices: list[jax.Device], seed: int = 0
) -> trainer.Built:
    """The same, with its state and with the batch of `seed`; the first step compiles it."""
    prepared = prepare(case, layout, devices)
    return trainer.Built(
        step=prepared.step,
        state=prepared.init(),
        batch=jax.device_put(case.sample(seed), prepared.batch),
    )
