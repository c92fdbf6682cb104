"""Laws of layouts: one canonical form, and JSON that keeps everything."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import LayoutError
from autoshard.records.layout import Candidate, Gather, Layout, rules
from tests.layouts import AXES, layouts


@given(layouts())
def test_canonical_is_idempotent(layout: Layout) -> None:
    once = layout.canonical()
    assert once.canonical() == once
    assert once.device_count == layout.device_count


@given(layouts())
def test_canonical_has_no_axis_of_size_one_and_no_pair_that_could_merge(layout: Layout) -> None:
    found = layout.canonical()
    assert all(size > 1 for _, size in found.mesh)
    tables = [to for _, to in (*found.activation_rules, *found.state_rules)]
    for (first, _), (second, _) in zip(found.mesh, found.mesh[1:], strict=False):
        together = [f"{first},{second}" in ",".join(to) for to in tables]
        apart = [first not in to and second not in to for to in tables]
        assert not all(a or b for a, b in zip(together, apart, strict=True))


@given(layouts())
def test_json_round_trip(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.canonical() == layout.canonical()
    assert (again.mesh, again.activation_rules, again.state_rules, again.constraints) == (
        layout.mesh,
        layout.activation_rules,
        layout.state_rules,
        layout.constraints,
    )


@given(layouts(), st.integers(0, 4))
def test_axes_of_size_one_change_nothing(layout: Layout, at: int) -> None:
    mesh = (*layout.mesh[:at], ("one", 1), *layout.mesh[at:])
    wider = dataclasses.replace(
        layout,
        mesh=mesh,
        activation_rules=tuple((a, ("one", *to)) for a, to in layout.activation_rules),
        state_rules=tuple((a, (*to, "one")) for a, to in layout.state_rules),
    )
    assert wider.canonical() == layout.canonical()


@given(layouts(), st.integers(0, 4), st.sets(st.sampled_from(AXES)), st.sampled_from([2, 3]))
def test_an_axis_divided_in_two_that_stay_together_changes_nothing(
    layout: Layout, at: int, users: set[str], major: int
) -> None:
    def widened(mesh: tuple[tuple[str, int], ...]) -> Layout:
        names = tuple(name for name, _ in mesh)
        found = dict(layout.activation_rules)
        compute = {a: (*found.get(a, ()), *(names if a in users else ())) for a in AXES}
        return dataclasses.replace(
            layout,
            mesh=(*layout.mesh[:at], *mesh, *layout.mesh[at:]),
            activation_rules=rules(compute),
            state_rules=(*layout.state_rules, ("other", names)),
        )

    whole = widened((("big", 6),))
    divided = widened((("big", major), ("half", 6 // major)))
    assert divided.canonical() == whole.canonical()


@given(layouts())
def test_the_order_of_tables_changes_nothing(layout: Layout) -> None:
    shuffled = Layout(
        mesh=layout.mesh,
        activation_rules=layout.activation_rules[::-1],
        state_rules=layout.state_rules[::-1],
        conflict_losers=layout.conflict_losers[::-1],
        gather=layout.gather,
        small_replicated=layout.small_replicated,
        gather_loop_inputs=layout.gather_loop_inputs,
        constraints=layout.constraints,
    )
    assert shuffled.canonical() == layout.canonical()


def test_without_a_rule_there_is_nothing_to_replicate() -> None:
    plain = Layout(mesh=(("x", 2), ("y", 1)), activation_rules=rules({"batch": "y"}))
    assert dataclasses.replace(plain, small_replicated=True).canonical() == plain.canonical()
    ruled = dataclasses.replace(
        plain, activation_rules=rules({"batch": "x"}), small_replicated=True
    )
    assert ruled.canonical().small_replicated


@given(layouts())
def test_spreading_over_its_own_mesh_undoes_canonical(layout: Layout) -> None:
    wide = layout.canonical().spread_over(layout.mesh)
    assert wide is not None
    assert wide.mesh == layout.mesh
    assert wide.canonical() == layout.canonical()


def test_spreading_names_every_axis_again() -> None:
    layout = Layout(mesh=(("data", 8),), activation_rules=rules({"batch": "data"}))
    mesh = (("data", 4), ("one", 1), ("model", 2))
    wide = layout.spread_over(mesh)
    assert wide is not None
    assert wide.activation_rules == (("batch", ("data", "model")),)
    assert layout.spread_over((("data", 4),)) is None
    assert layout.spread_over((("other", 8),)) is None


def test_merging_keeps_the_device_order() -> None:
    swapped = Layout(mesh=(("x", 4), ("y", 2)), activation_rules=rules({"batch": ("y", "x")}))
    assert swapped.canonical() == swapped
    together = Layout(mesh=(("x", 4), ("y", 2)), activation_rules=rules({"batch": ("x", "y")}))
    assert together.canonical().mesh == (("x", 8),)


def test_the_name_that_small_arrays_whole_had_before_is_read() -> None:
    old = {"mesh": [["x", 2]], "compute": {"batch": ["x"]}, "storage": {"embed": ["x"]}}
    old |= {"conflict_losers": [], "as_annotated": False}
    assert Layout.from_json(old).gather is Gather.PER_USE
    small = Layout.from_json({**old, "small_whole": True})
    assert small.gather is Gather.SMALL_REPLICATED
    assert small.to_json() == {
        "mesh": [["x", 2]],
        "activation_rules": {"batch": ["x"]},
        "state_rules": {"embed": ["x"]},
        "conflict_losers": [],
        "gather": "small_replicated",
        "as_annotated": False,
    }
    with pytest.raises(LayoutError, match="half"):
        Layout.from_json({**old, "whole": "half"})


def test_what_a_later_version_says_of_a_layout_is_no_layout_here() -> None:
    later = {
        **Layout(mesh=(("x", 2),), activation_rules=rules({"a": "x"})).to_json(),
        "later": True,
    }
    with pytest.raises(LayoutError, match=r"\['later'\].*small_replicated.*autoshard that"):
        Layout.from_json(later)


def test_the_name_that_axes_giving_way_had_before_is_read() -> None:
    layout = Layout(
        mesh=(("x", 2),), activation_rules=rules({"a": "x"}), conflict_losers=("a", "b")
    )
    new = layout.to_json()
    old = {key: value for key, value in new.items() if key != "conflict_losers"}
    assert new == {**old, "conflict_losers": ["a", "b"]}
    assert Layout.from_json({**old, "occurrences": {"b": 1, "a": 1, "c": 0}}) == layout
    with pytest.raises(LayoutError, match="list"):
        Layout.from_json({**old, "conflict_losers": "ab"})


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"mesh": [["x", 2]]},
        {
            "mesh": [["x", "two"]],
            "compute": {},
            "storage": {},
            "conflict_losers": [],
            "as_annotated": 0,
        },
        {
            "mesh": [["x", 2]],
            "compute": 3,
            "storage": {},
            "conflict_losers": [],
            "as_annotated": False,
        },
        {
            "mesh": [["x", 2]],
            "compute": {"batch": ["y"]},
            "storage": {},
            "conflict_losers": [],
            "as_annotated": False,
        },
    ],
)
def test_json_that_is_no_layout_is_refused(data: object) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(data)
    with pytest.raises(LayoutError):
        Candidate.from_json({"layout": data, "knobs": {}})


def test_a_rule_on_an_unknown_or_repeated_mesh_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="batch"):
        Layout(mesh=(("x", 2),), activation_rules=rules({"batch": "y"}))
    with pytest.raises(LayoutError, match="distinct"):
        Layout(mesh=(("x", 2),), state_rules=(("batch", ("x", "x")),))
    with pytest.raises(LayoutError, match="distinct"):
        Layout(mesh=(("x", 2), ("x", 2)))


@given(layouts(), layouts())
def test_candidate_keys_are_equal_exactly_for_equal_candidates(a: Layout, b: Layout) -> None:
    one = Candidate(layout=a.canonical(), knobs=(("remat", "none"),))
    two = Candidate(layout=b.canonical(), knobs=(("remat", "none"),))
    assert (one.key == two.key) == (one == two)
    assert Candidate.from_json(json.loads(one.key)) == one
    assert one.key != dataclasses.replace(one, knobs=(("remat", "full"),)).key
