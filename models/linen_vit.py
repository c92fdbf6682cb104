"""The vision transformer of `models.vit` in Flax Linen, of Linen's own layers.

Parameters have the names, the shapes and the order of stacking of the NNX module's, so each can
run with the other's. Layers are stacked and scanned, or one after the other, as the config says.

Linen modules are called through `apply`: `loss` is given one with the variables filled in, and
the hook `constrain` is a field of the module.

Dimensions in array names: as in `models.vit`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from models import classification, vit
from models.constrain import Constrain, unconstrained
from models.decoder import REMAT_POLICIES
from models.transformer import TransformerConfig
from models.vit import ViTConfig


class MLP(nn.Module):
    """Two maps with GELU (Hendrycks & Gimpel 2016) between them."""

    config: TransformerConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        hidden_BTM = jax.nn.gelu(nn.Dense(self.config.mlp_dim, name="up")(x_BTD))
        hidden_BTM = self.constrain(hidden_BTM, ("batch", None, "mlp"))
        return nn.Dense(self.config.d_model, name="down")(hidden_BTM)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    config: TransformerConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, None]:
        """Returns x_BTD, and nothing to stack, as a scan wants it."""
        epsilon, names = self.config.norm_epsilon, ("batch", None, "embed")
        normed_BTD = nn.LayerNorm(epsilon=epsilon, name="attention_norm")(x_BTD)
        attention = nn.MultiHeadDotProductAttention(
            self.config.heads, attention_fn=self.attend, name="attention"
        )
        x_BTD = self.constrain(x_BTD + attention(normed_BTD), names)
        normed_BTD = nn.LayerNorm(epsilon=epsilon, name="mlp_norm")(x_BTD)
        mlp = MLP(self.config, self.constrain, name="mlp")
        return self.constrain(x_BTD + mlp(normed_BTD), names), None

    def attend(
        self, q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, **options: Any
    ) -> jax.Array:
        """Linen's attention between the projections, where the hook belongs."""
        names = ("batch", None, "heads", None)
        q_BTHK, k_BTHK, v_BTHK = (self.constrain(x, names) for x in (q_BTHK, k_BTHK, v_BTHK))
        mixed_BTHK = nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, **options)
        return self.constrain(mixed_BTHK, names)


class Encoder(nn.Module):
    """Patches, class token, learnt positions and the transformer; the part below the head."""

    config: ViTConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Returns class_BD, what the class token has become."""
        config, D = self.config, self.config.d_model
        patch = (config.patch, config.patch)
        patches_BPPD = nn.Conv(
            D,
            patch,
            strides=patch,
            padding="VALID",
            use_bias=not config.embedding_norm,
            name="patches",
        )(image_BHWC)
        B = patches_BPPD.shape[0]
        class_D = self.param("class_token", nn.initializers.zeros, (D,))
        positions_TD = self.param("positions", nn.initializers.normal(0.02), (config.positions, D))
        class_B1D = jnp.broadcast_to(class_D, (B, 1, D))
        x_BTD = jnp.concatenate([class_B1D, patches_BPPD.reshape(B, -1, D)], axis=1)
        x_BTD = x_BTD + positions_TD
        if config.embedding_norm:
            x_BTD = nn.LayerNorm(epsilon=config.norm_epsilon, name="embedding_norm")(x_BTD)
        x_BTD = self.constrain(x_BTD, ("batch", None, "embed"))

        block: Any = Block
        if config.remat != "none":
            # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
            policy = REMAT_POLICIES[config.remat]
            block = nn.remat(Block, policy=policy, prevent_cse=not config.scanned)
        if config.scanned:
            stacked = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=config.layers,
            )
            x_BTD, _ = stacked(config, self.constrain, name="layers")(x_BTD)
        else:
            for i in range(config.layers):
                x_BTD, _ = block(config, self.constrain, name=f"layers_{i}")(x_BTD)
        x_BD = nn.LayerNorm(epsilon=config.norm_epsilon, name="norm")(x_BTD[:, 0])
        return self.constrain(x_BD, ("batch", "embed"))


class ViT(nn.Module):
    """Images in, logits of their classes out (Dosovitskiy et al. 2021)."""

    config: ViTConfig
    constrain: Constrain = unconstrained

    @nn.compact
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Returns logits_BY."""
        class_BD = Encoder(self.config, self.constrain, name="encoder")(image_BHWC)
        logits_BY = nn.Dense(self.config.classes, name="head")(class_BD)
        return self.constrain(logits_BY, ("batch", "classes"))


def loss(
    apply: Callable[..., jax.Array], batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of `batch["label_B"]` given `batch["image_BHWC"]`, in nats.

    Args:
      apply: the module's `apply` with its variables filled in.
    """
    return classification.cross_entropy(apply(batch["image_BHWC"]), batch["label_B"])


def sample(seed: int, batch_size: int, config: ViTConfig) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split. Same seed, same batch."""
    return vit.sample(seed, batch_size, config)
