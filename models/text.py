"""Text to train on that every machine has: the Python sources of the interpreter's own library.

Files go to training or validation whole, by a hash of their path, so the split depends on neither
order nor machine. Test folders and third-party packages are left out.
"""

import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Literal

import numpy as np

Split = Literal["train", "validation"]

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
VALIDATION_SHARE = 1 / 16  # of the files


@functools.cache
def read(split: Split) -> np.ndarray:
    """All bytes of a split as uint8, files in order of path with a zero byte after each."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    chosen = sorted(
        (relative.as_posix(), path)
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection((relative := path.relative_to(root)).parts)
        and split_of(relative.as_posix()) == split
    )
    if not chosen:
        raise FileNotFoundError(f"no Python sources for the {split} split below {root}")
    data = b"".join(path.read_bytes() + b"\0" for _, path in chosen)
    return np.frombuffer(data, dtype=np.uint8)


def split_of(relative_path: str) -> Split:
    """The split of a file, by a hash of its path relative to the library's root."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if share < VALIDATION_SHARE else "train"


def batches(
    seed: int, batch_size: int, sequence_length: int, split: Split = "train"
) -> Iterator[np.ndarray]:
    """Yields int32 batches [B, T + 1] for ever: windows at random offsets, the same for a seed.

    Args:
      sequence_length: T, the positions a model predicts; a row holds one byte more, so that every
        position has its target.
    """
    data = read(split)
    window = np.arange(sequence_length + 1)
    rng = np.random.default_rng(seed)
    while True:
        starts_B1 = rng.integers(0, len(data) - sequence_length, (batch_size, 1))
        yield data[starts_B1 + window].astype(np.int32)
