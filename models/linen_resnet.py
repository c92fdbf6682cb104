"""The residual network of `models.resnet` in Flax Linen.

The same function of the same parameters: the running averages of batch norm are the collection
"batch_stats", which `apply` hands back changed where it is mutable. Linen modules are called
through `apply`: `loss` is given one with the variables filled in, and the hook `constrain` is a
field of the module.

Dimensions in array names: as in `models.resnet`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from models import classification, resnet
from models.constrain import Constrain, unconstrained
from models.resnet import EXPANSION, ResNetConfig


def norm(config: ResNetConfig, name: str, *, train: bool, gain: float = 1.0) -> nn.BatchNorm:
    """Batch norm (Ioffe & Szegedy 2015) with the config's figures."""
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=config.momentum,
        epsilon=config.norm_epsilon,
        scale_init=nn.initializers.constant(gain),
        name=name,
    )


def convolution(outputs: int, size: int, name: str, stride: int = 1) -> nn.Conv:
    """A convolution without bias whose output is the input's size over its stride."""
    return nn.Conv(
        outputs,
        (size, size),
        strides=(stride, stride),
        padding=[(size // 2, size // 2)] * 2,
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions, added to their input, or to its projection."""

    config: ResNetConfig
    width: int
    stride: int
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, *, train: bool) -> jax.Array:
        hidden, outputs = ("batch", None, None, "hidden"), EXPANSION * self.width
        normed = functools.partial(norm, self.config, train=train)
        hidden_BHWC = normed("reduce_norm")(convolution(self.width, 1, "reduce")(x_BHWC))
        hidden_BHWC = self.constrain(jax.nn.relu(hidden_BHWC), hidden)
        hidden_BHWC = convolution(self.width, 3, "spatial", self.stride)(hidden_BHWC)
        hidden_BHWC = jax.nn.relu(normed("spatial_norm")(hidden_BHWC))
        hidden_BHWC = self.constrain(hidden_BHWC, hidden)
        change_BHWC = convolution(outputs, 1, "expand")(hidden_BHWC)
        change_BHWC = normed("expand_norm", gain=0.0)(change_BHWC)
        if x_BHWC.shape[-1] != outputs or self.stride != 1:
            x_BHWC = convolution(outputs, 1, "project", self.stride)(x_BHWC)
            x_BHWC = normed("project_norm")(x_BHWC)
        return self.constrain(jax.nn.relu(x_BHWC + change_BHWC), ("batch", None, None, "channels"))


class ResNet(nn.Module):
    """Images in, logits of their classes out (He et al. 2016)."""

    config: ResNetConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, image_BHWC: jax.Array, *, train: bool = False) -> jax.Array:
        """Returns logits_BY; in training, the running averages of batch norm move."""
        config = self.config
        x_BHWC = convolution(config.width, 7, "stem", 2)(image_BHWC)
        x_BHWC = jax.nn.relu(norm(config, "stem_norm", train=train)(x_BHWC))
        x_BHWC = self.constrain(x_BHWC, ("batch", None, None, "channels"))
        x_BHWC = nn.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        blocks = [
            (config.width * 2**stage, 2 if stage and not i else 1)
            for stage, count in enumerate(config.blocks)
            for i in range(count)
        ]
        for n, (width, stride) in enumerate(blocks):
            block = Bottleneck(config, width, stride, self.constrain, name=f"blocks_{n}")
            x_BHWC = block(x_BHWC, train=train)
        x_BC = self.constrain(jnp.mean(x_BHWC, axis=(1, 2)), ("batch", "channels"))
        return self.constrain(nn.Dense(config.classes, name="head")(x_BC), ("batch", "classes"))


def loss(
    apply: Callable[..., jax.Array], batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of `batch["label_B"]` given `batch["image_BHWC"]`, in nats.

    Args:
      apply: the module's `apply` with its variables filled in and "batch_stats" mutable.
    """
    logits_BY = apply(batch["image_BHWC"], train=True)
    return classification.cross_entropy(logits_BY, batch["label_B"])


def sample(seed: int, batch_size: int, config: ResNetConfig) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split. Same seed, same batch."""
    return resnet.sample(seed, batch_size, config)
