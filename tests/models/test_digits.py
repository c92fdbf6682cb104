"""The digits: split by index, scaled up pixel by pixel, batches that a seed fixes."""

import sys

import numpy as np
import pytest

from models import digits


def test_every_digit_is_in_one_split():
    train, validation = digits.read("train"), digits.read("validation")
    assert len(train[1]) + len(validation[1]) == 1797
    assert 0.03 < len(validation[1]) / 1797 < 0.12
    assert set(train[1]) == set(validation[1]) == set(range(digits.CLASSES))
    assert train[0].min() == 0
    assert train[0].max() == 1


def test_each_pixel_becomes_a_square():
    images_BHWC, labels_B = digits.images(0, 4, 24, "validation", channels=3)
    assert images_BHWC.shape == (4, 24, 24, 3)
    assert (images_BHWC.dtype, labels_B.dtype) == (np.float32, np.int32)
    originals_NHW, labels_N = digits.read("validation")
    for image_HWC, label in zip(images_BHWC, labels_B, strict=True):
        same = (originals_NHW == image_HWC[1::3, 2::3, 1]).all(axis=(1, 2))
        assert labels_N[same] == [label]
        for shift in range(3):
            np.testing.assert_array_equal(image_HWC[shift::3, ::3, shift], image_HWC[::3, 1::3, 0])


def test_a_size_between_is_refused():
    with pytest.raises(ValueError, match="size=28 must be a multiple of 8"):
        digits.images(0, 1, 28)


def test_without_sklearn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.read.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        digits.read("train")
