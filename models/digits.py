"""Images to train on without a download: the 1797 handwritten digits that scikit-learn carries.

They are 8 x 8 pixels, the test part of the set of Alpaydin & Kaynak (1998, UCI repository), scaled
up to the size that a model wants. An image goes to training or validation by a hash of its index,
so the split depends on no machine.
"""

import functools

import numpy as np

from models.text import Split, split_of

CLASSES = 10
PIXELS = 8  # along each side, as recorded


@functools.cache
def read(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """All digits of a split: images [N, 8, 8] float32 from 0 (paper) to 1 (ink), labels [N] int32.

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    images_NHW, labels_N = load_digits(return_X_y=True)
    chosen = [i for i in range(len(labels_N)) if split_of(f"digit {i}") == split]
    scaled_NHW = images_NHW[chosen].reshape(-1, PIXELS, PIXELS) / 16
    return scaled_NHW.astype(np.float32), labels_N[chosen].astype(np.int32)


def images(
    seed: int, batch_size: int, size: int, split: Split = "train", *, channels: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Digits drawn at random: images_BHWC and labels_B. Same seed, same batch.

    Args:
      size: pixels along each side, a multiple of 8; each pixel becomes a square of equal ones.
      channels: equal copies of the grey values.
    """
    if size % PIXELS:
        raise ValueError(f"size={size} must be a multiple of {PIXELS}, the digits' own size")
    images_NHW, labels_N = read(split)
    chosen_B = np.random.default_rng(seed).integers(0, len(labels_N), batch_size)
    square = np.ones((1, size // PIXELS, size // PIXELS), np.float32)
    large_BHW = np.kron(images_NHW[chosen_B], square)
    return np.repeat(large_BHW[..., None], channels, axis=-1), labels_N[chosen_B]
