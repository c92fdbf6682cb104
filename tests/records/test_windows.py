"""Which places windows read, and how far a device must reach for its part of the result."""

import pytest

from autoshard.records.windows import Window, reach, taps


@pytest.mark.parametrize(
    ("window", "ways", "found"),
    [
        # A kernel of three: one row of each neighbour.
        (Window(data=8, kernel=3, out=8, pad_low=1), 4, (1, 1)),
        (Window(data=8, kernel=1, out=8), 4, (0, 0)),
        (Window(data=8, kernel=3, out=8, pad_low=2), 4, (2, 0)),  # all before it
        (Window(data=16, kernel=3, out=8, stride=2), 2, (0, 1)),
        (Window(data=64, kernel=7, out=32, pad_low=3, stride=2), 2, (3, 2)),
        (Window(data=8, kernel=3, out=8, pad_low=2, rhs_dilation=2), 2, (2, 2)),
        (Window(data=4, kernel=3, out=8, pad_low=1, lhs_dilation=2), 2, (0, 1)),
        (Window(data=8, kernel=1, out=7, pad_low=-1), 4, (0, 1)),  # x[1:]
        (Window(data=12, kernel=1, out=4, pad_low=-8), 4, (0, 6)),  # the last third: far away
        (Window(data=8, kernel=1, out=9, pad_low=1), 3, (1, 0)),  # a pad in front
    ],
)
def test_the_neighbours_have_what_windows_reach_into(
    window: Window, ways: int, found: tuple[int, int]
) -> None:
    assert tuple(max(0, side) for side in reach(window, ways)) == found


def test_the_gradient_of_a_kernel_reads_the_same_pairs_of_places() -> None:
    window = Window(data=8, kernel=8, out=3, pad_low=1)
    assert window.transposed() == Window(data=8, kernel=3, out=8, pad_low=1)
    assert window.transposed().transposed() == window
    assert taps(window.transposed()) == taps(window) == 22


def test_only_a_window_of_one_at_its_own_place_moves_nothing() -> None:
    assert not Window(data=8, kernel=1, out=8).moves
    assert Window(data=8, kernel=1, out=7).moves
    assert Window(data=8, kernel=3, out=8, pad_low=1).moves
