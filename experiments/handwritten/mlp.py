"""The equal-width MLP under every hand-written layout."""

import functools
import re

import jax
import optax

from experiments.handwritten import trainer
from experiments.handwritten.layouts import HandLayout, Names, Rules
from experiments.sizes import MLPSize
from models import mlp


def build(size: MLPSize, layout: HandLayout, devices: list[jax.Device]) -> trainer.Built:
    """The train step under `layout`, its state and a batch, on `devices`."""
    rules = Rules.on(layout, devices)
    return trainer.build(
        rules,
        lambda: mlp.MLP(size.model),
        functools.partial(mlp.loss, constrain=rules.constrain),
        _names_of,
        optax.adamw(size.learning_rate),
        mlp.sample(0, size.batch_size, size.model.width),
    )


def _names_of(path: str, rank: int) -> Names:
    """Column-parallel in even layers, row-parallel in odd ones (Megatron)."""
    layer = int(re.findall(r"\[(\d+)\]", path)[0])
    kernel = ("embed", "hidden") if layer % 2 == 0 else ("hidden", "embed")
    return kernel if rank == 2 else kernel[1:]
