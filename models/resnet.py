"""Residual network with bottleneck blocks and batch norm (He et al. 2016).

The stride of a stage is on the 3 x 3 convolution of its first block, not on the 1 x 1 before it
("v1.5", as is usual since Goyal et al. 2017); the last norm of each block starts at zero, so that
a block starts as the identity (ibid., section 5.1).

Batch norm's mean and variance are those of the global batch, and their running averages are
variables that a training step changes and an evaluation reads.

Dimensions in array names: B batch, H height, W width, C channels, Y classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import classification, digits
from models.constrain import Constrain, unconstrained

EXPANSION = 4  # a block's output channels, relative to the width of its 3 x 3 convolution


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a `ResNet`; two equal configs build two equal models."""

    image: int = 32  # pixels along each side
    channels: int = 1  # of the image
    width: int = 8  # of the 3 x 3 convolutions of the first stage; doubles with each stage
    blocks: tuple[int, ...] = (1, 1, 1)  # in each stage
    classes: int = digits.CLASSES  # that an image may belong to
    momentum: float = 0.9  # share of the old value in a running average
    norm_epsilon: float = 1e-5  # added to batch norm's variance
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks={self.blocks}: expected stages of at least one block")
        shrink = 2 * 2 ** len(self.blocks)
        if self.image % shrink:
            raise ValueError(
                f"image={self.image} must be a multiple of {shrink}, by which "
                f"{len(self.blocks)} stages make it smaller"
            )


# "Deep Residual Learning for Image Recognition" (He et al. 2016), table 1; images and classes of
# ImageNet. The momentum of the running averages is of Goyal et al. 2017.
RESNET_50 = ResNetConfig(image=224, channels=3, width=64, blocks=(3, 4, 6, 3), classes=1000)
RESNET_152 = dataclasses.replace(RESNET_50, blocks=(3, 8, 36, 3))


class Norm(nnx.BatchNorm):
    """Batch norm (Ioffe & Szegedy 2015) with the config's figures."""

    def __init__(self, config: ResNetConfig, channels: int, *, gain: float = 1.0, rngs: nnx.Rngs):
        super().__init__(
            channels,
            momentum=config.momentum,
            epsilon=config.norm_epsilon,
            scale_init=nnx.initializers.constant(gain),
            rngs=rngs,
        )


class Convolution(nnx.Conv):
    """A convolution without bias whose output is the input's size over its stride."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, rngs: nnx.Rngs):
        super().__init__(
            inputs,
            outputs,
            (size, size),
            strides=(stride, stride),
            padding=[(size // 2, size // 2)] * 2,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            rngs=rngs,
        )


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions, added to their input, or to its projection."""

    def __init__(
        self, config: ResNetConfig, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs
    ):
        outputs = EXPANSION * width
        self.reduce = Convolution(inputs, width, 1, rngs=rngs)
        self.reduce_norm = Norm(config, width, rngs=rngs)
        self.spatial = Convolution(width, width, 3, stride, rngs=rngs)
        self.spatial_norm = Norm(config, width, rngs=rngs)
        self.expand = Convolution(width, outputs, 1, rngs=rngs)
        self.expand_norm = Norm(config, outputs, gain=0.0, rngs=rngs)
        self.projected = inputs != outputs or stride != 1
        if self.projected:
            self.project = Convolution(inputs, outputs, 1, stride, rngs=rngs)
            self.project_norm = Norm(config, outputs, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, constrain: Constrain, *, train: bool) -> jax.Array:
        old = not train  # batch norm reads its running averages
        hidden_BHWC = jax.nn.relu(self.reduce_norm(self.reduce(x_BHWC), use_running_average=old))
        hidden_BHWC = constrain(hidden_BHWC, ("batch", None, None, "hidden"))
        hidden_BHWC = self.spatial_norm(self.spatial(hidden_BHWC), use_running_average=old)
        hidden_BHWC = constrain(jax.nn.relu(hidden_BHWC), ("batch", None, None, "hidden"))
        change_BHWC = self.expand_norm(self.expand(hidden_BHWC), use_running_average=old)
        if self.projected:
            x_BHWC = self.project_norm(self.project(x_BHWC), use_running_average=old)
        return constrain(jax.nn.relu(x_BHWC + change_BHWC), ("batch", None, None, "channels"))


class ResNet(nnx.Module):
    """Images in, logits of their classes out; no block shares code with a loop."""

    def __init__(self, config: ResNetConfig):
        rngs = nnx.Rngs(config.seed)
        self.stem = Convolution(config.channels, config.width, 7, 2, rngs=rngs)
        self.stem_norm = Norm(config, config.width, rngs=rngs)
        blocks, channels = [], config.width
        for stage, count in enumerate(config.blocks):
            width = config.width * 2**stage
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(Bottleneck(config, channels, width, stride, rngs=rngs))
                channels = EXPANSION * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, config.classes, rngs=rngs)

    def __call__(
        self, image_BHWC: jax.Array, constrain: Constrain = unconstrained, *, train: bool = False
    ) -> jax.Array:
        """Returns logits_BY; in training, the running averages of batch norm move."""
        x_BHWC = self.stem_norm(self.stem(image_BHWC), use_running_average=not train)
        x_BHWC = constrain(jax.nn.relu(x_BHWC), ("batch", None, None, "channels"))
        x_BHWC = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x_BHWC = block(x_BHWC, constrain, train=train)
        x_BC = constrain(jnp.mean(x_BHWC, axis=(1, 2)), ("batch", "channels"))
        return constrain(self.head(x_BC), ("batch", "classes"))


def loss(
    model: ResNet, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of `batch["label_B"]` given `batch["image_BHWC"]`, in nats.

    Moves the model's running averages.
    """
    logits_BY = model(batch["image_BHWC"], constrain, train=True)
    return classification.cross_entropy(logits_BY, batch["label_B"])


def sample(seed: int, batch_size: int, config: ResNetConfig) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split. Same seed, same batch."""
    return classification.sample(seed, batch_size, config.image, config.channels)
