"""Span corruption of text: spans go out, sentinels stand for them (Raffel et al. 2020, 3.1.4).

Dimensions in array names: B batch, W bytes of a window, S positions of the source, T of the
target. As every row loses equally many bytes in equally many spans, no row needs padding.
"""

import numpy as np

BYTES = 256  # the first tokens of the vocabulary; sentinels are the last


def corrupt(
    window_BW: np.ndarray,
    rng: np.random.Generator,
    *,
    spans: int,
    span_length: int,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """source_BS with a sentinel in place of each span, target_BT with the span behind it.

    Every span and every stretch between two has at least a byte; the sentinels are the last
    tokens of the vocabulary, the very last for the first span.

    Args:
      spans: taken out of each row.
      span_length: mean bytes of one.
    """
    sentinels = np.arange(vocab_size - 1, vocab_size - 1 - spans, -1, dtype=window_BW.dtype)
    sources, targets = [], []
    for window_W in window_BW:
        kept = random_parts(rng, len(window_W) - spans * span_length, spans)
        hidden = random_parts(rng, spans * span_length, spans)
        ends = np.cumsum(np.stack([kept, hidden], axis=1))
        pieces = np.split(window_W, ends[:-1])
        sources.append(_interleaved(pieces[::2], np.split(sentinels, spans)))
        targets.append(_interleaved(np.split(sentinels, spans), pieces[1::2]))
    return np.stack(sources), np.stack(targets)


def random_parts(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """`parts` whole numbers from 1 on that sum to `total`, every choice equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def _interleaved(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([piece for pair in zip(first, second, strict=True) for piece in pair])
