"""Vision Transformer: an image is a sequence of patches (Dosovitskiy et al. 2021).

Dimensions in array names: B batch, H height, W width, C channels, P patches along a side,
T = P * P + 1 positions (the class token is the first), D d_model, Y classes.

The head is one linear map, as in the paper's fine-tuning. Not modelled: dropout.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import classification, digits
from models.constrain import Constrain, unconstrained
from models.transformer import TransformerConfig, make_blocks, run_blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """Sizes of a `ViT`; two equal configs build two equal models."""

    image: int = 32  # pixels along each side
    channels: int = 1  # of the image
    patch: int = 8  # pixels along each side of a patch
    classes: int = digits.CLASSES  # that an image may belong to
    embedding_norm: bool = False  # as in CLIP: LayerNorm in place of the bias of the patches
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        # slots=True makes the class anew, and super() without arguments would name the old one.
        TransformerConfig.__post_init__(self)
        if self.image % self.patch:
            raise ValueError(f"patch={self.patch} must divide image={self.image}")
        if self.causal:
            raise ValueError("causal=True: patches have no order; expected False")

    @property
    def positions(self) -> int:
        """T: the patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


# "An Image is Worth 16x16 Words" (Dosovitskiy et al. 2021), table 1; images and classes of
# ImageNet. remat is of our choosing.
VIT_B16 = ViTConfig(
    d_model=768,
    heads=12,
    mlp_dim=3072,
    layers=12,
    image=224,
    channels=3,
    patch=16,
    classes=1000,
)
VIT_L16 = dataclasses.replace(
    VIT_B16, d_model=1024, heads=16, mlp_dim=4096, layers=24, remat="full"
)


class Encoder(nnx.Module):
    """Patches, class token, learnt positions and the transformer; the part below the head."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        D, epsilon = config.d_model, config.norm_epsilon
        self.config = config
        self.patches = nnx.Conv(
            config.channels,
            D,
            (config.patch, config.patch),
            strides=(config.patch, config.patch),
            padding="VALID",
            use_bias=not config.embedding_norm,
            rngs=rngs,
        )
        self.class_token = nnx.Param(jnp.zeros((D,)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.positions, D)))
        if config.embedding_norm:
            self.embedding_norm = nnx.LayerNorm(D, epsilon=epsilon, rngs=rngs)
        self.layers = make_blocks(config, rngs)
        self.norm = nnx.LayerNorm(D, epsilon=epsilon, rngs=rngs)

    def __call__(self, image_BHWC: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns class_BD, what the class token has become."""
        patches_BPPD = self.patches(image_BHWC)
        B, D = patches_BPPD.shape[0], self.config.d_model
        class_B1D = jnp.broadcast_to(self.class_token[...], (B, 1, D))
        x_BTD = jnp.concatenate([class_B1D, patches_BPPD.reshape(B, -1, D)], axis=1)
        x_BTD = x_BTD + self.positions[...]
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        x_BTD = run_blocks(self.layers, self.config, x_BTD, constrain)
        return constrain(self.norm(x_BTD[:, 0]), ("batch", "embed"))


class ViT(nnx.Module):
    """Images in, logits of their classes out."""

    def __init__(self, config: ViTConfig):
        rngs = nnx.Rngs(config.seed)
        self.encoder = Encoder(config, rngs=rngs)
        self.head = nnx.Linear(config.d_model, config.classes, rngs=rngs)

    def __call__(self, image_BHWC: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns logits_BY."""
        return constrain(self.head(self.encoder(image_BHWC, constrain)), ("batch", "classes"))


def loss(
    model: ViT, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of `batch["label_B"]` given `batch["image_BHWC"]`, in nats."""
    return classification.cross_entropy(model(batch["image_BHWC"], constrain), batch["label_B"])


def sample(seed: int, batch_size: int, config: ViTConfig) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split. Same seed, same batch."""
    return classification.sample(seed, batch_size, config.image, config.channels)
