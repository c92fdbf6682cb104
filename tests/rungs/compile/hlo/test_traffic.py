"""Bytes moved: slices and in-place updates cost the slice, what stays on the chip costs nothing."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.rungs.compile.hlo import count, parse

ROW_BYTES = 64 * 4


def bytes_of(entry: str, others: str = "", header: str = "") -> float:
    return count(
        parse(f"HloModule m, is_scheduled=true{header}\n\n{others}ENTRY %e {{\n{entry}\n}}\n"), ()
    ).bytes_accessed


ARGUMENTS = """\
  %t = f32[1000,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %n = s32[8,1]{1,0} parameter(3)
  %v = f32[8,64]{1,0} parameter(4)
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[1000,64]{1,0} negate(%t)", 2 * 1000 * ROW_BYTES),
        ("f32[1000,64]{1,0} add(%t, %t)", 2 * 1000 * ROW_BYTES),
        ("f32[1,64]{1,0} dynamic-slice(%t, %i, %z), dynamic_slice_sizes={1,64}",
         2 * ROW_BYTES + 8),
        ("f32[1000,64]{1,0} dynamic-update-slice(%t, %u, %i, %z)", 2 * ROW_BYTES),
        ("f32[8,64]{1,0} gather(%t, %n), slice_sizes={1,64}", 2 * 8 * ROW_BYTES + 32),
        ("f32[1000,64]{1,0} scatter(%t, %n, %v), to_apply=%f", 3 * 8 * ROW_BYTES + 32),
        ("f32[1000,64]{0,1} bitcast(%t)", 0),
        ("(f32[1000,64]{1,0}) tuple(%t)", 0),
    ],
)  # fmt: skip
def test_one_instruction(line, expected):
    assert bytes_of(f"{ARGUMENTS}  ROOT %r = {line}") == expected


FUSED = """\
%fused (a: f32[1000,64], b: f32[1,64], c: s32[]) -> f32[1000,64] {{
  %a = f32[1000,64]{{1,0}} parameter(0)
  %b = f32[1,64]{{1,0}} parameter(1)
  %c = s32[] parameter(2)
  %zero = s32[] constant(0)
{body}
}}

"""
UPDATE = (
    "  %w = f32[1,64]{1,0} negate(%b)\n"
    "  ROOT %d = f32[1000,64]{1,0} dynamic-update-slice(%a, %w, %c, %zero)"
)
UPDATE_BEHIND_BITCASTS = (
    "  %a.1 = f32[64000]{0} bitcast(%a)\n"
    "  %b.1 = f32[64]{0} bitcast(%b)\n"
    "  %d = f32[64000]{0} dynamic-update-slice(%a.1, %b.1, %c)\n"
    "  ROOT %e = f32[1000,64]{1,0} bitcast(%d)"
)
CONVERTED_UPDATE = (
    "  %d = f32[1000,64]{1,0} dynamic-update-slice(%a, %b, %c, %zero)\n"
    "  ROOT %e = f32[1000,64]{1,0} negate(%d)"
)
FILLED_UPDATE = (
    "  %k = f32[] constant(0)\n"
    "  %a.1 = f32[1000,64]{1,0} broadcast(%k), dimensions={}\n"
    "  ROOT %d = f32[1000,64]{1,0} dynamic-update-slice(%a.1, %b, %c, %zero)"
)
CAST_UPDATE = (
    "  %a.1 = f32[1000,64]{1,0} convert(%a)\n"
    "  ROOT %d = f32[1000,64]{1,0} dynamic-update-slice(%a.1, %b, %c, %zero)"
)
TWO_OF_ONE = (
    "  %a.1 = f32[1000,64]{1,0} convert(%a)\n"
    "  %a.2 = f32[1000,64]{0,1} copy(%a)\n"
    "  ROOT %d = (f32[1000,64]{1,0}, f32[1000,64]{0,1}) tuple(%a.1, %a.2)"
)
PASSED_ON = (
    "  %b.1 = f32[1,64]{1,0} negate(%b)\n"
    "  ROOT %d = (f32[1000,64]{1,0}, f32[1,64]{1,0}) tuple(%a, %b.1)"
)
SLICE = (
    "  %a.1 = f32[1000,64]{1,0} convert(%a)\n"
    "  ROOT %d = f32[1,64]{1,0} dynamic-slice(%a.1, %c, %zero), dynamic_slice_sizes={1,64}"
)
SLICE_AND_WHOLE = (
    "  %d = f32[1,64]{1,0} dynamic-slice(%a, %c, %zero), dynamic_slice_sizes={1,64}\n"
    "  %s = f32[64]{0} bitcast(%d)\n"
    "  %o = f32[1000,64]{1,0} broadcast(%s), dimensions={1}\n"
    "  ROOT %e = f32[1000,64]{1,0} add(%a, %o)"
)


@pytest.mark.parametrize(
    ("body", "result", "expected"),
    [
        # reads the update and the index, writes the update
        (UPDATE, "f32[1000,64]{1,0}", 2 * ROW_BYTES + 4),
        (UPDATE_BEHIND_BITCASTS, "f32[1000,64]{1,0}", 2 * ROW_BYTES + 4),
        # not in place: everything is read and written
        (CONVERTED_UPDATE, "f32[1000,64]{1,0}", 2001 * ROW_BYTES + 4),
        # nor is what is made here: the whole is written, of the cast the whole read too
        (FILLED_UPDATE, "f32[1000,64]{1,0}", 1001 * ROW_BYTES + 4),
        (CAST_UPDATE, "f32[1000,64]{1,0}", 2001 * ROW_BYTES + 4),
        (TWO_OF_ONE, "(f32[1000,64]{1,0}, f32[1000,64]{0,1})", 3000 * ROW_BYTES),
        (PASSED_ON, "(f32[1000,64]{1,0}, f32[1,64]{1,0})", 2 * ROW_BYTES),
        # reads and writes one row; parameter b is unused
        (SLICE, "f32[1,64]{1,0}", 2 * ROW_BYTES + 4),
        (SLICE_AND_WHOLE, "f32[1000,64]{1,0}", 2 * 1000 * ROW_BYTES + 4),
    ],
)
def test_a_fusion(body, result, expected):
    line = f"  ROOT %r = {result} fusion(%t, %u, %i), kind=kLoop, calls=%fused"
    assert bytes_of(ARGUMENTS + line, FUSED.format(body=body)) == expected


@pytest.mark.parametrize(
    "result", ["f32[1000,64]{1,0}", "((f32[1000,64]{1,0}), f32[1000,64]{1,0})"]
)
def test_an_all_reduce_reads_and_writes_once_however_its_start_is_printed(result):
    entry = (
        "  %t = f32[1000,64]{1,0} parameter(0)\n"
        f"  %s = {result} all-reduce-start(%t), replica_groups={{{{0,1}}}}, to_apply=%f\n"
        "  ROOT %d = f32[1000,64]{1,0} all-reduce-done(%s)"
    )
    sums = (
        "%f (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  %b = f32[] parameter(1)\n  ROOT %r = f32[] add(%a, %b)\n}\n\n"
    )
    text = f"HloModule m, is_scheduled=true, num_partitions=2\n\n{sums}ENTRY %e {{\n{entry}\n}}\n"
    assert count(parse(text), (("x", 2),)).bytes_accessed == 2 * 1000 * ROW_BYTES


def test_a_slice_in_a_nested_fusion():
    inner = FUSED.format(body=SLICE)
    outer = """\
%outer (p: f32[1000,64], q: f32[1,64], r: s32[]) -> f32[1,64] {
  %p = f32[1000,64]{1,0} parameter(0)
  %q = f32[1,64]{1,0} parameter(1)
  %r = s32[] parameter(2)
  %f = f32[1,64]{1,0} fusion(%p, %q, %r), kind=kLoop, calls=%fused
  ROOT %n = f32[1,64]{1,0} negate(%f)
}

"""
    line = "  ROOT %x = f32[1,64]{1,0} fusion(%t, %u, %i), kind=kOutput, calls=%outer"
    assert bytes_of(ARGUMENTS + line, inner + outer) == 2 * ROW_BYTES + 4


TILED = ", entry_computation_layout={(bf16[8,128]{1,0:T(8,128)(2,1)})->bf16[8,128]{1,0}}"
PREFETCH = """\
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %s = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%p)
  %d = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)
  %h = ((bf16[64,128]{1,0:T(8,128)(2,1)}), bf16[16,128]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:16], [0:128]}
  %g = bf16[16,128]{1,0:T(8,128)(2,1)S(1)} slice-done(%h)
  ROOT %r = bf16[64,128]{1,0:T(8,128)(2,1)} negate(%d)"""


def test_on_tpu_the_chips_own_memory_is_free():
    whole = 64 * 128 * 2
    # copy reads, the slice reads a quarter, negate writes
    assert bytes_of(PREFETCH, header=TILED) == 2 * whole + whole / 4
    # elsewhere S(1) is main memory too
    assert bytes_of(PREFETCH) == 4 * whole + 2 * whole / 4


def test_on_tpu_the_scalar_units_memory_is_free_and_the_hosts_is_not():
    line = "  %a = f32[64]{{0:S({0})}} parameter(0)\n  ROOT %b = f32[64]{{0:S({0})}} negate(%a)"
    assert bytes_of(line.format(6), header=TILED) == 0
    assert bytes_of(line.format(5), header=TILED) == 2 * 64 * 4


def test_a_library_call_does_not_touch_its_workspace():
    body = """\
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %c = (f32[64,64]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$gemm" """
    assert bytes_of(body) == 2 * 64 * 64 * 4


def test_compiled_products_move_operands_and_result(compile_hlo):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 128), (128, 32)])
    counts = count(compile_hlo(lambda x, w: x @ w, x, w), ())
    assert counts.bytes_accessed == 4 * (64 * 128 + 128 * 32 + 64 * 32)
    assert counts.op_count == 1


def test_a_compiled_scan_reads_its_stacked_weights_once(compile_hlo):
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((50, 64, 64), jnp.float32)
    counts = count(
        compile_hlo(lambda x, w: jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0], x, w), ()
    )
    stack = 50 * 64 * 64 * 4
    # sliced (read and write), then multiplied (read); never the whole stack an iteration
    assert 3 * stack <= counts.bytes_accessed < 4.5 * stack
