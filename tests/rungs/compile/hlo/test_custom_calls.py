"""Custom calls: declared costs, costs from shapes, and what is left, by its memory traffic."""

import pytest

from autoshard.records.work import Work
from autoshard.rungs.compile.hlo import HloCounts, count, parse
from autoshard.rungs.compile.hlo.steps import Launch, Steps

TILED = ", entry_computation_layout={(bf16[8,128]{1,0:T(8,128)(2,1)})->bf16[8,128]{1,0}}"


def read(body: str, header: str = "") -> tuple[HloCounts, Work, tuple[str, ...]]:
    """Counts, and the last launch of an entry computation with this body."""
    module = parse(
        f"HloModule m, is_scheduled=true{header}\n\nENTRY %e () -> f32[] {{\n"
        "  %a = bf16[4,256,64]{2,1,0} parameter(0)\n  %i = s32[4]{0} parameter(1)\n"
        f"  %v = bf16[4,256,64]{{2,1,0:T(8,128)(2,1)S(1)}} parameter(2)\n{body}\n}}\n"
    )
    *_, last = (step for step in Steps(module, ()).of("e") if isinstance(step, Launch))
    return count(module, ()), last.work, last.assumptions


SIZE = 4 * 256 * 64


def mosaic(cost: str, operands: str = "%i, %a") -> str:
    return (
        f"  ROOT %k = f32[4,256]{{1,0}} custom-call({operands}), "
        'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/pallas_call"}, '
        f'backend_config={{"custom_call_config":{{"body":"TUzv}}","cost_estimate":{{{cost}}}}}}}'
    )


def test_a_declared_cost_is_taken_as_it_is():
    declared = '"flops":"8589934592","transcendentals":"7","bytes_accessed":"20971520"'
    counts, work, _ = read(mosaic(declared))
    assert work == Work(
        opcode="custom-call",
        name="tpu_custom_call",
        matmul_flops=(("bf16", 8589934592.0),),
        element_flops=7,
        transcendentals=7,
        bytes=20971520,
        declared=True,
    )
    assert (counts.matmul_flops, counts.bytes_accessed) == (8589934592, 20971520)
    assert counts.unmodelled == ()


@pytest.mark.parametrize(
    "operands, dtype", [("%i, %q, %q", "s8"), ("%i, %q, %a", "bf16"), ("%i", "s32"), ("", "s32")]
)
def test_products_of_integers_are_no_other_arithmetic(operands, dtype):
    """Their type is that of the first narrow operand; indices come before it."""
    declared = '"flops":"64","transcendentals":"0","bytes_accessed":"9"'
    body = "  %q = s8[256,64]{1,0} parameter(3)\n" + mosaic(declared, operands)
    assert read(body.replace("f32[4,256]", "s32[4,256]"))[1].matmul_flops == ((dtype, 64.0),)


def test_a_declaration_without_traffic_leaves_that_to_operands_and_result():
    _, work, _ = read(mosaic('"flops":"5","transcendentals":"0","bytes_accessed":"0"'))
    assert work.declared
    assert work.bytes == 2 * SIZE + 4 * 4 + 4 * 4 * 256


def test_bytes_that_a_kernel_sends_by_itself_are_named():
    sends = (
        '"flops":"5","transcendentals":"0","bytes_accessed":"9","remote_bytes_transferred":"4096"'
    )
    assert read(mosaic(sends))[2] == (
        "custom call tpu_custom_call %k: sends 4096 bytes to other devices by itself, which are "
        "not priced",
    )


@pytest.mark.parametrize(
    "cost", ["", '"flops":"-1","transcendentals":"0"', '"flops":"0","bytes_accessed":"0"']
)
def test_no_declaration_or_one_that_cannot_be_leaves_the_traffic(cost):
    counts, work, _ = read(mosaic(cost))
    assert counts.unmodelled == (("tpu_custom_call", 1),)
    assert not work.declared
    assert work.bytes == 2 * SIZE + 4 * 4 + 4 * 4 * 256


def test_operands_on_the_chip_do_not_make_an_unknown_kernel_free():
    _, work, _ = read(mosaic("", "%v"), TILED)
    assert work.bytes == 2 * SIZE + 4 * 4 * 256


def library(target: str, attributes: str = "", result: str = "f32[4,256]{1,0}") -> str:
    return f'  ROOT %k = {result} custom-call(%a, %a), custom_call_target="{target}"{attributes}'


@pytest.mark.parametrize(
    "target",
    ["cusolver_potrf_ffi", "__cublas$triangularSolve", "__gpu$xla.gpu.triton", "lapack_spotrf_ffi",
     "Cholesky", "__cudnn$fmhaSoftmax", "mosaic_gpu_v2", "my_kernel"],
)  # fmt: skip
def test_what_cannot_be_known_is_named(target):
    counts, work, _ = read(library(target))
    assert counts.unmodelled == ((target, 1),)
    assert work.bytes == counts.bytes_accessed == 2 * SIZE + 4 * 4 * 256


@pytest.mark.parametrize("target", ["__gpu$TopK", "TopK", "__cub$RadixSort", "cu_threefry2x32_ffi"])
def test_what_only_moves_memory_is_known(target):
    counts, work, _ = read(library(target))
    assert counts.unmodelled == ()
    assert work.element_flops == 4 * 256


def test_the_text_of_a_triton_kernel_is_not_read_as_hlo():
    # As XLA:GPU prints it: neither JSON nor balanced.
    config = ', backend_config={debug = false, grid_x = 16 : i32, ir = "ML\\EF}{\\"R\\0D", x = 1}'
    counts, work, _ = read(library("__gpu$xla.gpu.triton", config))
    assert counts.unmodelled == (("__gpu$xla.gpu.triton", 1),)
    assert work.name == "__gpu$xla.gpu.triton"


@pytest.mark.parametrize("space", ["", " "])
def test_cudnn_attention_grouped_heads_and_masks(space):
    def text(target: str, numbers: str, mask: str) -> str:
        config = (
            f'"cudnn_fmha_backend_config":{space}{{"mask_type":{space}"{mask}",{space}'
            f'"{numbers}_dot_dimension_numbers":{space}{{"lhs_contracting_dimensions":["3"],'
            f'"rhs_contracting_dimensions":{space}["1"]}}}}'
        )
        return (
            "  %q = bf16[2,128,8,64]{3,2,1,0} parameter(3)\n"
            "  %s = bf16[2,256,2,64]{3,2,1,0} parameter(4)\n"
            "  ROOT %k = (bf16[2,128,8,64]{3,2,1,0}, f32[2,8,128]{2,1,0}, u8[4096]{0}) "
            f'custom-call(%q, %s, %s), custom_call_target="{target}", backend_config={{{config}}}'
        )

    product = 2 * 2 * 8 * 128 * 256 * 64
    forward, work, _ = read(text("__cudnn$fmhaSoftmax", "bmm2", "NO_MASK"))
    assert forward.matmul_flops_by_dtype == (("bf16", 2 * product),)
    # Queries, keys once, results; not the workspace.
    assert work.bytes == 2 * (2 * 2 * 128 * 8 * 64 + 2 * 256 * 2 * 64) + 4 * 2 * 8 * 128
    backward, _, _ = read(text("__cudnn$fmhaSoftmaxBackward", "bmm1_grad_gemm2", "PADDING_CAUSAL"))
    assert backward.matmul_flops == 5 * product / 2


def test_an_fp8_product_keeps_its_dtype_and_ignores_its_scales():
    body = (
        "  %x = f8e4m3fn[128,64]{1,0} parameter(3)\n  %y = f8e4m3fn[64,32]{0,1} parameter(4)\n"
        "  %one = f32[] constant(1)\n"
        "  ROOT %k = (bf16[128,32]{1,0}, s8[33554432]{0}) custom-call(%x, %y, %one, %one), "
        'custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    counts, work, _ = read(body)
    assert counts.matmul_flops_by_dtype == (("f8e4m3fn", 2 * 128 * 64 * 32),)
    assert work.bytes == 128 * 64 + 64 * 32 + 2 * 128 * 32 + 4


@pytest.mark.parametrize(
    "said, dtype",
    [
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"', "f32"),
        ('"operand_precision":["HIGH","HIGH"],"algorithm":"ALG_UNSET"', "f32:high"),
        ('"operand_precision": ["HIGHEST", "HIGHEST"], "algorithm": "ALG_UNSET"', "f32:highest"),
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_DOT_F32_F32_F32"',
         "f32:highest"),
        ('"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_DOT_TF32_TF32_F32"', "f32"),
    ],
)  # fmt: skip
def test_a_library_s_product_keeps_its_precision(said, dtype):
    body = (
        "  %x = f32[128,64]{1,0} parameter(3)\n  %y = f32[64,32]{0,1} parameter(4)\n"
        "  ROOT %k = (f32[128,32]{1,0}, s8[33554432]{0}) custom-call(%x, %y), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        f'"rhs_contracting_dimensions":["0"]}},"precision_config":{{{said}}}}}}}'
    )
    assert read(body)[0].matmul_flops_by_dtype == ((dtype, 2 * 128 * 64 * 32),)


def test_a_library_s_convolution_keeps_its_precision():
    body = (
        "  %x = f32[2,6,6,8]{3,2,1,0} parameter(3)\n  %y = f32[8,3,3,8]{3,2,1,0} parameter(4)\n"
        "  ROOT %k = (f32[2,6,6,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "
        'operand_precision={highest,highest}, custom_call_target="__cudnn$convForward", '
        'backend_config={"cudnn_conv_backend_config":{"conv_result_scale":1}}'
    )
    ((dtype, _),) = read(body)[0].matmul_flops_by_dtype
    assert dtype == "f32:highest"
