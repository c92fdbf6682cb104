import pytest

from autoshard.errors import TargetError
from autoshard.target.catalogue import catalogue, listing, targets
from autoshard.target.catalogue.listing import examples, figures
from autoshard.target.topology import parse_topology

CHIPS = catalogue()


@pytest.fixture
def compilers(monkeypatch):
    """libtpu is installed; the CUDA plugin is, and does not fit."""

    def require(platform):
        if platform == "tpu":
            return "libtpu 1.2.3"
        raise TargetError("the compiler for 'cuda' is of another version: pip install it")

    monkeypatch.setattr(listing, "require_compiler", require)
    monkeypatch.setattr(listing, "compiler_version", lambda platform: "jax-cuda12-plugin 9.9")


def test_the_listing_shows_every_chip_with_its_figures_and_names(compilers):
    text = str(targets())
    assert max(map(len, text.splitlines())) <= listing.WIDTH
    for name, chip in CHIPS.items():
        assert f"\n{name}: {chip.device_kind}" in text
        for example in examples(chip):
            assert f'"{example}"' in text
    assert "bf16 459 TFLOP/s" in text and "300 GB/s a device and direction" in text
    assert "where all extents are multiples of 4" in text and "joins 72 devices" in text


def test_the_listing_says_what_is_installed_and_what_to_do_else(compilers):
    found = targets()
    assert [c.version for c in found.compilers] == ["libtpu 1.2.3", "jax-cuda12-plugin 9.9"]
    lines = str(found).splitlines()
    assert "  TPU: compiled by libtpu 1.2.3, which is installed" in lines
    assert "  GPU: the compiler for 'cuda' is of another version: pip install it" in lines


def test_a_file_of_ones_own_is_listed(compilers, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[chip.mine]\ninherits = "h100"\nmemory_bandwidth = 1e12\n')
    assert "\nmine: NVIDIA H100 80GB HBM3" in str(targets(path))


def test_sources_are_shown_figure_by_figure(compilers):
    text = targets().sources("v5p")
    assert "flops.bf16: 459 TFLOP/s. Cloud TPU documentation" in text
    for field, figure in figures(CHIPS["v5p"]):
        assert f"{field}: " in text and figure.date in text
    assert max(map(len, text.splitlines())) <= listing.WIDTH
    with pytest.raises(TargetError, match="got chip 'v9', expected one of v4, v5e"):
        targets().sources("v9")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_the_names_given_as_examples_can_be_parsed(chip):
    for name in examples(chip):
        topology = parse_topology(name, CHIPS)
        assert topology.name == name and topology.chip is chip


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (2.765e12, "bytes/s", "2.765 TB/s"),
        (6.25e9, "bytes/s", "6.25 GB/s"),
        (459e12, "FLOP/s", "459 TFLOP/s"),
        (1.75e9, "Hz", "1.75 GHz"),
        (1.9e-6, "s", "1.9 us"),
        (3e-10, "s", "0.3 ns"),
        (2e-3, "s", "2 ms"),
        (0.0, "s", "0 s"),
        (2.0, "s", "2 s"),
        (95 * 2**30, "bytes", "95 GiB"),
    ],
)
def test_amounts_are_readable(value, unit, text):
    figure = listing.Figure(value=value, unit=unit, source="", date="")
    assert listing._amount(figure) == text
