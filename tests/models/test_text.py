"""The text: split by file, no file in both parts, batches that a seed fixes."""

import numpy as np

from models import text


def test_both_splits_are_python_source():
    train, validation = text.read("train"), text.read("validation")
    assert len(train) > 4_000_000
    assert 0.02 < len(validation) / len(train) < 0.2
    assert b"import" in validation[:100_000].tobytes()


def test_a_path_alone_decides_the_split():
    paths = [f"folder/file{i}.py" for i in range(1000)]
    splits = [text.split_of(path) for path in paths]
    assert splits == [text.split_of(path) for path in paths]
    assert 30 < splits.count("validation") < 100


def test_batches_are_windows_of_the_split():
    batch = next(text.batches(0, 4, 32, "validation"))
    assert batch.shape == (4, 33)
    assert batch.dtype == np.int32
    data = text.read("validation").tobytes()
    assert all(bytes(row.astype(np.uint8)) in data for row in batch)
