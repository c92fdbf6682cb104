"""The divisible union-find."""

import math

from hypothesis import given
from hypothesis import strategies as st

from autoshard.program.factors import Factor, size_of, tie, tie_unequal


def sizes(*factors: Factor) -> list[int]:
    return [leaf.size for f in factors for leaf in f.leaves()]


def test_a_tie_splits_the_coarser_view() -> None:
    whole, parts = Factor(24), [Factor(4), Factor(6)]
    assert tie([whole], parts)
    assert whole.leaves() == [f for p in parts for f in p.leaves()]
    assert sizes(whole) == [4, 6]


def test_a_later_split_reaches_everything_tied_before() -> None:
    a, b, c = Factor(24), Factor(24), Factor(24)
    assert tie([a], [b]) and tie([c], [b])
    assert tie([a], [Factor(2), Factor(12)])
    assert tie([c], [Factor(6), Factor(4)])
    assert sizes(a) == sizes(b) == sizes(c) == [2, 3, 4]
    assert a.leaves() == b.leaves() == c.leaves()


def test_views_that_do_not_line_up_are_left_alone() -> None:
    left, right = [Factor(2), Factor(3)], [Factor(3), Factor(2)]
    assert not tie(left, right)
    assert {f.root() for f in left}.isdisjoint(f.root() for f in right)


def test_a_loop_stays_on_the_major_part() -> None:
    accumulated = Factor(16)
    accumulated.is_loop = True
    assert tie([accumulated], [Factor(4), Factor(4)])
    assert [leaf.is_loop for leaf in accumulated.leaves()] == [True, False]


def test_slices_tie_to_the_minor_part_and_strides_to_the_major() -> None:
    fused, query = Factor(96), Factor(32)
    assert tie_unequal(fused, query)
    assert sizes(fused) == [3, 32] and fused.leaves()[1] is query.root()
    wide, pooled = Factor(8), Factor(4)
    assert tie_unequal(pooled, wide, major=True)
    assert sizes(wide) == [4, 2] and wide.leaves()[0] is pooled.root()


def test_sizes_that_do_not_divide_are_not_tied() -> None:
    longer, shorter = Factor(25), Factor(24)
    assert not tie_unequal(longer, shorter)
    assert sizes(longer, shorter) == [25, 24]


@st.composite
def views(draw: st.DrawFn) -> list[list[int]]:
    primes = draw(st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=5))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, len(primes)), max_size=3)) | {len(primes)})
        starts = [0, *cuts[:-1]]
        found.append([math.prod(primes[a:b]) for a, b in zip(starts, cuts, strict=True)])
    return found


@given(views())
def test_every_view_of_one_dimension_has_the_same_leaves(all_views: list[list[int]]) -> None:
    whole = Factor(math.prod(all_views[0]))
    held = [[Factor(n) for n in view] for view in all_views]
    for view in held:
        assert tie([whole], view)
    for view in held:
        assert [leaf for f in view for leaf in f.leaves()] == [
            leaf for leaf in whole.leaves() if leaf.size > 1
        ]
        assert size_of(view) == whole.size
    assert math.prod(sizes(whole)) == whole.size
