"""The models of `experiments.sizes` as cases, without autoshard."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any  # the configs of the models have no narrower type

import optax

from experiments.sizes import DecoderSize, MLPSize
from models import decoder, mlp, text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizedCase:
    """A `HandCase`.

    Attributes:
      name: of the model, as in the tables of layouts and of parameters.
      config: the model's.
      make_model: () -> nnx.Module.
      loss: (model, batch, constrain=...) -> (scalar, metrics).
      sample: seed -> batch.
    """

    name: str
    config: Any
    make_model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    sample: Callable[[int], Any]
    kind: str = "nnx"
    inputs: None = None


def decoder_case(size: DecoderSize) -> SizedCase:
    """The byte-level decoder on the standard library's sources."""
    return SizedCase(
        name="decoder",
        config=size.model,
        make_model=functools.partial(decoder.Decoder, size.model),
        loss=decoder.loss,
        optimizer=optax.adamw(size.learning_rate),
        sample=lambda seed: next(text.batches(seed, size.batch_size, size.model.sequence)),
    )


def mlp_case(size: MLPSize) -> SizedCase:
    """The equal-width MLP."""
    return SizedCase(
        name="mlp",
        config=size.model,
        make_model=functools.partial(mlp.MLP, size.model),
        loss=mlp.loss,
        optimizer=optax.adamw(size.learning_rate),
        sample=lambda seed: mlp.sample(seed, size.batch_size, size.model.width),
    )
