"""Programs of several TPU slices, on a real text: FSDP of a small MLP on v5e:2x4*2."""

import dataclasses
import gzip
import pathlib

import pytest

from autoshard.rungs.compile.hlo import HloError, count, parse
from autoshard.rungs.compile.hlo.slices import mesh_of_slice
from autoshard.rungs.compile.hlo.timeline import timeline

TEXT = gzip.decompress((pathlib.Path(__file__).parent / "slices.txt.gz").read_bytes()).decode()


def sent(mesh: tuple[tuple[str, int], ...], text: str = TEXT) -> set[tuple[str, int, tuple, int]]:
    found = count(parse(text), mesh).collectives
    return {(c.kind, c.group_size, c.mesh_axes, c.bytes) for c in found}


def test_what_crosses_slices_is_a_collective_over_the_outer_part_of_an_axis() -> None:
    found = sent((("x", 16),))
    assert ("all_gather", 2, ('"x":(1)2',), 64 * 16 * 4) in found
    assert ("all_reduce", 2, ('"x":(1)2',), 2 * 8 * 128 * 4) in found
    assert ("all_to_all", 16, ("x",), 16 * 4 * 8) in found
    inside = {c for c in found if c[2] == ('"x":(2)8',)}
    assert {size for _, size, _, _ in inside} == {8}
    assert len(inside) + 4 == len(found)


def test_a_whole_axis_across_slices_keeps_its_name() -> None:
    assert mesh_of_slice(parse(TEXT), (("x", 2), ("y", 8))) == ((("y", 8),), ("x",))
    axes = {axes for _, _, axes, _ in sent((("x", 2), ("y", 8)))}
    assert axes == {("x",), ("y",), ("x", "y")}


def test_members_inside_of_a_slice_are_places_of_the_whole_mesh() -> None:
    text = TEXT.replace("replica_groups={{0,1,2,3,4,5,6,7}}", "replica_groups={{0,1,2,4}}")
    text = text.replace("{0:7}", "{0:5}")
    module = dataclasses.replace(parse(text), partition_count=6, device_count=6)
    # Four slices take 2 of x and 2 of y: a slice has 3 x 2 of the 6 x 4 places.
    found = count(module, (("x", 6), ("y", 4)))
    assert {c.members for c in found.collectives if c.members} == {(0, 1, 4, 8)}


def test_kernels_wait_for_what_other_slices_send() -> None:
    class Prices:
        def kernel_s(self, work) -> float:
            return 0.0

        def collective_s(self, one) -> float:
            return float(one.group_size == 2)

    line = timeline(parse(TEXT), (("x", 16),), Prices())
    assert line.communication_s == line.exposed_s == 5.0


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with 8 devices; got .* with 12"):
        count(parse(TEXT), (("x", 12),))


def test_an_unknown_kind_of_transfer_is_an_error() -> None:
    with pytest.raises(HloError, match="of type ALL_GOSSIP, expected one of ALL_GATHER"):
        sent((("x", 16),), TEXT.replace('"ALL_TO_ALL"', '"ALL_GOSSIP"'))
