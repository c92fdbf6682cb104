"""Replica groups: three notations, one meaning; nothing unread passes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.records.groups import axes_of_groups, axes_of_pairs, groups_of_axes
from autoshard.records.subaxes import places_of_axes
from autoshard.rungs.compile.hlo import HloError, parse_groups, parse_pairs
from autoshard.target.network import Network
from tests import hardware

MESH = (("a", 2), ("b", 4))


@st.composite
def meshes_with_axes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = tuple(zip("wxyz", sizes, strict=False))
    axes = draw(st.sets(st.sampled_from([name for name, _ in mesh])))
    return mesh, axes


def as_sets(groups):
    return {frozenset(group) for group in groups}


def by_coordinates(mesh, axes):
    """An independent definition: devices that agree on every other axis."""
    groups = {}
    places = itertools.product(*(range(size) for _, size in mesh))
    for device, place in enumerate(places):
        rest = tuple(p for p, (name, _) in zip(place, mesh, strict=True) if name not in axes)
        groups.setdefault(rest, []).append(device)
    return as_sets(groups.values())


def lists(groups):
    return "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


def iota(mesh, axes):
    sizes = [size for _, size in mesh]
    order = [i for i, (name, _) in enumerate(mesh) if name not in axes]
    order += [i for i, (name, _) in enumerate(mesh) if name in axes]
    size = math.prod(s for name, s in mesh if name in axes)
    text = f"[{math.prod(sizes) // size},{size}]<=[{','.join(map(str, sizes))}]"
    return text + f"T({','.join(map(str, order))})"


def named(mesh, axes):
    inside = ",".join(f"'{name}'={size}" for name, size in mesh)
    return f"mesh[{inside}] {{{','.join(repr(a) for a in sorted(axes, reverse=True))}}}"


@given(meshes_with_axes())
def test_every_notation_gives_the_groups_of_the_axes_and_the_axes_back(case):
    mesh, axes = case
    count = math.prod(size for _, size in mesh)
    expected = by_coordinates(mesh, axes)
    groups = groups_of_axes(mesh, axes)
    assert as_sets(groups) == expected
    texts = [lists(groups), iota(mesh, axes)] + ([named(mesh, axes)] if axes else [])
    for text in texts:
        parsed = parse_groups(text, count)
        assert as_sets(parsed) == expected, text
        alive = tuple(name for name, size in mesh if name in axes and size > 1)
        assert axes_of_groups(parsed, mesh) == alive


@given(meshes_with_axes(), st.randoms(use_true_random=False))
def test_shuffled_groups_run_over_the_same_axes(case, random):
    mesh, axes = case
    groups = [list(group) for group in groups_of_axes(mesh, axes)]
    random.shuffle(groups)
    for group in groups:
        random.shuffle(group)
    alive = tuple(name for name, size in mesh if name in axes and size > 1)
    assert axes_of_groups(tuple(map(tuple, groups)), mesh) == alive


@st.composite
def meshes_with_parts(draw):
    """A mesh and some of the factors of its axes as (axis, major to it, size), major to minor."""
    factors = draw(
        st.lists(st.lists(st.sampled_from([2, 3, 4]), max_size=3), min_size=1, max_size=3)
    )
    mesh = tuple((name, math.prod(own)) for name, own in zip("xyz", factors, strict=False))
    parts = [
        (name, math.prod(own[:k]), factor)
        for (name, _), own in zip(mesh, factors, strict=True)
        for k, factor in enumerate(own)
    ]
    chosen = [part for part in parts if draw(st.booleans())]
    return mesh, parts, chosen


@given(meshes_with_parts(), st.randoms(use_true_random=False))
def test_groups_over_parts_of_axes_are_recognised_and_priced_as_rung_1_prices_them(case, random):
    mesh, parts, chosen = case
    count = math.prod(size for _, size in mesh)
    # One dimension a factor: those that were not chosen in front, the groups' own behind.
    devices = np.arange(count).reshape([size for *_, size in parts])
    order = sorted(range(len(parts)), key=lambda i: parts[i] in chosen)
    size = math.prod(size for *_, size in chosen)
    groups = [list(group) for group in devices.transpose(order).reshape(-1, size).tolist()]
    first = groups[0]
    random.shuffle(groups)
    for group in groups:
        random.shuffle(group)
    found = axes_of_groups(tuple(map(tuple, groups)), mesh)
    assert bool(found) == (size > 1)
    assert sorted(places_of_axes(found, mesh)) == sorted(first)
    by_rung_1 = tuple(f'"{name}":({before}){n}' for name, before, n in chosen)
    assert sorted(places_of_axes(by_rung_1, mesh)) == sorted(first)
    for topology in (hardware.gpu(count, 1), hardware.gpu(1, count, host_shape=(count,))):
        network = Network(topology)
        assert network.spans(found, size, mesh) == network.spans(by_rung_1, size, mesh)


@pytest.mark.parametrize(
    ("text", "mesh", "axes"),
    [
        ("[32,2]<=[64]", (("x", 64),), ('"x":(32)2',)),
        ("[16,4]<=[64]", (("x", 64),), ('"x":(16)4',)),
        ("[32,2]<=[2,32]T(1,0)", (("x", 64),), ('"x":(1)2',)),
        ("[16,4]<=[2,16,2]T(1,0,2)", (("x", 64),), ('"x":(1)2', '"x":(32)2')),
        ("[8,8]<=[2,8,4]T(1,0,2)", (("x", 2), ("y", 32)), ("x", '"y":(8)4')),
        ("[2,32]<=[2,32]", (("x", 2), ("y", 32)), ("y",)),
        ("[12,2]<=[3,2,4]T(0,2,1)", (("x", 3), ("y", 8)), ('"y":(1)2',)),
        # Inside of two slices an axis is itself a part.
        ("[4,2]<=[8]", (('"x":(2)8', 8),), ('"x":(8)2',)),
        ("[1,8]<=[8]", (('"x":(2)8', 8),), ('"x":(2)8',)),
    ],
)
def test_parts_of_axes_are_named_as_shardy_names_them(text, mesh, axes):
    groups = parse_groups(text, math.prod(size for _, size in mesh))
    assert axes_of_groups(groups, mesh) == axes


@given(st.permutations(range(8)))
def test_device_ids_reorder_the_mesh(order):
    text = f"mesh['a'=2,'b'=4], device_ids=({','.join(map(str, order))}) {{'a'}}"
    expected = np.array(order).reshape(2, 4).T.tolist()
    assert parse_groups(text, 8) == tuple(map(tuple, expected))


# The texts XLA printed for one reshard with jax 0.10.2 (first) and 0.12.0 (second).
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            (
                "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2,'axis_3'=1], device_ids=([2,4]T(1,0)) "
                "{'axis_2'}"
            ),
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("mesh['z'=8] {'z':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['z'=8] {'z':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['z'=8] {'z':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['z'=8] {'z':(1)2,'z':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_known_texts(text, expected):
    assert as_sets(parse_groups(text, 8)) == as_sets(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{}}",
        "{{0,1},{2,3}",
        "{{0,1},{1,2}}",
        "{{0,8}}",
        "[4,3]<=[8]",
        "[2,2,2]<=[8]",
        "[4,2]<=[2,4]T(1,1)",
        "[8]<=[8]",
        "@mesh_0 {'a'}",
        "mesh['a'=2,'b'=4]",
        "mesh['a'=2,'b'=4] {}",
        "mesh['a'=2,'b'=4] {'c'}",
        "mesh['a'=8] {'a':(3)2}",
        "mesh['a'=8] {'a':(1)4,'a':(2)2}",
        "mesh['a'=4], device_ids=(0,1,2,2) {'a'}",
        "mesh['a'=16] {'a'}",
        "maximal_mesh[device_id=0] {}",
    ],
)
def test_what_is_not_understood_is_an_error_that_shows_it(text):
    with pytest.raises(HloError) as error:
        parse_groups(text, 8)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3)),  # half of axis b, not every device
        ((0, 3), (1, 2), (4, 7), (5, 6)),
        ((0, 1, 3), (4, 5, 7)),
        ((0, 5), (1, 4), (2, 7), (3, 6)),
        ((0, 1, 2, 3),),  # not every device
        ((0, 1, 2, 7), (4, 5, 6, 3)),
        ((0,), (1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_groups_that_are_no_product_of_axes_have_none(groups):
    assert axes_of_groups(groups, MESH) == ()


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,4},{4,0},{1,5},{5,1}}", ("a",)),
        ("{{0,1},{1,2},{2,3}}", ("b",)),
        ("{{0,5},{5,0}}", ("a", "b")),
        ("{}", ()),
    ],
)
def test_pairs_run_over_the_axes_they_cross(text, axes):
    assert axes_of_pairs(parse_pairs(text), MESH) == axes


def test_pairs_of_another_form_are_an_error():
    with pytest.raises(HloError, match="pairs"):
        parse_pairs("[8,2]<=[16]")


def test_an_unknown_axis_is_named():
    with pytest.raises(ValueError, match="'c'"):
        groups_of_axes(MESH, ["c"])
