"""U-Net that predicts the noise in an image: a denoising diffusion model (Ho et al. 2020).

A training step draws for each image a time and a noise, mixes them, and the net names the noise.
Both come from the model's own stream of random keys, whose count is a variable that each step
advances: two steps on one batch are two different losses.

Dimensions in array names: B batch, H height, W width, C channels, N = H * W pixels,
M those that they look at (all), E time_dim.

Not modelled: dropout (the paper's is 0.1 on CIFAR-10), the averaged weights, sampling of images.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import digits
from models.constrain import Constrain, unconstrained


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """Sizes of a `UNet` and of its noise; two equal configs build two equal models."""

    image: int = 16  # pixels along each side
    channels: int = 1  # of the image
    width: int = 16  # channels at full resolution; the time's sinusoids are as many
    multipliers: tuple[int, ...] = (1, 2)  # of the width at each level, each half the size
    blocks: int = 1  # in each level on the way down; one more on the way up
    attention: int = 8  # pixels along each side where blocks attend; the middle attends always
    groups: int = 4  # of group norm
    norm_epsilon: float = 1e-6  # added to group norm's variance
    times: int = 1000  # steps from an image to noise
    first_variance: float = 1e-4  # of the noise that the first step adds
    last_variance: float = 0.02  # of the last; linear between them
    seed: int = 0  # of the initial parameters and of the noise

    def __post_init__(self) -> None:
        if self.width < 4 or self.width % 2 or self.width % self.groups:
            raise ValueError(
                f"width={self.width} must be even, at least 4 and a multiple of "
                f"groups={self.groups}"
            )
        shrink = 2 ** (len(self.multipliers) - 1)
        if self.image % shrink:
            raise ValueError(
                f"image={self.image} must be a multiple of {shrink}, by which "
                f"{len(self.multipliers)} levels make it smaller"
            )

    @property
    def time_dim(self) -> int:
        """E, the width of a time's embedding."""
        return 4 * self.width


# "Denoising Diffusion Probabilistic Models" (Ho et al. 2020), appendix B: the model of CIFAR-10.
DDPM_CIFAR10 = UNetConfig(
    image=32,
    channels=3,
    width=128,
    multipliers=(1, 2, 2, 2),
    blocks=2,
    attention=16,
    groups=32,
)


class Norm(nnx.GroupNorm):
    """Group norm (Wu & He 2018) with the config's figures."""

    def __init__(self, config: UNetConfig, channels: int, *, rngs: nnx.Rngs):
        super().__init__(channels, num_groups=config.groups, epsilon=config.norm_epsilon, rngs=rngs)


class Convolution(nnx.Conv):
    """A 3 x 3 convolution."""

    def __init__(
        self, inputs: int, outputs: int, stride: int = 1, *, zero: bool = False, rngs: nnx.Rngs
    ):
        init = nnx.initializers.zeros if zero else nnx.initializers.lecun_normal()
        strides = (stride, stride)
        super().__init__(inputs, outputs, (3, 3), strides=strides, kernel_init=init, rngs=rngs)


class Residual(nnx.Module):
    """Two convolutions, the time's embedding added between them."""

    def __init__(self, config: UNetConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.norm = Norm(config, inputs, rngs=rngs)
        self.first = Convolution(inputs, outputs, rngs=rngs)
        self.time = nnx.Linear(config.time_dim, outputs, rngs=rngs)
        self.hidden_norm = Norm(config, outputs, rngs=rngs)
        self.second = Convolution(outputs, outputs, zero=True, rngs=rngs)
        self.projected = inputs != outputs
        if self.projected:
            self.project = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, time_BE: jax.Array, constrain: Constrain) -> jax.Array:
        hidden_BHWC = self.first(jax.nn.silu(self.norm(x_BHWC)))
        hidden_BHWC = hidden_BHWC + self.time(jax.nn.silu(time_BE))[:, None, None]
        hidden_BHWC = constrain(hidden_BHWC, ("batch", None, None, "hidden"))
        change_BHWC = self.second(jax.nn.silu(self.hidden_norm(hidden_BHWC)))
        x_BHWC = self.project(x_BHWC) if self.projected else x_BHWC
        return constrain(x_BHWC + change_BHWC, ("batch", None, None, "channels"))


class Attention(nnx.Module):
    """Attention between all pixels, one head, added to its input."""

    def __init__(self, config: UNetConfig, channels: int, *, rngs: nnx.Rngs):
        C = channels
        self.norm = Norm(config, C, rngs=rngs)
        self.query = nnx.Linear(C, C, rngs=rngs)
        self.key = nnx.Linear(C, C, rngs=rngs)
        self.value = nnx.Linear(C, C, rngs=rngs)
        self.out = nnx.Linear(C, C, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, constrain: Constrain) -> jax.Array:
        B, H, W, C = x_BHWC.shape
        x_BNC = self.norm(x_BHWC).reshape(B, H * W, C)
        # Two letters for the pixels: those that look and those that are looked at.
        q_BNC = constrain(self.query(x_BNC), ("batch", "queries", "hidden"))
        k_BMC = constrain(self.key(x_BNC), ("batch", None, "hidden"))
        v_BMC = constrain(self.value(x_BNC), ("batch", None, "hidden"))
        scores_BNM = jnp.einsum("BNC,BMC->BNM", q_BNC, k_BMC) / math.sqrt(C)
        mixed_BNC = jnp.einsum("BNM,BMC->BNC", jax.nn.softmax(scores_BNM, axis=-1), v_BMC)
        change_BHWC = self.out(mixed_BNC).reshape(B, H, W, C)
        return constrain(x_BHWC + change_BHWC, ("batch", None, None, "channels"))


class Layer(nnx.Module):
    """A residual block, followed by attention at the resolution that has it."""

    def __init__(
        self, config: UNetConfig, inputs: int, outputs: int, *, attends: bool, rngs: nnx.Rngs
    ):
        self.attends = attends
        self.residual = Residual(config, inputs, outputs, rngs=rngs)
        if attends:
            self.attention = Attention(config, outputs, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, time_BE: jax.Array, constrain: Constrain) -> jax.Array:
        x_BHWC = self.residual(x_BHWC, time_BE, constrain)
        return self.attention(x_BHWC, constrain) if self.attends else x_BHWC


class UNet(nnx.Module):
    """Noisy images and their times in, the noise out."""

    def __init__(self, config: UNetConfig):
        rngs = nnx.Rngs(config.seed)
        self.config = config
        self.noise = nnx.Rngs(noise=config.seed + 1)
        self.time_in = nnx.Linear(config.width, config.time_dim, rngs=rngs)
        self.time_out = nnx.Linear(config.time_dim, config.time_dim, rngs=rngs)
        self.stem = Convolution(config.channels, config.width, rngs=rngs)

        def layer(inputs: int, outputs: int, size: int) -> Layer:
            return Layer(config, inputs, outputs, attends=size == config.attention, rngs=rngs)

        widths = [config.width * multiplier for multiplier in config.multipliers]
        sizes = [config.image // 2**level for level in range(len(widths))]
        kept = [config.width]  # channels of what the way up will read
        self.down: nnx.List[nnx.List[Layer]] = nnx.List()
        self.shrink: nnx.List[Convolution] = nnx.List()
        for level, (width, size) in enumerate(zip(widths, sizes, strict=True)):
            layers = []
            for _ in range(config.blocks):
                layers.append(layer(kept[-1], width, size))
                kept.append(width)
            self.down.append(nnx.List(layers))
            if level < len(widths) - 1:
                self.shrink.append(Convolution(width, width, 2, rngs=rngs))
                kept.append(width)

        self.middle_in = Layer(config, widths[-1], widths[-1], attends=True, rngs=rngs)
        self.middle_out = Layer(config, widths[-1], widths[-1], attends=False, rngs=rngs)

        self.up: nnx.List[nnx.List[Layer]] = nnx.List()
        self.grow: nnx.List[Convolution] = nnx.List()
        channels = widths[-1]
        for level, (width, size) in reversed(list(enumerate(zip(widths, sizes, strict=True)))):
            layers = []
            for _ in range(config.blocks + 1):
                layers.append(layer(channels + kept.pop(), width, size))
                channels = width
            self.up.append(nnx.List(layers))
            if level:
                self.grow.append(Convolution(width, width, rngs=rngs))

        self.norm = Norm(config, channels, rngs=rngs)
        self.out = Convolution(channels, config.channels, zero=True, rngs=rngs)

    def __call__(
        self, noisy_BHWC: jax.Array, time_B: jax.Array, constrain: Constrain = unconstrained
    ) -> jax.Array:
        """Returns noise_BHWC.

        Args:
          time_B: int32 from 0 (hardly any noise) to times - 1 (hardly anything else).
        """
        last = len(self.config.multipliers) - 1
        time_BE = jax.nn.silu(self.time_in(sinusoids(time_B, self.config.width)))
        time_BE = constrain(self.time_out(time_BE), ("batch", "embed"))

        x_BHWC = constrain(self.stem(noisy_BHWC), ("batch", None, None, "channels"))
        kept = [x_BHWC]
        for level, layers in enumerate(self.down):
            for layer in layers:
                kept.append(layer(kept[-1], time_BE, constrain))
            if level < last:
                kept.append(self.shrink[level](kept[-1]))

        x_BHWC = self.middle_in(kept[-1], time_BE, constrain)
        x_BHWC = self.middle_out(x_BHWC, time_BE, constrain)

        for level, layers in enumerate(self.up):
            for layer in layers:
                x_BHWC = jnp.concatenate([x_BHWC, kept.pop()], axis=-1)
                x_BHWC = layer(x_BHWC, time_BE, constrain)
            if level < last:
                x_BHWC = self.grow[level](x_BHWC.repeat(2, axis=1).repeat(2, axis=2))
        return self.out(jax.nn.silu(self.norm(x_BHWC)))


def loss(
    model: UNet, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean squared error of the noise in `batch["image_BHWC"]` (ibid., equation 14).

    Advances the model's count of random keys.
    """
    image_BHWC, times = batch["image_BHWC"], model.config.times
    time_B = jax.random.randint(model.noise.noise(), image_BHWC.shape[:1], 0, times)
    noise_BHWC = jax.random.normal(model.noise.noise(), image_BHWC.shape)
    noisy_BHWC = diffused(image_BHWC, noise_BHWC, time_B, model.config)
    error_BHWC = model(noisy_BHWC, time_B, constrain) - noise_BHWC
    return jnp.mean(jnp.square(error_BHWC)), {"mean_time": jnp.mean(time_B / times)}


def diffused(
    image_BHWC: jax.Array, noise_BHWC: jax.Array, time_B: jax.Array, config: UNetConfig
) -> jax.Array:
    """The image after time_B + 1 steps of noise (ibid., equation 4); variance one stays one."""
    variance_T = jnp.linspace(config.first_variance, config.last_variance, config.times)
    kept_B = jnp.cumprod(1 - variance_T)[time_B]
    kept_B111 = kept_B[:, None, None, None]
    return jnp.sqrt(kept_B111) * image_BHWC + jnp.sqrt(1 - kept_B111) * noise_BHWC


def sinusoids(time_B: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of wavelengths from 2 pi to 10,000 times that, [B, width]."""
    frequency_C = 10_000.0 ** (-jnp.arange(width // 2) / (width // 2 - 1))
    angle_BC = time_B[:, None] * frequency_C
    return jnp.concatenate([jnp.sin(angle_BC), jnp.cos(angle_BC)], axis=-1)


def sample(seed: int, batch_size: int, config: UNetConfig) -> dict[str, np.ndarray]:
    """Handwritten digits, from -1 (paper) to 1 (ink). Same seed, same batch."""
    image_BHWC, _ = digits.images(seed, batch_size, config.image, channels=config.channels)
    return {"image_BHWC": 2 * image_BHWC - 1}
