"""The models that have layouts by hand, without autoshard: those of `sizes` and of `pod_sizes`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any  # the configs of the models have no narrower type

import jax
import jax.numpy as jnp
import optax

from experiments.pod_sizes import PodSize
from experiments.sizes import DecoderSize, MLPSize
from models import decoder, mlp, text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandCase:
    """A model and how it is trained.

    Attributes:
      family: key of `parameters.PARAMETERS`.
      config: the model's.
      make_model: () -> nnx.Module.
      loss: (model, batch, constrain=...) -> (scalar, metrics).
      batch: the global batch as `jax.ShapeDtypeStruct`s.
      sample: seed -> batch.
      accumulate: parts of the batch, one after the other.
    """

    family: str
    config: Any
    make_model: Callable[[], Any]
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    batch: Any
    sample: Callable[[int], Any]
    accumulate: int = 1


def decoder_case(size: DecoderSize) -> HandCase:
    """The byte-level decoder on the standard library's sources."""
    B, T = size.batch_size, size.model.sequence
    return HandCase(
        family="decoder",
        config=size.model,
        make_model=functools.partial(decoder.Decoder, size.model),
        loss=decoder.loss,
        optimizer=optax.adamw(size.learning_rate),
        batch=jax.ShapeDtypeStruct((B, T + 1), jnp.int32),
        sample=lambda seed: next(text.batches(seed, B, T)),
    )


def mlp_case(size: MLPSize) -> HandCase:
    """The equal-width MLP."""
    config, B = size.model, size.batch_size
    return HandCase(
        family="mlp",
        config=config,
        make_model=functools.partial(mlp.MLP, config),
        loss=mlp.loss,
        optimizer=optax.adamw(size.learning_rate),
        batch=jax.eval_shape(lambda: mlp.sample(0, B, config.width)),
        sample=lambda seed: mlp.sample(seed, B, config.width),
    )


def pod_case(size: PodSize) -> HandCase:
    """A model for a pod, on random tokens."""
    B, T, V = size.batch_size, size.model.sequence, size.model.vocab_size
    make_model, loss = size.build()
    return HandCase(
        family="decoder",
        config=size.model,
        make_model=make_model,
        loss=loss,
        optimizer=optax.adamw(size.learning_rate),
        batch=jax.ShapeDtypeStruct((B, T + 1), jnp.int32),
        sample=lambda seed: jax.random.randint(jax.random.key(seed), (B, T + 1), 0, V),
        accumulate=size.accumulate,
    )
