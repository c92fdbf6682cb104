"""Collectives on links: exact costs on small tori and switches, and laws that hold on all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import HloError, TargetError
from autoshard.records.subaxes import groups_along, places_of_axes
from autoshard.target.network import Network, collective_s
from autoshard.target.topology import Topology
from tests.hardware import gpu, link, tpu

GIB = 1e9


def seconds(
    topology: Topology, kind: str, axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]
) -> float:
    """Of one gigabyte."""
    size = len(places_of_axes(axes, mesh)) if axes else 0
    return collective_s(kind, Network(topology).spans(axes, size, mesh), GIB)


def test_a_ring_is_fed_from_both_sides_and_a_line_from_one() -> None:
    ring = seconds(tpu(4, 1, 1), "all_gather", ("x",), (("x", 4),))
    assert ring == pytest.approx(0.75 / 2)
    line = seconds(tpu(2, 1, 1), "all_gather", ("x",), (("x", 2),))
    assert line == pytest.approx(0.5)


def test_each_dimension_of_a_torus_adds_its_links() -> None:
    mesh = (("x", 16),)
    assert seconds(tpu(4, 4, 1), "all_gather", ("x",), mesh) == pytest.approx(15 / 16 / 4)
    assert seconds(tpu(4, 4, 1), "reduce_scatter", ("x",), mesh) == pytest.approx(15 / 16 / 4)
    assert seconds(tpu(4, 4, 1), "all_reduce", ("x",), mesh) == pytest.approx(2 * 15 / 16 / 4)
    # The busiest cut: 4 rings, half of 16 GB crosses its 8 links, half of that each way.
    assert seconds(tpu(4, 4, 1), "all_to_all", ("x",), mesh) == pytest.approx(16 / 4 / (4 * 2))


def test_a_mesh_axis_gets_the_dimension_it_lies_on() -> None:
    mesh = (("x", 4), ("y", 4))
    for axis in "xy":
        one = seconds(tpu(4, 4, 1), "all_gather", (axis,), mesh)
        assert one == pytest.approx(0.75 / 2)
    both = seconds(tpu(4, 4, 1), "all_gather", ("x", "y"), mesh)
    assert both == pytest.approx(15 / 16 / 4)


def test_slices_are_joined_by_the_slow_network() -> None:
    topology, mesh = tpu(4, 4, 1, slices=2), (("x", 2), ("y", 16))
    inside = seconds(topology, "all_reduce", ("y",), mesh)
    across = seconds(topology, "all_reduce", ("x",), mesh)
    assert inside == pytest.approx(2 * 15 / 16 / 4)
    assert across == pytest.approx(2 * 0.5 / 0.01)
    # Over both, each of the 16 chips of a slice carries its part across.
    every = seconds(topology, "all_reduce", ("x", "y"), mesh)
    assert every == pytest.approx(2 * 0.5 / (0.01 * 16))


def test_hosts_are_joined_by_the_slow_network() -> None:
    topology = gpu(4, 8)
    assert seconds(topology, "all_gather", ("y",), (("x", 4), ("y", 8))) == pytest.approx(7 / 8)
    assert seconds(topology, "all_gather", ("x",), (("x", 4), ("y", 8))) == pytest.approx(7.5)
    whole = seconds(topology, "all_gather", ("x",), (("x", 32),))
    assert whole == pytest.approx(max(7 / 8, 0.75 / (0.1 * 8)))
    # Swapped, the axis of 8 runs over 4 hosts in pairs.
    swapped = seconds(topology, "all_gather", ("x",), (("x", 8), ("y", 4)))
    assert swapped == pytest.approx(max(0.5, 0.75 / (0.1 * 2)))


def test_a_domain_of_many_hosts_is_one_switch() -> None:
    topology = gpu(
        4,
        4,
        host_shape=(4,),
        links=(link("nvlink", "switch", 1e9, domain=8), link("network", "switch", 1e8)),
    )
    assert seconds(topology, "all_gather", ("y",), (("x", 2), ("y", 8))) == pytest.approx(7 / 8)


def test_a_domain_counts_the_devices_that_a_target_leaves_out() -> None:
    """36 trays of 4 are two racks of 72, also where 2 of each 4 are used."""
    racks = {
        "host_shape": (4,),
        "links": (link("nvlink", "switch", 1e9, domain=72), link("network", "switch", 1e8)),
    }
    for used in (1, 2, 4):
        topology, mesh = gpu(36, used, **racks), (("x", 2), ("y", 18 * used))
        inside = Network(topology).spans(("y",), 18 * used, mesh)
        across = Network(topology).spans(("x",), 2, mesh)
        assert [(s.ways, s.bandwidth) for s in inside] == [(18 * used, 1e9)]
        assert [(s.ways, s.bandwidth) for s in across] == [(2, 1e8)]
    (rack,) = Network(gpu(18, 4, **racks)).spans(("x",), 72, (("x", 72),))
    assert (rack.ways, rack.bandwidth) == (72, 1e9)


def test_a_group_that_crosses_racks_is_priced_also_where_the_first_does_not() -> None:
    """Racks of 72: the second 64 are 8 in one rack and 56 in the next, and so are most pairs."""
    racks = gpu(
        32,
        4,
        host_shape=(4,),
        links=(link("nvlink", "switch", 1e9, domain=72), link("network", "switch", 1e8)),
    )
    mesh = (("x", 2), ("y", 64))
    # The 56 of one rack send what they hold to the 8 of the other, who have 8 links.
    across = (56 / 64) / (8 * 0.1)
    assert seconds(racks, "all_gather", ("y",), mesh) == pytest.approx(across)
    assert seconds(racks, "all_gather", ("x",), mesh) == pytest.approx(0.5 / 0.1)


def test_a_group_that_crosses_hosts_is_priced_also_where_the_first_does_not() -> None:
    """Hosts of 6, groups of 4: the second group is 2 on one host and 2 on the next."""
    found = seconds(gpu(4, 6), "all_gather", ("y",), (("x", 6), ("y", 4)))
    assert found == pytest.approx(0.5 / (2 * 0.1))


def test_the_smallest_of_unequal_parts_has_the_fewest_links() -> None:
    """Two on one host, one on another: it receives what the two hold over its own link alone."""
    inside, across = Network(gpu(2, 8)).spans((), 3, (("x", 16),), (0, 1, 8))
    assert (inside.ways, inside.below, inside.bandwidth) == (2, 1, 1e9)
    assert (across.ways, across.below, across.bandwidth) == (3, 1, 1e8)
    assert across.steps == 1  # two hosts
    cost = collective_s("all_gather", (inside, across), GIB)
    assert cost == pytest.approx((2 / 3) / 0.1)


def test_a_domain_may_be_a_part_of_a_host() -> None:
    links = (link("nvlink", "switch", 1e9, domain=2), link("network", "switch", 1e8))
    network, mesh = Network(gpu(2, 8, links=links)), (("x", 2), ("y", 4), ("z", 2))
    (pair,) = network.spans(("z",), 2, mesh)
    (pairs,) = network.spans(("y",), 4, mesh)
    assert (pair.ways, pair.bandwidth) == (2, 1e9)
    assert (pairs.ways, pairs.bandwidth) == (4, 1e8)
    both = network.spans(("y", "z"), 8, mesh)
    assert [(s.ways, s.bandwidth) for s in both] == [(2, 1e9), (4, 1e8)]


def test_a_group_that_no_link_joins_is_not_free() -> None:
    links = (link("nvlink", "switch", 1e9, domain=8), link("network", "switch", 1e8, domain=32))
    network, mesh = Network(gpu(8, 8, links=links)), (("x", 2), ("y", 32))
    assert len(network.spans(("y",), 32, mesh)) == 2
    with pytest.raises(TargetError, match=r"no link of made-up:8x8 joins the devices .* \('x',\)"):
        network.spans(("x",), 2, mesh)


def test_slices_of_gpus_are_joined_by_the_outermost_level_alone() -> None:
    links = (*gpu(1, 8).chip.links, link("dcn", "switch", 1e7))
    topology = Topology(chip=gpu(1, 8, links=links).chip, shape=(2, 8), slices=2)
    mesh = (("x", 2), ("y", 2), ("z", 8))
    found = Network(topology).spans(("x", "y", "z"), 32, mesh)
    assert [(s.ways, s.bandwidth) for s in found] == [(8, 1e9), (2, 1e8), (2, 1e7)]


def test_cores_of_a_chip_share_its_links() -> None:
    links = (link("chip", "switch", 4e9, domain=2), link("ici", "torus", 1e9, wraps_at=4))
    topology = tpu(4, 1, 1, devices_per_chip=2, links=links, device_kind="made up")
    mesh = (("x", 4), ("y", 2))
    assert seconds(topology, "all_gather", ("y",), mesh) == pytest.approx(0.5 / 4)
    assert seconds(topology, "all_gather", ("x",), mesh) == pytest.approx(0.75 / (2 * 0.5))
    assert seconds(topology, "all_gather", ("x", "y"), mesh) == pytest.approx(0.75 / (2 * 0.5 * 2))


def test_groups_between_each_other_share_links() -> None:
    """On 8 chips in a row an axis of 2 at distance 4 shares its links with three others."""
    topology, mesh = tpu(8, 1, 1, device_kind="made up"), (("x", 2), ("y", 4))
    near = seconds(topology, "collective_permute", ("y",), mesh)
    far = seconds(topology, "collective_permute", ("x",), mesh)
    assert near == pytest.approx(1.0) and far == pytest.approx(4.0)


def test_parts_of_axes_are_places() -> None:
    mesh = (("x", 2), ("y", 8))
    assert places_of_axes(("y",), mesh) == tuple(range(8))
    assert places_of_axes(("x",), mesh) == (0, 8)
    assert places_of_axes(('"y":(1)2',), mesh) == (0, 4)
    assert places_of_axes(('"y":(2)4',), mesh) == (0, 1, 2, 3)
    assert places_of_axes(("x", '"y":(4)2'), mesh) == (0, 1, 8, 9)
    both, other = ('"x":(2)3', '"y":(2)2'), (("x", 6), ("y", 4))
    assert places_of_axes(both, other) == (0, 1, 4, 5, 8, 9)
    assert groups_along(both, other).tolist() == [
        [start + place for place in (0, 1, 4, 5, 8, 9)] for start in (0, 2, 12, 14)
    ]


def test_groups_that_are_no_product_of_axes_cost_what_their_members_do() -> None:
    network, mesh = Network(gpu(4, 8)), (("x", 32),)
    (inside,) = network.spans((), 4, mesh, (0, 2, 3, 7))
    (across,) = network.spans((), 4, mesh, (0, 9, 17, 31))
    assert (inside.ways, inside.bandwidth) == (4, 1e9)
    assert (across.ways, across.bandwidth) == (4, 1e8)


def test_groups_of_which_the_members_are_not_known_are_spread_out() -> None:
    spans = Network(gpu(4, 8)).spans((), 4, (("x", 32),))
    assert [s.ways for s in spans] == [4]  # one on each host


def test_a_part_of_an_axis_on_one_host_is_not_priced_across_hosts() -> None:
    mesh = (("x", 32),)
    inner = seconds(gpu(4, 8), "all_gather", ('"x":(16)2',), mesh)
    outer = seconds(gpu(4, 8), "all_gather", ('"x":(1)2',), mesh)
    assert inner == pytest.approx(0.5) and outer == pytest.approx(5.0)


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from([8, 16, 24]), st.data())
def test_no_group_costs_more_than_the_axes_it_is_one_of(
    hosts: int, each: int, domain: int, data: st.DataObject
) -> None:
    links = (link("nvlink", "switch", 1e9, domain=domain), link("network", "switch", 1e8))
    network, count = Network(gpu(hosts, each, links=links)), hosts * each
    inner = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    mesh = (("x", count // inner), ("y", inner))
    for axes in (("x",), ("y",), ("x", "y")):
        groups = groups_along(axes, mesh)
        assert sorted(groups.ravel().tolist()) == list(range(count))
        size = groups.shape[1]
        spans = network.spans(axes, size, mesh)
        assert bool(spans) == (size > 1)
        for kind in ("all_gather", "all_reduce", "all_to_all", "collective_permute"):
            cost = collective_s(kind, spans, 1e6)
            for group in groups.tolist():
                own = network.spans((), size, mesh, tuple(group))
                assert collective_s(kind, own, 1e6) <= cost * (1 + 1e-9)


shapes = st.sampled_from([(4, 4, 4), (2, 4, 1), (8, 4, 1), (2, 2, 2), (4, 4, 8)])


@given(shapes, st.data())
def test_every_group_of_a_torus_costs_something_and_more_for_more(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    topology = tpu(*shape)
    count = math.prod(shape)
    first = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    mesh = (("x", first), ("y", count // first))
    for axes in (("x",), ("y",), ("x", "y")):
        ways = len(places_of_axes(axes, mesh))
        spans = Network(topology).spans(axes, ways, mesh)
        assert math.prod(s.ways for s in spans) == ways
        for kind in ("all_gather", "all_reduce", "all_to_all", "collective_permute"):
            cost = collective_s(kind, spans, 1e6)
            assert math.isfinite(cost) and (cost > 0) == (ways > 1)
            assert collective_s(kind, spans, 2e6) >= cost


def test_an_unknown_kind_is_an_error_on_every_network() -> None:
    spans = Network(gpu(2, 4)).spans(("x",), 8, (("x", 8),))
    for levels in (spans, ()):
        with pytest.raises(HloError, match="'all_scatter', expected one of"):
            collective_s("all_scatter", levels, GIB)
