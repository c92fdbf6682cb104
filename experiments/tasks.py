"""What the experiments train: for each model its workload, its data and its evaluation."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
import optax

from autoshard import Workload
from autoshard.integrations.flax import TrainState, nnx_model, nnx_workload
from experiments.sizes import DecoderSize, MLPSize
from experiments.zoo.case import seed_of
from models import decoder, mlp, text

Batch = Any  # a pytree of numpy arrays
Split = Literal["train", "validation"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with its data.

    Attributes:
      name: "decoder" or "mlp".
      model_fn: knobs -> Workload.
      knobs: the values of each knob, the default first.
      batches: (split, seed) -> endless batches.
      evaluate: (state, batch) -> metrics, for `plan.jit`.
      unit, units_per_step: what throughput counts, and how many of them a step consumes.
    """

    name: str
    model_fn: Callable[..., Workload]
    knobs: dict[str, tuple[str | int, ...]]
    batches: Callable[[Split, int], Iterator[Batch]]
    evaluate: Callable[[TrainState, Batch], dict[str, jax.Array]]
    unit: str
    units_per_step: int


def decoder_task(size: DecoderSize) -> Task:
    """The byte-level decoder on the standard library's sources; knobs: remat and accumulate."""
    config, B, T = size.model, size.batch_size, size.model.sequence

    def batches(split: Split, seed: int) -> Iterator[np.ndarray]:
        return text.batches(seed, B, T, split)

    def model_fn(remat: decoder.Remat = "none", accumulate: int = 1) -> Workload:
        return nnx_workload(
            lambda: decoder.Decoder(dataclasses.replace(config, remat=remat)),
            decoder.loss,
            optax.adamw(size.learning_rate),
            jax.ShapeDtypeStruct((B, T + 1), np.int32),
            sample=lambda key: next(batches("train", seed_of(key))),
            accumulate=accumulate,
        )

    def evaluate(state: TrainState, tokens_BS: jax.Array) -> dict[str, jax.Array]:
        value, metrics = decoder.loss(nnx_model(state, lambda: decoder.Decoder(config)), tokens_BS)
        return {"loss": value, **metrics}

    return Task(
        name="decoder",
        model_fn=model_fn,
        knobs={"remat": ("none", "dots", "full"), "accumulate": (1, 2)},
        batches=batches,
        evaluate=evaluate,
        unit="tokens",
        units_per_step=B * T,
    )


def mlp_task(size: MLPSize) -> Task:
    """The equal-width MLP on a made-up regression; knob: accumulate."""
    config, B = size.model, size.batch_size

    def batches(split: Split, seed: int) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng((seed, split == "validation"))
        while True:
            yield mlp.sample(int(rng.integers(2**32)), B, config.width)

    def model_fn(accumulate: int = 1) -> Workload:
        return nnx_workload(
            lambda: mlp.MLP(config),
            mlp.loss,
            optax.adamw(size.learning_rate),
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mlp.sample(0, B, config.width)
            ),
            sample=lambda key: mlp.sample(seed_of(key), B, config.width),
            accumulate=accumulate,
        )

    def evaluate(state: TrainState, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        value, metrics = mlp.loss(nnx_model(state, functools.partial(mlp.MLP, config)), batch)
        return {"loss": value, **metrics}

    return Task(
        name="mlp",
        model_fn=model_fn,
        knobs={"accumulate": (1, 2)},
        batches=batches,
        evaluate=evaluate,
        unit="examples",
        units_per_step=B,
    )
