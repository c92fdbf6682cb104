"""What real compilers print for real targets: nothing lost, nothing counted twice, times sane.

The texts were written by texts/make.py.
"""

import dataclasses
import functools
import gzip
import pathlib
import re

import pytest

from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo import HloModule, count, parse
from autoshard.rungs.compile.hlo.timeline import Timeline, Work, timeline

TEXTS = pathlib.Path(__file__).parent / "texts"
AXES = (("data", 4), ("model", 4))
NAMES = sorted(path.name.removesuffix(".txt.gz") for path in TEXTS.glob("*.gz"))


@functools.cache
def module(name: str) -> HloModule:
    return parse(gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode())


def named(program: str, target: str = "") -> list[str]:
    return [name for name in NAMES if name.startswith(f"{program}-{target}")]


@dataclasses.dataclass
class Roofline:
    """A plain target: peak of bf16, memory and link bandwidth, clock where cycles are believed."""

    peak_flops_per_s: float = 989e12
    bandwidth_bytes_per_s: float = 3.35e12
    link_bytes_per_s: float = 400e9
    clock_hz: float = 0.0

    def kernel_s(self, work: Work) -> float:
        if work.cycles is not None and self.clock_hz:
            return work.cycles / self.clock_hz
        matmul = sum(flops for _, flops in work.matmul_flops) / self.peak_flops_per_s
        elements = 16 * work.element_flops / self.peak_flops_per_s
        return max(matmul, elements, work.bytes / self.bandwidth_bytes_per_s)

    def collective_s(self, one: Collective) -> float:
        assert one.group_size > 1
        return 1e-6 + one.bytes / self.link_bytes_per_s


H100 = Roofline()
V5E = Roofline(197e12, 819e9, 90e9, 1.5e9)
V5P = Roofline(459e12, 2765e9, 180e9, 1.75e9)


def target(name: str) -> Roofline:
    return V5E if "v5e" in name else V5P if "v5p" in name else H100


@functools.cache
def replayed(name: str) -> Timeline:
    return timeline(module(name), AXES, target(name))


TOWER = 2 * (32 * 512) * 2048 * 8192 // 16
ACCUMULATION = 2 * (16 * 512) * 1024 * 4096 // 16
EXPERTS = 2 * 16 * 16384 * 1024 * 4096 // 16
FLOPS = {
    "products": 2 * 2 * 32768 * 8192 * 8192 // 16,
    # forward 2, for the weights 2, for what comes in 2, but for the first layer's 1
    "tower": (3 * 6 - 1) * TOWER,
    # 4 micro-batches of 3 layers: forward 2, once more 1, backward 4
    "accumulation": 4 * 3 * 7 * ACCUMULATION,
    "experts": 5 * EXPERTS,
    "by_hand": 3 * 2 * 1024 * 4096 * 4096,
}


@pytest.mark.parametrize("name", [n for program in FLOPS for n in named(program)])
def test_products_are_those_of_the_program_on_every_target(name):
    assert count(module(name), AXES).matmul_flops == FLOPS[name.split("-")[0]]


def test_every_program_of_which_flops_are_known_was_compiled_for_cpu_gpu_and_tpu():
    for program in set(FLOPS) - {"by_hand"}:
        for chip in ("cpu", "h100", "v5e"):
            assert named(program, chip), f"{program} for {chip}"


def test_convolutions_agree_but_for_padding_that_the_gpu_writes_out():
    cpu, gpu, tpu = (
        count(module(named("convolutions", chip)[0]), AXES).matmul_flops
        for chip in ("cpu", "h100", "v5e")
    )
    assert cpu == tpu
    assert cpu < gpu < 1.01 * cpu


PARTS = {
    (): (),
    ("data",): ('"x":(1)4',),
    ("model",): ('"x":(4)4',),
    ("data", "model"): ("x",),
}


@pytest.mark.parametrize("name", NAMES)
def test_read_as_of_one_axis_the_same_groups_run_over_its_parts(name):
    two, one = (count(module(name), mesh).collectives for mesh in (AXES, (("x", 16),)))
    for a, b in zip(two, one, strict=True):
        if a.kind != "collective_permute":
            assert b == dataclasses.replace(a, mesh_axes=PARTS[a.mesh_axes])
    assert not any(c.members for c in (*two, *one))


@pytest.mark.parametrize("name", NAMES)
def test_every_text_has_a_timeline(name):
    found = replayed(name)
    assert found.total_s >= max(found.compute_s, found.exposed_s) > 0
    assert found.exposed_s <= found.communication_s * (1 + 1e-9)
    assert found.total_s <= (found.compute_s + found.communication_s) * (1 + 1e-9)
    assert all(0 < share <= 1 for _, share in found.unmodelled)
    # Every loop of these programs has a length.
    assert not any("trip count" in said for said in found.assumptions)


@pytest.mark.parametrize("name", [*named("products", "h"), *named("products", "v")])
def test_large_products_take_what_peak_allows(name):
    peak_s = FLOPS["products"] / target(name).peak_flops_per_s
    assert peak_s <= replayed(name).compute_s < 1.1 * peak_s


@pytest.mark.parametrize("name", [*named("tower", "v5"), *named("experts", "v5")])
def test_the_tpu_compilers_cycles_are_within_twice_of_peak(name):
    found = count(module(name), AXES)
    assert found.matmul_flops_by_dtype == (("bf16", found.matmul_flops),)
    peak_s = found.matmul_flops / target(name).peak_flops_per_s
    assert peak_s < replayed(name).compute_s < 2 * peak_s


@pytest.mark.parametrize("name", named("tower"))
def test_communication_hides_where_the_compiler_overlaps_it(name):
    found = replayed(name)
    if "cpu" in name:  # starts nothing early
        assert found.exposed_s == pytest.approx(found.communication_s)
    else:
        assert found.exposed_s < 0.95 * found.communication_s


def kinds(name: str) -> list[tuple[str, int, tuple[str, ...], int]]:
    return [
        (c.kind, c.group_size, c.mesh_axes, c.bytes) for c in count(module(name), AXES).collectives
    ]


LOCAL = 1024 * 4096 * 2


@pytest.mark.parametrize("name", named("by_hand", "h100"))
def test_gpu_starts_carry_the_same_payload_as_plain_collectives(name):
    assert sorted(kinds(name)) == [
        ("all_gather", 4, ("data",), 4 * LOCAL),
        ("all_reduce", 16, ("data", "model"), LOCAL),
        ("all_to_all", 4, ("model",), LOCAL),
        ("collective_permute", 4, ("model",), LOCAL),
        ("reduce_scatter", 4, ("model",), LOCAL),
    ]


@pytest.mark.parametrize("name", named("by_hand", "v5e"))
def test_tpu_prints_the_same_and_joins_a_fused_reduce_scatter_with_permutes(name):
    found = kinds(name)
    for one in [
        ("all_gather", 4, ("data",), 4 * LOCAL),
        ("all_reduce", 16, ("data", "model"), LOCAL),
        ("all_to_all", 4, ("model",), LOCAL),
        ("collective_permute", 4, ("model",), LOCAL),
    ]:
        assert one in found
    assert [k for k, *_ in found].count("reduce_scatter") == 1


def test_a_ragged_all_to_all_sends_its_rows_not_its_offsets():
    (name,) = named("ragged")
    assert kinds(name) == [("all_to_all", 4, ("model",), 8192 * 1024 * 2)]
    assert replayed(name).assumptions == (
        "ragged-all-to-all %ragged-all-to-all-start: counted as a full one",
    )


def test_products_in_libraries_count_as_those_in_triton_fusions():
    (name,) = named("products-libraries")
    assert count(module(name), AXES).matmul_flops == FLOPS["products"]


def test_cudnn_attention_counts_its_products():
    (name,) = named("attention")
    found = count(module(name), AXES)
    # 4 sequences of 4 heads on a device; 2 products forward, 5 backward, half of each masked.
    assert found.matmul_flops == 7 * 2 * 4 * 4 * 2048 * 2048 * 128 / 2
    assert found.unmodelled == ()


def test_a_pallas_kernel_for_tpu_costs_what_it_declares_or_what_its_body_says():
    (name,) = named("kernels", "v5e")
    found = count(module(name), AXES)
    # Five times two products, of which one is declared.
    assert found.matmul_flops == 5 * 2 * 2 * 1024 * 2048 * 2048
    assert found.unmodelled == ()
    (said,) = replayed(name).assumptions
    assert "without a declared cost" in said


@pytest.mark.parametrize("kernel", ["splash", "flash"])
def test_tpu_attention_kernels_are_read_forward_and_backward(kernel):
    (name,) = named(kernel, "v5e")
    found = count(module(name), AXES)
    # 2 products forward, 3 for the queries, 4 for the keys and values; masked blocks included.
    products = 9 * 2 * (2 * 4) * 1024 * 1024 * 128
    assert products <= found.matmul_flops < 1.01 * products
    assert found.unmodelled == ()


def test_attributes_over_several_lines_belong_to_their_instruction():
    (name,) = named("splash", "v5e")
    entry = module(name).find(module(name).entry)
    kernels = [i for i in entry.instructions if i.custom_call_target == "tpu_custom_call"]
    assert len(kernels) == 3
    for kernel in kernels:
        assert "block_kv" in kernel.attribute("frontend_attributes")
        assert kernel.op_name.endswith("pallas_call")  # what follows the lines is read too


@pytest.mark.parametrize("body", ["", "TUzv", "not base64!"])
def test_a_body_that_cannot_be_read_leaves_its_kernel_unknown(body):
    (name,) = named("kernels", "v5e")
    text = gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode()
    broken = parse(re.sub(r'"body":"[^"]*"', f'"body":"{body}"', text))
    assert count(broken, AXES).unmodelled == (("tpu_custom_call", 5),)


def test_a_pallas_kernel_for_gpu_declares_nothing_and_is_named():
    (name,) = named("pointwise")
    ((what, share),) = replayed(name).unmodelled
    assert what == "custom call __gpu$xla.gpu.triton x1: only its memory traffic"
    assert share == 1


def test_the_sparse_cores_kernels_have_no_cycles_and_run_in_turn():
    (name,) = named("routing", "v5p")
    said = replayed(name).assumptions
    assert "kernels of the sparsecore thread run in turn with all others" in said
    assert any("9223372036854775807 estimated cycles" in sentence for sentence in said)
    # Else the step would take centuries.
    assert replayed(name).total_s < 1
    found = count(module(name), AXES)
    assert found.estimated_cycles < 1e9
    assert found.unmodelled == ()
