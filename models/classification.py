"""Image classification: its objective, whatever the model, and the digits as its data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import digits


def cross_entropy(
    logits_BY: jax.Array, label_B: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy in nats, and the share of images whose likeliest class is right."""
    surprise_B = optax.softmax_cross_entropy_with_integer_labels(logits_BY, label_B)
    return jnp.mean(surprise_B), {"accuracy": jnp.mean(jnp.argmax(logits_BY, axis=-1) == label_B)}


def sample(seed: int, batch_size: int, image: int, channels: int) -> dict[str, np.ndarray]:
    """Handwritten digits of the training split, `image` pixels along each side."""
    image_BHWC, label_B = digits.images(seed, batch_size, image, channels=channels)
    return {"image_BHWC": image_BHWC, "label_B": label_B}
