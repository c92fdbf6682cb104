"""Operations: matrix products and convolutions exactly, on every backend's way to print them."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.records.windows import Window, taps
from autoshard.rungs.compile.hlo import HloError, count, parse


def flops_of(body: str) -> float:
    """Matrix-product operations of an entry computation with this body."""
    module = parse(f"HloModule m, is_scheduled=true\n\nENTRY %e () -> f32[] {{\n{body}\n}}\n")
    counts = count(module, ())
    assert counts.unmodelled == ()
    return counts.matmul_flops


def shapes(*dims: tuple[int, ...], dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(d, dtype) for d in dims]


def test_a_matrix_product_and_its_gradient(compile_hlo):
    x, w = shapes((64, 128), (128, 32))
    forward = count(compile_hlo(lambda x, w: x @ w, x, w), ())
    assert forward.matmul_flops == forward.flops == 2 * 64 * 128 * 32
    assert forward.matmul_flops_by_dtype == (("f32", 2 * 64 * 128 * 32),)
    # The second derivative product uses the tanh, so that all three products are needed.
    loss = jax.grad(lambda x, w: jnp.tanh(x @ w).sum(), argnums=(0, 1))
    assert count(compile_hlo(loss, x, w), ()).matmul_flops == 3 * 2 * 64 * 128 * 32


def test_batched_and_transposed_products(compile_hlo):
    q, k = shapes((2, 16, 4, 8), (2, 24, 4, 8))
    scores = compile_hlo(lambda q, k: jnp.einsum("bshk,bthk->bhst", q, k), q, k)
    assert count(scores, ()).matmul_flops == 2 * (2 * 4 * 16 * 24 * 8)


def test_elementwise_reductions_and_transcendentals(compile_hlo):
    (x,) = shapes((128, 64))
    counts = count(compile_hlo(lambda x: (jnp.exp(x) * x).sum(), x), ())
    assert counts.transcendentals == 128 * 64
    # exp, multiply and the sum: one each an element; a reduction in stages adds a little.
    assert 3 * 128 * 64 <= counts.flops < 3.2 * 128 * 64
    assert counts.matmul_flops == 0


@given(
    data=st.integers(1, 7),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    low=st.integers(-2, 4),
    high=st.integers(-1, 4),
    spread=st.integers(1, 4),
    step=st.integers(1, 3),
)
def test_taps_are_those_that_fall_on_data(data, kernel, stride, low, high, spread, step):
    extent = (data - 1) * spread + 1
    out = max(0, (extent + low + high - ((kernel - 1) * step + 1)) // stride + 1)
    slow = sum(
        0 <= at < extent and at % spread == 0
        for o in range(out)
        for k in range(kernel)
        for at in [o * stride + k * step - low]
    )
    window = Window(
        data=data,
        kernel=kernel,
        out=out,
        stride=stride,
        pad_low=low,
        lhs_dilation=spread,
        rhs_dilation=step,
    )
    assert taps(window) == slow


def test_a_convolution_counts_no_padding(compile_hlo):
    x, k = shapes((2, 8, 8, 3), (3, 3, 3, 5))

    def conv(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    taps = 8 * 3 - 2  # along one dimension, two of 24 taps fall off the edges
    assert count(compile_hlo(conv, x, k), ()).matmul_flops == 2 * 2 * 3 * 5 * taps**2


@pytest.mark.parametrize(
    "line, dtype",
    [
        ("dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "f32"),
        (
            "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},"
            " operand_precision={highest,highest}",
            "f32:highest",
        ),
        (
            "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},"
            " algorithm=dot_bf16_bf16_f32_x3",
            "bf16_x3",
        ),
        ("convolution(%a, %b), dim_labels=bf_io->bf, operand_precision={high,high}", "f32:high"),
    ],
)
def test_a_product_keeps_its_precision(line, dtype):
    """As XLA:GPU prints products (jax 0.10.2), and libtpu 0.0.42 the last one."""
    module = parse(
        "HloModule m, is_scheduled=true\n\nENTRY %e () -> f32[] {\n"
        "  %a = f32[16,64]{1,0} parameter(0)\n  %b = f32[64,32]{1,0} parameter(1)\n"
        f"  ROOT %c = f32[16,32]{{1,0}} {line}\n}}\n"
    )
    assert count(module, ()).matmul_flops_by_dtype == ((dtype, 2 * 16 * 64 * 32),)


def test_a_depthwise_convolution():
    body = """\
  %x = f32[8,32,32,16]{3,2,1,0} parameter(0)
  %k = f32[3,3,1,16]{3,2,1,0} parameter(1)
  ROOT %c = f32[8,30,30,16]{3,2,1,0} convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, feature_group_count=16"""
    assert flops_of(body) == 2 * 8 * 30 * 30 * 16 * 9


def test_tpu_prints_a_batched_product_as_a_dilated_convolution():
    # libtpu 0.0.42: bshk,bthk->bhst of 8 sequences of 2048, head dimension 128.
    body = """\
  %x = bf16[8,2048,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[8,2048,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[8,2048,2048]{1,2,0:T(8,128)(2,1)} convolution(%x, %k), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf"""
    assert flops_of(body) == 2 * 8 * 2048 * 2048 * 128


def test_tpu_prints_a_weight_gradient_as_a_convolution_over_the_batch():
    body = """\
  %x = bf16[8,2048,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %g = bf16[8,2048,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[512,256,1]{1,0,2:T(8,128)(2,1)} convolution(%x, %g), window={size=8}, dim_labels=0fb_0io->bf0"""
    assert flops_of(body) == 2 * 8 * 2048 * 512 * 256


CUBLAS = """\
  %a = bf16[4,64,128]{{2,1,0}} parameter(0)
  %b = bf16[4,128,32]{{2,1,0}} parameter(1)
  %c = (bf16[4,64,32]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), custom_call_target="{target}"{config}
  ROOT %r = bf16[4,64,32]{{2,1,0}} get-tuple-element(%c), index=0"""
DIMENSIONS = (
    ', backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
    '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
    '"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul"])
@pytest.mark.parametrize("config", [DIMENSIONS, ""])
def test_library_products(target, config):
    assert flops_of(CUBLAS.format(target=target, config=config)) == 2 * 4 * 64 * 32 * 128


def test_a_library_product_of_a_batch_with_plain_weights():
    body = """\
  %a = f32[4,64,128]{2,1,0} parameter(0)
  %b = f32[128,32]{1,0} parameter(1)
  ROOT %c = f32[4,64,32]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul" """
    assert flops_of(body) == 2 * 4 * 64 * 32 * 128


def test_cudnn_prints_backward_convolutions_with_forward_dimensions():
    x, k, y = "f32[8,16,16,3]{3,2,1,0}", "f32[3,3,3,5]{3,2,1,0}", "f32[8,14,14,5]{3,2,1,0}"
    found = [
        flops_of(
            f"  %a = {a} parameter(0)\n  %b = {b} parameter(1)\n"
            f"  ROOT %c = ({out}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3}}, "
            f'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{name}"'
        )
        for name, a, b, out in [
            ("Forward", x, k, y),
            ("BackwardInput", y, k, x),
            ("BackwardFilter", x, y, k),
        ]
    ]
    assert found == [2 * 8 * 14 * 14 * 5 * 3 * 9] * 3


def test_a_convolution_without_labels_is_an_error():
    with pytest.raises(HloError, match="dim_labels"):
        flops_of("  %a = f32[8]{0} parameter(0)\n  ROOT %c = f32[8]{0} convolution(%a, %a)")


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("sort(%a), dimensions={1}, to_apply=%f", 4 * 1000 * 10),
        ("reduce-window(%a, %z), window={size=1x3}, to_apply=%f", 3 * 4000),
        ("reduce-window(%a, %z), window={size=1x1999 pad=0_0x999_999}, to_apply=%f", 4000),
        ("reduce-window(%a, %z), window={size=1x999 pad=0_0x499_499}, to_apply=%f", 999 * 4000),
        ("copy(%a)", 0),
        ("transpose(%a), dimensions={0,1}", 0),
        ("negate(%a)", 4000),
    ],
)
def test_other_operations(line, flops):
    module = parse(
        "HloModule m\n\nENTRY %e {\n  %a = f32[4,1000]{1,0} parameter(0)\n"
        f"  %z = f32[] constant(0)\n  ROOT %r = f32[4,1000]{{1,0}} {line}\n}}\n"
    )
    assert count(module, ()).flops == flops
