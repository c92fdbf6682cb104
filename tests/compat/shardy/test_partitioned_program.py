"""What is read off a partitioned module."""

import pytest

from autoshard.compat.shardy.partitioned_program import _moving
from autoshard.compat.shardy.reshards import Division

SIZES = {"x": 2, "y": 4, "z": 2}


@pytest.mark.parametrize(
    ("before", "after", "moving"),
    [
        ((("y",), ("x", "z")), (("x",), ("y", "z")), "xy"),  # of Shardy's own tests
        ((("x", "y"), ()), (("y", "x"), ()), "xy"),
        ((("z", "x"), ("y",)), (("z", "y"), ("x",)), "zxy"),  # z divides other parts
        ((("x",), ("y",), ("z",)), (("x",), ("z",), ("y",)), "yz"),
        ((("x",), ("y",)), (("x",), ()), "y"),
    ],
)
def test_a_permutation_runs_over_the_axes_whose_place_changes(
    before: Division, after: Division, moving: str
) -> None:
    assert _moving(before, after, SIZES) == set(moving)
