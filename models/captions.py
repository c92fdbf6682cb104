"""English captions of digits, with_constraints in many ways, as bytes."""

from collections.abc import Iterator

import numpy as np

END = 255  # follows the last byte of a caption, then zeros; no byte of UTF-8 has this value

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = (
    "{digit}",
    "{word}",
    "the digit {digit}",
    "the number {word}",
    "a handwritten {word}",
    "a {digit} written by hand",
    "someone wrote {word}",
    "this is a {digit}",
)


def tokens(seed: int, label_B: np.ndarray, length: int) -> np.ndarray:
    """One caption for each label, its constraints drawn at random: int32 tokens_BT.

    Args:
      length: T; a caption that does not fit with its end is a ValueError.
    """
    choice_B = np.random.default_rng(seed).integers(0, len(WORDINGS), len(label_B))
    rows = [
        WORDINGS[choice].format(digit=label, word=WORDS[label]).encode() + bytes([END])
        for choice, label in zip(choice_B, label_B, strict=True)
    ]
    longest = max(map(len, rows))
    if longest > length:
        raise ValueError(f"length={length}: a caption and its end take {longest} tokens")
    return np.stack([np.frombuffer(row.ljust(length, b"\0"), np.uint8) for row in rows]).astype(
        np.int32
    )


def texts(tokens_BT: np.ndarray) -> Iterator[str]:
    """The captions that `tokens` made, for a person."""
    for row in tokens_BT:
        yield bytes(row[: list(row).index(END)].astype(np.uint8)).decode()
