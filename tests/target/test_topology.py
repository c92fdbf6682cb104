import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from autoshard.errors import TargetError
from autoshard.records.positions import Position
from autoshard.target.catalogue import catalogue
from autoshard.target.topology import MAX_DEVICES, at_least, parse_topology
from tests import hardware

CHIPS = catalogue()
DCN = CHIPS["v5p"].link("dcn")
TWO_CLUSTERS = {
    "clusters": dataclasses.replace(
        CHIPS["h100"], name="clusters", links=(*CHIPS["h100"].links, DCN)
    )
}


SHAPES_2D = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"


def parse(name):
    return parse_topology(name, CHIPS)


@pytest.mark.parametrize(
    "name, shape, slices, devices",
    [
        ("v5p:4x4x4", (4, 4, 4), 1, 64),
        ("v5p:4x4x4*2", (4, 4, 4), 2, 128),
        ("v5e:16x16", (16, 16), 1, 256),
        ("v6e:8x8*2", (8, 8), 2, 128),
        ("tpu7x:2x2x1", (2, 2, 1), 1, 8),
        ("v4:12x12x24", (12, 12, 24), 1, 3456),
        ("v5e:1x1", (1, 1), 1, 1),
        ("a100-80:4x8", (4, 8), 1, 32),
        ("gb200:18x4", (18, 4), 1, 72),
        ("h100:1x1", (1, 1), 1, 1),
        ("h100:3x5", (3, 5), 1, 15),
    ],
)
def test_names_are_read(name, shape, slices, devices):
    topology = parse(name)
    assert (topology.shape, topology.slices, topology.device_count) == (shape, slices, devices)
    assert topology.name == name and len(topology.positions) == devices


def test_every_slice_that_is_listed_can_be_named():
    for chip in ("v5e", "v6e"):
        for shape in SHAPES_2D.split(", "):
            assert parse(f"{chip}:{shape}").name == f"{chip}:{shape}"
    for name in ("v5p:16x16x24", "v5p:2x2x1", "v4:16x16x16", "v4:4x16x16", "tpu7x:16x24x24"):
        assert parse(name).name == name


def test_a_chip_of_ones_own_has_the_slices_that_its_own_figures_allow(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        '[chip.larger]\ninherits = "v5e"\nmax_shape = [32, 32]\n'
        '[chip.longer]\ninherits = "v5p"\nmax_extent = 64\n'
        '[chip.same]\ninherits = "v6e"\nmemory_bandwidth = 2e12\n'
        '[chip.few]\ninherits = "v6e"\nshapes = [[3, 5]]\n'
    )
    chips = catalogue(path)
    for name in ("larger:32x8", "larger:1x1", "larger:2x16", "longer:4x4x64", "few:3x5"):
        assert parse_topology(name, chips).name == name
    for name, message in (
        ("larger:64x2", "a part of the largest slice, 32x32"),
        ("longer:4x4x68", "up to 64"),
        ("same:2x8", SHAPES_2D),
        ("few:2x2", "expected one of 3x5; e.g. 'few:3x5'"),
    ):
        with pytest.raises(TargetError, match=message):
            parse_topology(name, chips)


def test_names_are_canonical():
    assert parse(" v5p:04x4x4*1 ").name == "v5p:4x4x4"
    assert parse("v5p:4x4x4*1") == parse("v5p:4x4x4")
    assert hash(parse("v5p:4x4x4")) == hash(parse("v5p:4x4x4"))


@pytest.mark.parametrize(
    "name, count, larger",
    [
        ("v5p:4x4x4", 64, "v5p:4x4x4"),
        ("v5p:4x4x4", 65, "v5p:4x4x8"),
        ("v5p:4x4x4", 256, "v5p:4x8x8"),
        ("v5p:4x4x4*2", 129, "v5p:4x4x8*2"),
        ("v5p:2x2x1", 9, "v5p:2x2x4"),
        ("v5e:1x1", 2, "v5e:2x2"),
        ("v5e:4x4", 17, "v5e:4x8"),
        ("v5e:2x4", 16, "v5e:4x4"),
        ("v5e:16x16", 257, "v5e:16x16*2"),
        ("h100:1x4", 5, "h100:1x8"),
        ("h100:8x8", 65, "h100:9x8"),
        ("h100:8x8", MAX_DEVICES + 1, None),
    ],
)
def test_the_next_larger_target_is_one_that_there_is(name, count, larger):
    found = at_least(parse(name), count)
    assert (found.name if found else None) == larger
    assert found is None or parse(found.name) == found


@pytest.mark.parametrize(
    "name, message",
    [
        ("", r"expected 'chip:shape'.*autoshard\.targets"),
        ("v5p", "got no readable shape, expected e.g. 'v5p:2x2x1'"),
        ("v5p:", "got no readable shape"),
        ("v5p:4x4x4*", "got no readable shape"),
        ("v5p:4x4x4*2*2", "got no readable shape"),
        ("v5p:4 x4x4", "got no readable shape"),
        ("v5b:4x4", "got unknown chip 'v5b'; did you mean 'v5(e|p)' or 'v5(e|p)'"),
        ("H100:4x8", "unknown chip 'H100'; did you mean 'h100'"),
        ("a100:4x8", "unknown chip 'a100'; did you mean .*'a100-80'"),
        ("mi300:4x8", r"unknown chip 'mi300';.*Known are v4, .*docs/targets\.md"),
        ("v5p:4x4", "got 2 extents, expected 3 for v5p: chips along each dimension"),
        ("v5e:4x4x4", "got 3 extents, expected 2 for v5e"),
        ("h100:64", "got 1 extents, expected 2 for h100: hosts x devices of a host"),
        ("v5p:4x4x", "got '', expected a whole number"),
        ("v5p:4x4x-4", "got '-4', expected a whole number"),
        ("v5p:4x4x4.0", "got '4.0', expected a whole number"),
        ("v5p:4xax4", "got 'a', expected a whole number"),
        ("v5p:4X4X4", "got '4X4X4', expected a whole number"),
        ("v5p:4x0x4", "got 0, expected a number of at least 1"),
        ("v5p:4x4x4*0", "got 0, expected a number of at least 1"),
        ("v5p:4x4x4*two", "got 'two', expected a whole number"),
        ("v5p:4x4x" + "9" * 5000, "got a target name of 5008 characters, 'v5p:4x4x99"),
        ("v5p:4x4x" + "9" * 50, "chips, expected whole cubes"),
        ("h100:4x8*" + "9" * 50, "slices, expected none"),
        ("h100:" + "9" * 50 + "x8", f"devices, expected at most {MAX_DEVICES}"),
        (
            "v5p:3x4x4",
            "got a slice of 3x4x4 chips, expected multiples of a host's 2x2x1",
        ),
        ("v5p:2x1x1", "expected multiples of a host's 2x2x1"),
        ("v5p:1x1x1", "got a slice of 1x1x1 chips, expected multiples of a host's 2x2x1"),
        ("v5p:4x4x384", "got an extent of 384, expected multiples of 4 up to 24"),
        ("v4:4x8x28", "got an extent of 28, expected multiples of 4 up to 24"),
        ("tpu7x:4x4x28", "got an extent of 28, expected multiples of 4 up to 24"),
        ("v5p:6x4x4", "got a slice of 6x4x4 chips, expected whole cubes, .*multiples of 4"),
        ("v5p:2x2x3", "got a slice of 2x2x3 chips, expected whole cubes"),
        ("v5p:2x8x8", "got a slice of 2x8x8 chips, expected whole cubes"),
        ("v5p:16x16x28", r"got a slice of 7168 chips, expected at most 6144 \(16x16x24\)"),
        *(
            (f"{chip}:{shape}", f"got a slice of {shape} chips, expected one of {SHAPES_2D}")
            for chip in ("v5e", "v6e")
            for shape in ("2x8", "2x16", "4x16", "16x2", "16x8", "32x16", "6x8", "1x2")
        ),
        ("h100:4x9", "got 9 devices a host, expected at most 8 of h100"),
        ("gb200:2x8", "got 8 devices a host, expected at most 4 of gb200"),
        ("h100:4x8*2", "got 2 slices, expected none: h100 has no link of level 'dcn'"),
        ("h100:8193x8", f"got 65544 devices, expected at most {MAX_DEVICES}"),
        ("v5p:4x4x4*100000", f"got 6400000 devices, expected at most {MAX_DEVICES}"),
    ],
)
def test_what_no_target_is_named_is_refused(name, message):
    with pytest.raises(TargetError, match=message) as caught:
        parse(name)
    assert len(str(caught.value)) < 600
    if not any(word in message for word in ("unknown", "chip:shape", "target name")):
        assert f"{name.partition(':')[0]}:" in str(caught.value).rpartition("e.g.")[2], "an example"


def test_devices_that_no_link_joins_are_refused(tmp_path):
    """A network of 32 joins 4 hosts of 8, and nothing joins one such network and the next."""
    own = '[chip.ours]\ninherits = "h100"\n[chip.ours.links.network]\ndomain = 32\n'
    (tmp_path / "ours.toml").write_text(own)
    ours = catalogue(tmp_path / "ours.toml")
    assert parse_topology("ours:4x8", ours).device_count == 32
    with pytest.raises(TargetError) as caught:
        parse_topology("ours:8x8", ours)
    assert str(caught.value) == (
        "target 'ours:8x8': got 64 devices in 2 parts that no link joins (the domain of 'network',"
        " the outermost, is 32), expected links between all of them: name fewer hosts, or correct"
        " links.network.domain of chip 'ours' in the catalogue file, or add a link of level 'dcn';"
        " e.g. 'ours:1x8', 'ours:4x8'"
    )
    assert at_least(parse_topology("ours:4x8", ours), 40) is None
    joined = dataclasses.replace(ours["ours"], links=(*ours["ours"].links, DCN))
    assert parse_topology("ours:8x8", {"ours": joined}).device_count == 64
    # Of half the hosts' devices as many hosts are joined.
    with pytest.raises(TargetError, match="got 20 devices in 2 parts"):
        parse_topology("ours:5x4", ours)


@pytest.mark.parametrize(
    "name, wraps",
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:4x8x12", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),  # not a whole cube: no optical switch
        ("v5p:2x2x1", (False, False, False)),
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v5e:8x8", (False, False)),
        ("h100:4x8", ()),
    ],
)
def test_whole_dimensions_wrap_around(name, wraps):
    assert parse(name).wraps == wraps


def test_devices_stand_by_host_and_then_by_chip_with_the_first_dimension_fastest():
    positions = parse("v5p:4x2x2").positions
    assert [p.coords for p in positions[:4]] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [p.host for p in positions] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert positions[4].coords == (2, 0, 0) and positions[8].coords == (0, 0, 1)


def test_cores_of_a_chip_stand_together_and_slices_apart():
    positions = parse("tpu7x:2x2x1*2").positions
    assert [p.core for p in positions] == [0, 1] * 8
    assert positions[0].coords == positions[1].coords != positions[2].coords
    assert [(p.slice, p.host) for p in positions] == [(0, 0)] * 8 + [(1, 1)] * 8


def test_gpus_stand_by_host():
    expected = [
        Position(slice=0, host=h, coords=(h, d), core=0) for h in range(2) for d in range(3)
    ]
    assert list(parse("h100:2x3").positions) == expected
    two = parse_topology("clusters:2x1*2", TWO_CLUSTERS)
    assert [(p.slice, p.host, p.coords) for p in two.positions] == [
        (0, 0, (0, 0)),
        (0, 1, (1, 0)),
        (1, 2, (0, 0)),
        (1, 3, (1, 0)),
    ]


@hypothesis.given(
    st.sampled_from(["v4", "v5p", "tpu7x"]),
    st.sampled_from([(2, 2, 1), (2, 2, 4), (2, 4, 4), (4, 4, 2), (4, 8, 4), (8, 4, 4)]),
    st.integers(1, 3),
)
def test_every_place_is_taken_once(chip, shape, slices):
    topology = parse(f"{chip}:{'x'.join(map(str, shape))}*{slices}")
    places = {(p.slice, p.coords, p.core) for p in topology.positions}
    cores = range(topology.chip.devices_per_chip)
    chips = itertools.product(*map(range, shape))
    assert places == set(itertools.product(range(slices), chips, cores))
    assert len(topology.positions) == len(places) == topology.device_count
    hosts = [p.host for p in topology.positions]
    assert hosts == sorted(hosts)
    per_host = math.prod(topology.host_shape) * len(cores)
    assert len(set(hosts)) * per_host == topology.device_count


def test_compilers_are_told_what_they_would_otherwise_take_amiss():
    tpu = parse("v4:4x4x4*2")
    assert tpu.compiler_name == "v4:4x4x4"
    assert tpu.compiler_options == {
        "chips_per_host_bounds": (2, 2, 1),
        "wrap": (True, True, True),
        "chip_config_name": "megacore",
        "num_slices": 2,
    }
    one = parse("v5e:1x1").compiler_options
    assert one == {"chips_per_host_bounds": (1, 1, 1), "wrap": (False, False, False)}
    gpu = parse("h100:4x8")
    assert gpu.compiler_name == "1x4x8"
    assert gpu.compiler_options == {
        "topology": "1x4x8",
        "target_config": CHIPS["h100"].target_config,
    }


def test_the_compiler_hears_its_own_name_of_a_chip_that_inherits(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        '[chip.ours]\ninherits = "v5p"\n[chip.slow]\ninherits = "ours"\n'
        "[chip.v5e]\nmemory_bandwidth = 1e12\n"
    )
    chips = catalogue(path)
    for name, known in (
        ("ours:4x4x4", "v5p:4x4x4"),
        ("slow:2x2x1", "v5p:2x2x1"),
        ("v5e:2x2", "v5e:2x2"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1"),
    ):
        topology = parse_topology(name, chips)
        assert (topology.name, topology.compiler_name) == (name, known)


# The compilers load into a process of their own: libtpu may not be loaded where CPU devices run.
ASK = """
import json, os, sys
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

task = json.load(sys.stdin)
answers = []
for platform, name, options in task["topologies"]:
    found = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    devices = found.devices
    memory = ""
    if task["compile"]:
        mesh = Mesh(np.array(devices).reshape(-1), ("x",))
        rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
        product = jax.jit(lambda a, b: a @ b, in_shardings=(rows, whole), out_shardings=whole)
        a = jax.ShapeDtypeStruct((512, 256), jax.numpy.bfloat16)
        b = jax.ShapeDtypeStruct((256, 128), jax.numpy.bfloat16)
        assert "dot" in product.lower(a, b).compile().as_text()
        large = jax.ShapeDtypeStruct((2**20, 2**18), jax.numpy.float32)
        copy = jax.jit(lambda a: a + 1, in_shardings=whole, out_shardings=whole)
        try:
            copy.lower(large).compile()
        except jax.errors.JaxRuntimeError as error:
            memory = str(error)
    places = [
        (
            getattr(d, "slice_index", None) or 0,
            d.process_index,
            tuple(getattr(d, "coords", ())),
            getattr(d, "core_on_chip", 0),
        )
        for d in devices
    ]
    answers.append({"kind": devices[0].device_kind, "places": places, "memory": memory})
print("ANSWER" + json.dumps(answers))
"""


def ask(*topologies, compile=False):
    """What the compilers say of topologies; skips where one is not installed."""
    for platform in {t.chip.platform for t in topologies}:
        hardware.needs(platform)
    task = [(t.chip.platform, t.compiler_name, t.compiler_options) for t in topologies]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps({"topologies": task, "compile": compile}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


TPUS = (
    *("v4:2x2x2", "v4:4x4x4", "v5e:1x1", "v5e:2x2", "v5e:4x4*2", "v5e:16x16", "v5p:2x2x1"),
    *("v5p:4x4x4", "v5p:2x4x4*2", "v6e:4x8", "tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:4x4x4*2"),
)


@pytest.mark.deviceless
def test_libtpu_lists_the_devices_in_this_order():
    topologies = [parse(name) for name in TPUS]
    for topology, answer in zip(topologies, ask(*topologies), strict=True):
        assert answer["kind"] == topology.chip.device_kind, topology.name
        places = [
            [p.slice, p.host, [*p.coords, *[0] * (3 - len(p.coords))], p.core]
            for p in topology.positions
        ]
        assert answer["places"] == places, topology.name


@pytest.mark.deviceless
def test_libtpu_compiles_for_every_chip_and_tells_the_usable_memory():
    topologies = [parse(f"{c.name}:2x2{'x1' * (c.dims - 2)}") for c in CHIPS.values() if c.dims > 2]
    topologies += [parse(f"{name}:2x2") for name in ("v5e", "v6e")]
    for topology, answer in zip(topologies, ask(*topologies, compile=True), strict=True):
        found = re.search(r"exceeds available HBM \(([0-9.]+)G\)", answer["memory"])
        assert found, answer["memory"]
        # Releases differ in the last digit; the catalogue has the smaller.
        usable = topology.chip.usable_bytes.value / 2**30
        assert -0.001 < float(found[1]) - usable < 0.05, topology.name


@pytest.mark.deviceless
def test_the_cuda_plugin_compiles_for_every_chip_and_lists_the_devices_in_this_order():
    topologies = [parse(f"{c.name}:2x4") for c in CHIPS.values() if c.platform == "cuda"]
    topologies.append(parse_topology("clusters:2x4*2", TWO_CLUSTERS))
    for topology, answer in zip(topologies, ask(*topologies, compile=True), strict=True):
        assert answer["kind"] == topology.chip.device_kind, topology.name
        # Of a GPU the compiler says the host alone: it takes slices for more hosts.
        hosts = [host for _, host, _, _ in answer["places"]]
        assert hosts == [p.host for p in topology.positions], topology.name
