import dataclasses
import math
import pickle

import pytest

from autoshard.errors import TargetError
from autoshard.target.catalogue import LEVELS, CatalogueError, catalogue
from autoshard.target.catalogue.listing import figures

CHIPS = catalogue()
every_chip = pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))

FIGURE = '{ value = 1.0, source = "a", date = "2026" }'
WHOLE = """
[chip.mine]
platform = "tpu"
device_kind = "My TPU"
libtpu_name = "v5e"
devices_per_chip = 1
host_shape = [2, 2]
flops = { bf16 = 1e14, f32 = 5e13 }
element_flops = 1e12
memory_bytes = 16e9
usable_bytes = 15e9
memory_bandwidth = 1e12
clock_hz = 1e9
launch_s = 0
[chip.mine.links.ici]
kind = "torus"
bandwidth = 5e10
latency = 1e-6
"""


@pytest.fixture
def read(tmp_path):
    """Reads a text as a user's file."""

    def read_text(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return catalogue(path)

    return read_text


def test_the_catalogue_has_the_chips_that_targets_name():
    tpus, gpus = ("v4", "v5e", "v5p", "v6e", "tpu7x"), ("a100-40", "a100-80", "h100", "h200")
    assert tuple(CHIPS) == (*tpus, *gpus, "b200", "gb200")
    assert all(chip.name == name for name, chip in CHIPS.items())


@every_chip
def test_every_figure_has_a_value_a_source_and_a_date(chip):
    for field, figure in figures(chip):
        assert math.isfinite(figure.value) and figure.value > 0, field
        assert len(figure.source) > 20 and figure.date.startswith("20"), field


@every_chip
def test_figures_are_of_the_size_that_such_hardware_has(chip):
    # A slip of three digits in a file of 200 numbers would otherwise go unseen.
    assert 1e14 < chip.flops["bf16"].value < 5e15
    assert chip.flops["bf16"].value >= chip.flops["f32"].value
    assert 3e12 < chip.element_flops.value < chip.flops["f32"].value
    assert 15 * 2**30 < chip.usable_bytes.value <= chip.memory_bytes.value < 200 * 2**30
    assert 8e11 < chip.memory_bandwidth.value < 1e13
    assert 1e-7 < chip.launch_s.value < 1e-5
    assert 70 < chip.flops["bf16"].value / chip.memory_bandwidth.value < 600
    if chip.clock_hz is not None:
        assert 9e8 < chip.clock_hz.value < 3e9


@every_chip
def test_links_go_from_fast_and_near_to_slow_and_far(chip):
    levels = [LEVELS.index(link.level) for link in chip.links]
    assert levels == sorted(levels)
    bandwidths = [link.bandwidth.value for link in chip.links]
    assert bandwidths == sorted(bandwidths, reverse=True)
    latencies = [link.latency.value for link in chip.links]
    assert latencies == sorted(latencies)
    assert all(link.domain is None for link in chip.links[-1:]), "the last level joins all"


@every_chip
def test_chips_are_records_that_can_be_sent_and_keyed(chip):
    assert pickle.loads(pickle.dumps(chip)) == chip
    assert chip in {chip}
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.name = "other"


def test_the_digest_is_of_the_values_alone():
    digests = {chip.digest for chip in CHIPS.values()}
    assert len(digests) == len(CHIPS)
    h100 = CHIPS["h100"]
    figure = dataclasses.replace(h100.memory_bandwidth, source="elsewhere", date="2020")
    same = dataclasses.replace(h100, name="other", memory_bandwidth=figure)
    assert same.digest == h100.digest
    figure = dataclasses.replace(figure, value=figure.value * 2)
    assert dataclasses.replace(h100, memory_bandwidth=figure).digest != h100.digest
    link = dataclasses.replace(h100.links[0], domain=4)
    assert dataclasses.replace(h100, links=(link, *h100.links[1:])).digest != h100.digest


def test_a_file_adds_a_whole_chip(read):
    chips = read(WHOLE)
    mine = chips["mine"]
    assert list(chips) == [*CHIPS, "mine"]
    assert mine.dims == 2 and mine.max_shape == () and mine.launch_s.value == 0
    assert mine.element_flops.unit == "FLOP/s" and "mine.toml" in mine.element_flops.source
    assert mine.links[0].wraps_at is None and not mine.links[0].cubes
    assert {**chips, "mine": None} == {**CHIPS, "mine": None}, "the others are as they were"


def test_a_file_inherits_and_corrects_one_figure(read):
    mine = read(
        '[chip.mine]\ninherits = "h100"\n'
        '[chip.mine.flops]\nbf16 = { value = 7e14, source = "measured", date = "2026-11" }\n'
    )["mine"]
    h100 = CHIPS["h100"]
    assert mine.flops["bf16"].value == 7e14 and mine.flops["bf16"].source == "measured"
    expected = dataclasses.replace(
        h100, name="mine", flops={**h100.flops, "bf16": mine.flops["bf16"]}
    )
    assert mine == expected


def test_a_file_corrects_one_figure_of_one_link_in_place(read):
    h100 = read("[chip.h100.links.network]\nbandwidth = 12.5e9\n")["h100"]
    before = CHIPS["h100"]
    assert h100.link("network").bandwidth.value == 12.5e9
    assert h100.link("network").latency == before.link("network").latency
    assert h100.link("nvlink") == before.link("nvlink")
    assert h100.flops == before.flops and h100.digest != before.digest


def test_a_new_value_never_keeps_the_old_source(read):
    with pytest.raises(CatalogueError, match=r"memory_bandwidth\.source: got nothing"):
        read("[chip.h100.memory_bandwidth]\nvalue = 3e12\n")


def test_chains_of_inheritance_end_somewhere(read):
    chips = read('[chip.c]\ninherits = "b"\n[chip.b]\ninherits = "v5p"\nlaunch_s = 1e-6\n')
    assert chips["c"].launch_s.value == 1e-6 and chips["c"].flops == CHIPS["v5p"].flops
    assert read('[chip.h100]\ninherits = "h100"\nlaunch_s = 0\n')["h100"].launch_s.value == 0
    with pytest.raises(CatalogueError, match="a -> b -> a"):
        read('[chip.a]\ninherits = "b"\n[chip.b]\ninherits = "a"\n')
    with pytest.raises(CatalogueError, match="new -> new"):
        read('[chip.new]\ninherits = "new"\n')
    with pytest.raises(CatalogueError, match=r"inherits: got 'h1000', expected a chip: h100\? "):
        read('[chip.mine]\ninherits = "h1000"\n')


def test_the_words_for_no_limit_take_a_limit_away(read):
    chips = read(
        '[chip.v5e.links.ici]\nwraps_at = "never"\n[chip.h100.links.nvlink]\ndomain = "all"\n'
    )
    assert chips["v5e"].link("ici").wraps_at is None
    assert chips["h100"].link("nvlink").domain is None


MISSING = [line.split(" = ")[0] for line in WHOLE.splitlines() if " = " in line]


@pytest.mark.parametrize("field", MISSING)
def test_a_missing_figure_is_named(read, field):
    lines = [line for line in WHOLE.splitlines() if not line.startswith(f"{field} =")]
    assert len(lines) < len(WHOLE.splitlines())
    with pytest.raises(CatalogueError, match=rf"mine\.toml: chip 'mine': .*{field}: got nothing"):
        read("\n".join(lines))


@pytest.mark.parametrize(
    "line, wrong, message",
    [
        (
            "memory_bandwidth",
            "-1.0",
            r"memory_bandwidth: got -1\.0, expected .*above zero, in byte",
        ),
        ("memory_bandwidth", "0", "memory_bandwidth: got 0, expected .*above zero"),
        ("memory_bandwidth", "inf", "memory_bandwidth: got inf, expected a finite number"),
        ("memory_bandwidth", "nan", "memory_bandwidth: got nan, expected a finite number"),
        ("memory_bandwidth", "true", "memory_bandwidth: got True, expected a finite number"),
        ("memory_bandwidth", '"1e12"', "memory_bandwidth: got '1e12', expected a finite number"),
        ("memory_bandwidth", "[1.0]", r"memory_bandwidth: got \[1.0\], expected a finite number"),
        ("launch_s", "-1e-9", "launch_s: got -1e-09, expected .*at least zero, in s"),
        ("latency", "-1", r"links\.ici\.latency: got -1, expected .*at least zero, in s"),
        ("latency", FIGURE.replace("1.0", "-2"), r"links\.ici\.latency\.value: got -2"),
        ("bandwidth", "0", r"links\.ici\.bandwidth: got 0, expected .*above zero, in bytes/s"),
        ("flops", "{ bf16 = 1e14 }", r"flops\.f32: got nothing"),
        ("flops", "{ bf16 = 1, f32 = 1, bf61 = 1 }", r"flops\.bf61: got an unknown.*bf16\? "),
        ("flops", "1e14", r"flops: got 1\d+\.0, expected a table"),
        ("element_flops", FIGURE.replace("date", "dat"), r"dat: got an unknown field.*date\? "),
        ("element_flops", FIGURE.replace('"2026"', "2026"), r"date: got 2026, expected a text"),
        ("element_flops", FIGURE.replace('"2026"', '"May"'), r"date: got 'May', expected 'YYYY'"),
        ("element_flops", FIGURE.replace('"a"', '" "'), r"source: got ' ', expected a text"),
        ("element_flops", FIGURE.replace("so", 'unit = "GHz", so'), "unit: got 'GHz'.*'FLOP/s'"),
        ("usable_bytes", "17e9", r"usable_bytes: got 1\.7e\+10, expected at most memory_bytes"),
        ("platform", '"gpu"', "platform: got 'gpu', expected 'tpu' or 'cuda'"),
        ("platform", '"cuda"', "clock_hz: got a figure, expected none"),
        ("device_kind", "7", "device_kind: got 7, expected a text"),
        ("devices_per_chip", "0", "devices_per_chip: got 0, expected a whole number"),
        ("devices_per_chip", "2", "links: got ici, expected a link of level 'chip'"),
        ("libtpu_name", '""', "libtpu_name: got '', expected a text"),
        ("host_shape", "[2]", r"host_shape: got \[2\], expected a list of 2 or 3"),
        ("host_shape", "[2, 2.0]", r"host_shape: got 2\.0, expected a whole number"),
        ("host_shape", "[2, 2]\nshapes = 3", r"shapes: got 3, expected a list of shapes"),
        ("host_shape", "[2, 2]\nshapes = [[1]]", r"shapes: got \[1\], expected a list of 2"),
        ("host_shape", "[2, 2]\nshapes = { value = [] }", r"shapes\.source: got nothing"),
        (
            "host_shape",
            '[2, 2]\nshapes = { value = [], source = "x", date = "2026" }',
            r"shapes\.value: got \[\], expected at least one shape",
        ),
        ("host_shape", "[2, 2]\nmax_extent = 0", "max_extent: got 0, expected a whole number"),
        ("kind", '"ring"', r"links\.ici\.kind: got 'ring', expected 'torus' or 'switch'"),
        ("kind", '"torus"\ndomain = 8', r"links\.ici\.domain: got 8, expected nothing"),
        ("kind", '"switch"\nwraps_at = 4', r"links\.ici\.wraps_at: got 4, expected nothing"),
        ("kind", '"torus"\nwraps_at = "no"', r"wraps_at: got 'no', expected .*or 'never'"),
        ("kind", '"torus"\nwraps_at = 0', "wraps_at: got 0, expected a whole number"),
        ("kind", '"torus"\ncubes = 1', "cubes: got 1, expected true or false"),
    ],
)
def test_a_wrong_figure_is_named_with_file_and_chip(read, line, wrong, message):
    lines = WHOLE.splitlines()
    at = next(i for i, text in enumerate(lines) if text.startswith(f"{line} ="))
    lines[at] = f"{line} = {wrong}"
    with pytest.raises(CatalogueError, match=r"mine\.toml: chip 'mine': .*" + message):
        read("\n".join(lines))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "got no chip"),
        ("chip = 3", "got no chip"),
        ("[chip.mine", "not a TOML file"),
        ("[chips.mine]\n", "got 'chips', expected tables"),
        ("chip.mine = 3", "chip 'mine': got 3, expected a table"),
        ('[chip."My TPU"]\n', "expected a name of lower-case"),
        (
            "[chip.mine]\nmemory = 3\n",
            "memory: got an unknown field, expected one of: memory_bytes",
        ),
        ("[chip.v5p.links.isi]\n", r"links\.isi: got an unknown field, expected one of: ici\? "),
        ("[chip.v5p.links.ici]\nspeed = 1\n", r"links\.ici\.speed: got an unknown field"),
        ("[chip.h100]\nclock_hz = 1e9\n", "clock_hz: got a figure, expected none"),
        (
            "[chip.tpu7x.links.chip]\ndomain = 4\n",
            r"chip\.domain: got 4, expected devices_per_chip 2",
        ),
        ('[chip.h100]\nlibtpu_name = "v5e"\n', "libtpu_name: got a text, expected none"),
        (
            WHOLE.replace('libtpu_name = "v5e"\n', ""),
            "libtpu_name: got nothing, expected what libtpu calls the chip, such as 'v5p'",
        ),
        ('[chip.v5p]\ntarget_config = "x"\n', "target_config: got a text, expected none"),
    ],
)
def test_a_file_that_is_no_catalogue_is_refused(read, text, message):
    with pytest.raises(CatalogueError, match=message):
        read(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CatalogueError, match=r"cannot read the catalogue file .*nowhere\.toml"):
        catalogue(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TargetError, match="not a TOML file"):
        catalogue(tmp_path / "binary.toml")


@pytest.mark.parametrize("domain", [1, 2, 4, 8, 16, 72])
def test_a_domain_of_whole_hosts_or_of_equal_parts_of_one_is_taken(read, domain):
    own = f'[chip.mine]\ninherits = "h100"\n[chip.mine.links.nvlink]\ndomain = {domain}\n'
    assert read(own)["mine"].link("nvlink").domain == domain


@pytest.mark.parametrize(
    "level, domain, message",
    [
        ("nvlink", 3, r"got 3, expected a multiple of the 8 devices of a host, or a divisor"),
        ("nvlink", 12, r"got 12, expected a multiple of the 8 devices of a host, or a divisor"),
        ("network", 4, r"got 4, expected a multiple of the 8 devices of a host$"),
    ],
)
def test_a_domain_that_cuts_hosts_apart_unevenly_is_refused(read, level, domain, message):
    own = f'[chip.mine]\ninherits = "h100"\n[chip.mine.links.{level}]\ndomain = {domain}\n'
    with pytest.raises(CatalogueError, match=rf"links\.{level}\.domain: {message}"):
        read(own)
