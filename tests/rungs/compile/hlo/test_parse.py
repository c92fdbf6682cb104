"""The parser: what a line says, on every backend's way of printing it."""

import sys

import jax
import jax.numpy as jnp
import pytest

from autoshard.rungs.compile.hlo import HloError, Shape, parse

F32 = jnp.float32

GPU = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, replica_count=2

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(f32[] %x.1, f32[] %y.1)
}

ENTRY %main (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0), sharding={replicated}, metadata={op_name="params[\\'w\\']"}
  %all-reduce-start = f32[8]{0} all-reduce-start(f32[8]{0} %p.1), channel_id=7, replica_groups=mesh['a'=2], device_ids=(1,0) {'a'}, use_global_device_ids=true, to_apply=%add.clone, frontend_attributes={chain="0", calls=%wrong}, metadata={op_name="jit(step)/psum, to_apply=%x" source_file="/a b/step.py" source_line=41}, backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false},"reification_cost":[{"name":"x, y={"}]}
  ROOT %all-reduce-done = f32[8]{0} all-reduce-done(f32[8]{0} %all-reduce-start)
}
"""

TPU = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[8,128]{1,0:T(8,128)(2,1)})->bf16[8,128]{1,0:T(8,128)(2,1)}}, num_partitions=16

FileNames
1 "/home/me/step.py"

FunctionNames
1 "step"
2 "loss"

FileLocations
1 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=0 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %main.1_spmd (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %c = s32[2,2]{1,0:T(2,128)} constant({ { 0, 1 },
    { 2, 3 } }), metadata={op_name="c"}
  %slice-start.4 = ((bf16[8,128]{1,0:T(8,128)(2,1)}), bf16[2,128]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:2], [0:128]}, metadata={op_name="s" stack_frame_id=1}
  ROOT %slice-done.4 = bf16[2,128]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start.4)
}
"""


def test_gpu_style_text_with_operand_shapes():
    module = parse(GPU)
    assert (module.name, module.device_count, module.partition_count) == ("jit_step", 2, 1)
    assert not module.tiled
    start = module.find(module.entry).find("all-reduce-start")
    assert start.opcode == "all-reduce-start"
    assert start.operands == ("p.1",)
    assert start.called == (("to_apply", "add.clone"),)
    assert start.channel_id == 7
    assert start.attribute("replica_groups") == "mesh['a'=2], device_ids=(1,0) {'a'}"
    assert start.attribute("device_ids") == ""
    assert start.attribute("frontend_attributes") == '{chain="0", calls=%wrong}'
    assert start.op_name == "jit(step)/psum, to_apply=%x"
    assert module.source(start) == "/a b/step.py:41"
    parameter = module.find(module.entry).parameters[0]
    assert parameter.op_name == "params['w']"
    assert module.find("main").root.opcode == "all-reduce-done"


def test_tpu_style_text_with_tiles_memory_spaces_and_frames():
    module = parse(TPU)
    assert module.tiled and module.device_count == 16
    main = module.find(module.entry)
    start = main.find("slice-start.4")
    assert start.elements == (
        (Shape("bf16", (8, 128)),),
        (Shape("bf16", (2, 128), 1),),
        (Shape("s32", (), 2),),
    )
    assert start.operands == ("p",)
    assert module.source(start) == "/home/me/step.py:12"
    assert module.source(main.find("p")) == ""
    assert main.find("c").literal.split() == ["{", "{", "0,", "1", "},", "{", "2,", "3", "}", "}"]
    assert main.find("c").op_name == "c"


@pytest.mark.parametrize(
    ("dtype", "size_bytes"),
    [
        ("pred", 8), ("s4", 4), ("u8", 8), ("bf16", 16), ("f8e4m3fn", 8), ("f4e2m1fn", 4),
        ("f32", 32), ("c64", 64), ("token", 0),
    ],
)  # fmt: skip
def test_bytes_of_a_dtype(dtype, size_bytes):
    assert Shape(dtype, (8,)).bytes == size_bytes
    assert Shape(dtype, (0,)).bytes == 0


def test_an_odd_number_of_nibbles_takes_whole_bytes():
    assert Shape("s4", (3,)).bytes == 2


def test_names_without_percent_signs():
    module = parse(
        "HloModule m\n\nENTRY e {\n"
        "  a = f32[2,3]{1,0} parameter(0)\n  b = f32[2,3] parameter(1)\n"
        "  ROOT t = (f32[2,3], f32[2,3]) tuple(f32[2,3]{1,0} a, /*index=1*/b)\n}\n"
    )
    assert module.find("e").root.operands == ("a", "b")


def test_conditionals_and_trip_counts_are_read():
    module = parse(
        "HloModule m\n\nENTRY %e {\n  %p = pred[] parameter(0)\n"
        "  %w = (s32[]) while(%p), condition=%c, body=%b, "
        'backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}\n'
        '  %v = (s32[]) while(%p), condition=%c, body=%b, backend_config="known_trip_count { n: 3 }"\n'
        "  %k = f32[] conditional(%p, %w, %w), true_computation=%t, false_computation=%f\n"
        "  ROOT %l = f32[] conditional(%p, %w, %w), branch_computations={%t, %f}\n}\n"
    )
    entry = module.find("e")
    assert entry.find("w").calls("body") == ("b",)
    assert entry.find("w").calls("condition", "body") == ("c", "b")
    assert [entry.find(n).known_trip_count for n in "wvk"] == [12, 3, None]
    assert entry.find("k").calls("true_computation", "false_computation") == ("t", "f")
    assert entry.find("l").calls("branch_computations") == ("t", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_f {}", "HloModule"),
        ("HloModule m\n\n%f {\n  %a = f32[] parameter(0)\n}\n", "ENTRY"),
        ("HloModule m\n\nENTRY %e {\n  %a = f32[] parameter(0)\n", "closing brace"),
        ("HloModule m\n\nENTRY %e {\n  %a is wrong\n}\n", "line 4.*%a is wrong"),
        ("HloModule m\n\nENTRY %e {\n  %a = f32[] add(%b\n}\n", "line 4.*bracket"),
        ("HloModule m\n\nENTRY %e {\n  %a = () tuple(f32 %b\n}\n", "bracket"),
    ],
)
def test_what_cannot_be_read_is_an_error(text, message):
    with pytest.raises(HloError, match=message):
        parse(text)


def test_a_missing_name_is_an_error():
    module = parse(GPU)
    with pytest.raises(HloError, match="%nowhere"):
        module.find("nowhere")
    with pytest.raises(HloError, match="%nothing"):
        module.find("main").find("nothing")


def test_compiled_text_names_the_users_line(compile_hlo):
    line = test_compiled_text_names_the_users_line.__code__.co_firstlineno + 2
    module = compile_hlo(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((64, 64), F32))
    root = module.find(module.entry).root
    assert module.source(root) == f"{__file__}:{line}"
    assert root.op_name.endswith("dot_general")


def test_multi_line_and_odd_constants_compile_and_parse(compile_hlo):
    table = jnp.arange(6.0).reshape(2, 3)
    module = compile_hlo(lambda x: x + table, jax.ShapeDtypeStruct((2, 3), F32))
    assert module.find(module.entry).parameters[0].shapes == (Shape("f32", (2, 3)),)


def test_the_work_of_parsing_grows_with_the_text_and_no_faster():
    """A module of 200 kB is read some ten thousand times in a search."""

    def calls(count: int) -> int:
        lines = "".join(
            f"  %fusion.{i} = f32[256,256]{{1,0}} fusion(%p, %fusion.{i - 1}), kind=kLoop,"
            f' calls=%f, metadata={{op_name="jit(step)/while/body/dot_general"'
            f" stack_frame_id={i % 30}}}, "
            'backend_config={"outer_dimension_partitions":["4"],"x":[{"a":"b"}]}\n'
            for i in range(1, count)
        )
        head = "HloModule m\n\nENTRY %e {\n  %p = f32[256,256]{1,0} parameter(0)\n"
        seen = 0

        def count_one(frame: object, event: str, arg: object) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count_one)
        try:
            module = parse(head + lines + "}\n")
        finally:
            sys.setprofile(None)
        assert len(module.find("e").instructions) == count
        return seen

    calls(10)  # what is cached is cached
    few, many = calls(500), calls(1000)
    assert 1.5 * few < many < 2.2 * few
