import os
import threading

import ml_dtypes
import numpy as np
import pytest

from autoshard.rungs.profile.chunked import PIECE, chunked_map


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 5 * PIECE - 7])
def test_pieces_come_in_order_and_leave_nothing_out(size):
    a, b = np.arange(size), np.arange(size)[::-1]
    pieces = chunked_map(lambda x, y: (x.copy(), y.copy()), a, b)
    assert all(len(x) == len(y) <= PIECE for x, y in pieces)
    for k, whole in enumerate((a, b)):
        np.testing.assert_array_equal(np.concatenate([[], *(piece[k] for piece in pieces)]), whole)


def test_what_a_piece_writes_is_in_the_array():
    made = np.zeros((3, PIECE), ml_dtypes.bfloat16)
    given = np.arange(3 * PIECE).reshape(3, PIECE) % 200

    def write(new, old):
        new[:] = old

    chunked_map(write, made, given)
    np.testing.assert_array_equal(made.astype(int), given)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_all_cores_work():
    """Two pieces wait for each other: one thread alone would wait for ever."""
    both = threading.Barrier(2, timeout=60)
    assert len(chunked_map(lambda x: both.wait(), np.zeros(2 * PIECE))) == 2


def test_arrays_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 4\] elements, expected one size"):
        chunked_map(len, np.zeros(3), np.zeros(4))
