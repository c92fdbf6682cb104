"""Images and texts in one space, by contrast: CLIP (Radford et al. 2021).

The image tower is the vision transformer's encoder, the text tower a causal transformer over
bytes, read where the text ends. Each image is compared with every text of the GLOBAL batch and
each text with every image: the one loss here that no split of the batch into parts can give.

Images are digits, texts are captions of them. Several images of a batch show one digit, so their
captions mean the same though the loss counts all but one as wrong: it cannot reach zero.

Dimensions in array names: B images, A = B texts, T positions of a text, D d_model, S the shared
space, V vocab_size.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models import captions, digits
from models.constrain import Constrain, unconstrained
from models.transformer import TransformerConfig, make_blocks, run_blocks
from models.vit import Encoder, ViTConfig

LARGEST_SCALE = 100.0  # of the similarities: the temperature stays above 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(TransformerConfig):
    """Sizes of the text tower."""

    vocab_size: int = 256  # one token for each byte
    context: int = 32  # positions T of a text, its end included
    causal: bool = True  # a position sees itself and those before it

    def __post_init__(self) -> None:
        # slots=True makes the class anew, and super() without arguments would name the old one.
        TransformerConfig.__post_init__(self)
        if self.vocab_size <= captions.END:
            raise ValueError(f"vocab_size={self.vocab_size} must exceed {captions.END}, the end")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CLIPConfig:
    """Sizes of a `CLIP`; two equal configs build two equal models."""

    image: ViTConfig = dataclasses.field(  # the image tower; its classes and seed are not used
        default_factory=lambda: ViTConfig(embedding_norm=True)
    )
    text: TextConfig = dataclasses.field(default_factory=TextConfig)  # the text tower
    shared: int = 32  # width S of the space of both
    temperature: float = 0.07  # that training starts from
    seed: int = 0  # of the initial parameters


CLIP_VIT_B32 = CLIPConfig(
    # "Learning Transferable Visual Models From Natural Language Supervision" (Radford et al.
    # 2021), table 20; vocabulary and context as released (section 2.4 has 49,152 and 76).
    image=ViTConfig(
        image=224,
        channels=3,
        patch=32,
        d_model=768,
        heads=12,
        mlp_dim=3072,
        layers=12,
        norm_epsilon=1e-5,
        embedding_norm=True,
    ),
    text=TextConfig(
        vocab_size=49_408,
        context=77,
        d_model=512,
        heads=8,
        mlp_dim=2048,
        layers=12,
        norm_epsilon=1e-5,
    ),
    shared=512,
)


class TextEncoder(nnx.Module):
    """Embedding, learnt positions, the transformer and its last norm."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        V, T, D = config.vocab_size, config.context, config.d_model
        self.config = config
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, D)))
        self.positions = nnx.Param(0.01 * jax.random.normal(rngs.params(), (T, D)))
        self.layers = make_blocks(config, rngs)
        self.norm = nnx.LayerNorm(D, epsilon=config.norm_epsilon, rngs=rngs)

    def __call__(self, tokens_AT: jax.Array, constrain: Constrain = unconstrained) -> jax.Array:
        """Returns end_AD, what the token at a text's end has become; it has seen the whole text."""
        x_ATD = self.embedding[...][tokens_AT] + self.positions[...]
        x_ATD = constrain(x_ATD, ("batch", None, "embed"))
        x_ATD = run_blocks(self.layers, self.config, x_ATD, constrain)
        end_A11 = jnp.argmax(tokens_AT == captions.END, axis=1)[:, None, None]
        end_AD = jnp.take_along_axis(x_ATD, end_A11, axis=1)[:, 0]
        return constrain(self.norm(end_AD), ("batch", "embed"))


class CLIP(nnx.Module):
    """Both towers, their projections into the shared space, and the learnt temperature."""

    def __init__(self, config: CLIPConfig):
        rngs = nnx.Rngs(config.seed)
        S = config.shared
        self.image = Encoder(config.image, rngs=rngs)
        self.text = TextEncoder(config.text, rngs=rngs)
        self.image_out = nnx.Linear(config.image.d_model, S, use_bias=False, rngs=rngs)
        self.text_out = nnx.Linear(config.text.d_model, S, use_bias=False, rngs=rngs)
        self.log_scale = nnx.Param(jnp.full((), -math.log(config.temperature)))

    def __call__(
        self, image_BHWC: jax.Array, tokens_AT: jax.Array, constrain: Constrain = unconstrained
    ) -> jax.Array:
        """Returns similarity_BA of each image and each text, over the temperature."""
        image_BS = unit(self.image_out(self.image(image_BHWC, constrain)))
        text_AS = unit(self.text_out(self.text(tokens_AT, constrain)))
        image_BS = constrain(image_BS, ("batch", "embed"))
        text_AS = constrain(text_AS, ("batch", "embed"))
        scale = jnp.exp(capped(self.log_scale[...], math.log(LARGEST_SCALE)))
        return constrain(scale * jnp.einsum("BS,AS->BA", image_BS, text_AS), ("batch", None))


def capped(x: jax.Array, largest: float) -> jax.Array:
    """At most `largest`, with the gradient of `x`: beyond it the loss still pulls it back."""
    stop = jax.lax.stop_gradient
    return stop(jnp.minimum(x, largest)) + (x - stop(x))


def unit(x_BS: jax.Array) -> jax.Array:
    """Rows of length one."""
    return x_BS * jax.lax.rsqrt(jnp.sum(jnp.square(x_BS), axis=-1, keepdims=True))


def loss(
    model: CLIP, batch: dict[str, jax.Array], constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Symmetric cross-entropy, in nats, of the text of each image and of the image of each text.

    Args:
      batch: `image_BHWC`, and `tokens_BT`, the captions, row by row.
    """
    similarity_BA = model(batch["image_BHWC"], batch["tokens_BT"], constrain)
    found_B = jnp.argmax(similarity_BA, axis=1) == jnp.arange(len(similarity_BA))
    return contrast(similarity_BA), {"accuracy": jnp.mean(found_B)}


def contrast(similarity_BA: jax.Array) -> jax.Array:
    """The mean over rows and columns of the surprise at the diagonal."""
    own_B = jnp.arange(len(similarity_BA))
    text_B = optax.softmax_cross_entropy_with_integer_labels(similarity_BA, own_B)
    image_A = optax.softmax_cross_entropy_with_integer_labels(similarity_BA.T, own_B)
    return (jnp.mean(text_B) + jnp.mean(image_A)) / 2


def sample(seed: int, batch_size: int, config: CLIPConfig) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split with captions. Same seed, same batch."""
    image = config.image
    image_BHWC, label_B = digits.images(seed, batch_size, image.image, channels=image.channels)
    tokens_BT = captions.tokens(seed, label_B, config.text.context)
    return {"image_BHWC": image_BHWC, "tokens_BT": tokens_BT}
