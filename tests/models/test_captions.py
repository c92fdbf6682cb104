"""Captions: they name the digit, vary in constraints, and fit."""

import numpy as np
import pytest

from models import captions


def test_each_caption_names_its_digit_in_one_of_many_wordings():
    label_B = np.arange(200) % 10
    tokens_BT = captions.tokens(0, label_B, 32)
    assert (tokens_BT.shape, tokens_BT.dtype) == ((200, 32), np.int32)
    texts = list(captions.texts(tokens_BT))
    for text, label in zip(texts, label_B, strict=True):
        named = [i for i in range(10) if str(i) in text or captions.WORDS[i] in text.split()]
        assert named == [label], text
    assert len(set(texts[7::10])) > 4


def test_a_caption_ends_once_and_zeros_follow():
    tokens_BT = captions.tokens(0, np.arange(10), 32)
    is_end_BT = tokens_BT == captions.END
    np.testing.assert_array_equal(is_end_BT.sum(axis=1), 1)
    np.testing.assert_array_equal(tokens_BT * (is_end_BT.cumsum(axis=1) - is_end_BT), 0)


def test_a_seed_fixes_the_wording():
    first, again, other = (captions.tokens(seed, np.arange(10), 32) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_length_too_short_is_refused():
    with pytest.raises(ValueError, match="length=4: a caption and its end take"):
        captions.tokens(0, np.arange(10), 4)
