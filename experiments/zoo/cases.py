"""The table of cases: each model with the optimizer it is trained with, at three scales.

small: the models' own defaults, for tests, but for three that would not run here or not quickly.
published: what `experiments.zoo.published` says. shrunk: that, by the rule of
`experiments.zoo.shrink`; the factors and batches are what `python -m experiments.zoo` prints.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
import optax

from experiments.zoo.case import Case, Kind
from experiments.zoo.published import PUBLISHED
from experiments.zoo.shrink import shrunk
from models import (
    clip,
    decoder,
    encoder_decoder,
    graph_network,
    linen_recurrent,
    linen_resnet,
    linen_vit,
    mlp,
    moe,
    plain_gpt,
    recommender,
    recurrent,
    resnet,
    state_space,
    text,
    unet,
    vit,
)

Scale = Literal["small", "shrunk", "published"]
SCALES: tuple[Scale, ...] = ("small", "shrunk", "published")
SMALL_BATCH = 16

SHRUNK: dict[str, tuple[int, int]] = {
    "mlp": (4, 512),
    "decoder": (32, 8),
    "encoder_decoder": (4, 8),
    "vit": (4, 64),
    "resnet50": (4, 128),
    "resnet152": (4, 64),
    "moe": (32, 8),
    "unet": (4, 64),
    "state_space": (8, 32),
    "recurrent": (4, 16),
    "recommender": (4, 128),
    "graph_network": (4, 128),
    "clip": (4, 128),
    "linen_vit": (4, 64),
    "linen_resnet": (4, 128),
    "linen_recurrent": (4, 16),
    "plain_gpt": (16, 8),
}
"""Name -> factor and batch size, by the rule; committed, so that no figure depends on a version."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What all scales of a case share.

    Attributes:
      small: the configuration for tests.
      make: configuration -> model; for "plain" its parameters.
      optimizer: configuration -> optimizer. Weights that decay do so in all parameters; the authors
        of CLIP and of Mamba exempt gains, biases and the like.
      sample: (seed, examples, configuration) -> batch.
    """

    family: str
    module: ModuleType
    make: Callable[[Any], Any]
    small: Any
    optimizer: Callable[[Any], optax.GradientTransformation]
    sample: Callable[[int, int, Any], Any]
    kind: Kind = "nnx"
    inputs: Callable[[Any], tuple[Any, ...]] | None = None


def _tokens(seed: int, batch_size: int, config: Any) -> np.ndarray:
    """Windows of the standard library's sources, and the byte behind each."""
    return next(text.batches(seed, batch_size, config.sequence))


def _vectors(seed: int, batch_size: int, config: mlp.MLPConfig) -> dict[str, np.ndarray]:
    return mlp.sample(seed, batch_size, config.width)


def _graphs(seed: int, batch_size: int, config: graph_network.GraphNetworkConfig) -> Any:
    """As many nodes as of graphs with a quarter of the largest one's; the graphs' number varies."""
    return graph_network.sample(seed, batch_size * config.largest // 4, config)


def _images(batch: Any) -> tuple[Any, ...]:
    return (batch["image_BHWC"],)


def _momentum(config: Any) -> optax.GradientTransformation:
    del config
    return optax.sgd(0.1, momentum=0.9)


def _adamw(config: Any) -> optax.GradientTransformation:
    del config
    return optax.adamw(3e-4)


def _warmup_cosine(peak: float) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps=100, decay_steps=10_000)


def _clipped_adam(config: Any) -> optax.GradientTransformation:
    del config
    return optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3))


_SMALL: dict[str, Any] = {"d_model": 64, "head_dim": 8, "mlp_dim": 128, "layers": 2}

_VIT = Recipe(
    family="vit",
    module=vit,
    make=vit.ViT,
    small=vit.ViTConfig(),
    optimizer=lambda _: optax.lion(1e-4, weight_decay=0.1),
    sample=vit.sample,
)
_RESNET = Recipe(
    family="resnet",
    module=resnet,
    make=resnet.ResNet,
    small=resnet.ResNetConfig(),
    optimizer=_momentum,
    sample=resnet.sample,
)
_RECURRENT = Recipe(
    family="recurrent",
    module=recurrent,
    make=recurrent.Recurrent,
    small=recurrent.RecurrentConfig(),
    optimizer=_clipped_adam,
    sample=recurrent.sample,
)

RECIPES: dict[str, Recipe] = {
    "mlp": Recipe(
        family="mlp",
        module=mlp,
        make=mlp.MLP,
        small=mlp.MLPConfig(),
        optimizer=_adamw,
        sample=_vectors,
    ),
    "decoder": Recipe(
        family="decoder",
        module=decoder,
        make=decoder.Decoder,
        small=decoder.DecoderConfig(**_SMALL),
        optimizer=_adamw,
        sample=_tokens,
    ),
    "encoder_decoder": Recipe(
        family="encoder_decoder",
        module=encoder_decoder,
        make=encoder_decoder.EncoderDecoder,
        small=encoder_decoder.EncoderDecoderConfig(),
        # Its default factors nothing smaller than 128 x 128, which here would be nothing at all.
        optimizer=lambda _: optax.adafactor(1e-2, min_dim_size_to_factor=8),
        sample=encoder_decoder.sample,
    ),
    "vit": _VIT,
    "resnet50": _RESNET,
    "resnet152": dataclasses.replace(
        _RESNET, small=dataclasses.replace(_RESNET.small, blocks=(1, 2, 3))
    ),
    "moe": Recipe(
        family="decoder",
        module=moe,
        make=moe.Mixture,
        small=moe.MixtureConfig(**_SMALL, group=64),
        optimizer=_adamw,
        sample=_tokens,
    ),
    "unet": Recipe(
        family="unet",
        module=unet,
        make=unet.UNet,
        small=unet.UNetConfig(),
        optimizer=lambda _: optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(_warmup_cosine(2e-4))
        ),
        sample=unet.sample,
    ),
    "state_space": Recipe(
        family="state_space",
        module=state_space,
        make=state_space.StateSpace,
        small=state_space.StateSpaceConfig(),
        optimizer=lambda _: optax.adamw(_warmup_cosine(6e-4), b2=0.95, weight_decay=0.1),
        sample=state_space.sample,
    ),
    "recurrent": _RECURRENT,
    "recommender": Recipe(
        family="recommender",
        module=recommender,
        make=recommender.Recommender,
        small=recommender.RecommenderConfig(),
        optimizer=lambda _: optax.adagrad(0.01),
        sample=recommender.sample,
    ),
    "graph_network": Recipe(
        family="graph_network",
        module=graph_network,
        make=graph_network.GraphNetwork,
        small=graph_network.GraphNetworkConfig(),
        optimizer=lambda _: optax.adam(1e-3),
        sample=_graphs,
    ),
    "clip": Recipe(
        family="vit",
        module=clip,
        make=clip.CLIP,
        small=clip.CLIPConfig(),
        optimizer=lambda _: optax.adamw(5e-4, weight_decay=0.2),
        sample=clip.sample,
    ),
    "linen_vit": dataclasses.replace(
        _VIT, kind="linen", module=linen_vit, make=linen_vit.ViT, inputs=_images
    ),
    "linen_resnet": dataclasses.replace(
        _RESNET, kind="linen", module=linen_resnet, make=linen_resnet.ResNet, inputs=_images
    ),
    "linen_recurrent": dataclasses.replace(
        _RECURRENT,
        kind="linen",
        module=linen_recurrent,
        make=linen_recurrent.Recurrent,
        inputs=lambda tokens_BS: (tokens_BS[:, :-1],),
    ),
    "plain_gpt": Recipe(
        family="decoder",
        kind="plain",
        module=plain_gpt,
        make=plain_gpt.init,
        small=plain_gpt.PlainGPTConfig(),
        optimizer=lambda config: optax.sgd(config.learning_rate),
        sample=_tokens,
    ),
}

CASES: tuple[str, ...] = tuple(RECIPES)


def case(name: str, scale: str) -> Case:
    """A case at a scale; allocates nothing."""
    if name not in RECIPES:
        raise ValueError(f"unknown case {name!r}: expected one of {list(CASES)}")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: expected one of {list(SCALES)}")
    published = PUBLISHED[name]
    if scale == "small":
        return of_size(name, RECIPES[name].small, SMALL_BATCH)
    if scale == "shrunk":
        factor, batch_size = SHRUNK[name]
        return of_size(name, shrunk(published, factor), batch_size)
    return of_size(name, published.config, published.batch_size)


def of_size(name: str, config: Any, batch_size: int) -> Case:
    """A case with a configuration and a batch of one's own."""
    recipe = RECIPES[name]
    plain = recipe.kind == "plain"
    return Case(
        name=name,
        family=recipe.family,
        kind=recipe.kind,
        config=config,
        batch_size=batch_size,
        make_model=functools.partial(recipe.make, config),
        loss=functools.partial(recipe.module.loss, config) if plain else recipe.module.loss,
        optimizer=recipe.optimizer(config),
        make_batch=lambda seed, examples: recipe.sample(seed, examples, config),
        inputs=recipe.inputs,
        step=functools.partial(recipe.module.step, config) if plain else None,
    )
