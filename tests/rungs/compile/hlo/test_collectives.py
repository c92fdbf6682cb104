"""Collectives: kind, bytes, group and axes, compiled here and as GPU and TPU print them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo import HloError, count, parse

AXES = (("a", 2), ("b", 4))
F32 = jnp.float32


def found(module, mesh=AXES):
    return [
        (c.kind, c.group_size, c.mesh_axes, c.bytes, c.count)
        for c in count(module, mesh).collectives
    ]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def test_a_contracted_axis_is_all_reduced(compile_hlo):
    module = compile_hlo(
        lambda x, w: x @ w, array(64, 128), array(128, 32),
        ins=(P("a", "b"), P("b", None)), outs=P("a", None),
    )  # fmt: skip
    assert found(module) == [("all_reduce", 4, ("b",), 32 * 32 * 4, 1)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (P("a", "b"), P("a", None), ("all_gather", 4, ("b",), 32 * 128 * 4, 1)),
        (P("a", None), P(), ("all_gather", 2, ("a",), 64 * 128 * 4, 1)),
        (P(("a", "b")), P(), ("all_gather", 8, ("a", "b"), 64 * 128 * 4, 1)),
        (P("b", None), P(None, "b"), ("all_to_all", 4, ("b",), 64 * 32 * 4, 1)),
    ],
)
def test_a_reshard_communicates_over_the_axes_it_changes(compile_hlo, before, after, expected):
    module = compile_hlo(jnp.sin, array(64, 128), ins=(before,), outs=after)
    assert found(module) == [expected]


def test_no_communication_is_no_collective(compile_hlo):
    assert found(compile_hlo(jnp.sin, array(64, 128), ins=(P("a"),), outs=P("a", "b"))) == []


SHIFT = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (lambda x: jax.lax.psum_scatter(x, "b", tiled=True),
         ("reduce_scatter", 4, ("b",), 32 * 32 * 4, 1)),
        (lambda x: jax.lax.psum(x, ("a", "b")), ("all_reduce", 8, ("a", "b"), 32 * 32 * 4, 1)),
        (lambda x: jax.lax.ppermute(x, "b", SHIFT),
         ("collective_permute", 4, ("b",), 32 * 32 * 4, 1)),
        (lambda x: jax.lax.ppermute(x, "a", [(0, 1)]),
         ("collective_permute", 2, ("a",), 32 * 32 * 4, 1)),
        (lambda x: jax.lax.all_to_all(x, "b", 0, 1, tiled=True),
         ("all_to_all", 4, ("b",), 32 * 32 * 4, 1)),
    ],
)  # fmt: skip
def test_collectives_written_by_hand(compile_hlo, mesh, local, expected):
    step = jax.shard_map(
        local, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False
    )
    module = compile_hlo(step, array(64, 128), ins=(P("a", "b"),))
    assert found(module) == [expected]
    (one,) = count(module, AXES).collectives
    assert one.source.startswith(__file__)


def test_a_loop_multiplies_its_collectives(compile_hlo):
    def step(x, w):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

    module = compile_hlo(
        step, array(64, 128), array(5, 128, 128), ins=(P("a", "b"), P(None, "b", None))
    )
    assert ("all_reduce", 4, ("b",), 32 * 128 * 4, 5) in found(module)


def test_a_mesh_of_another_size_is_refused(compile_hlo):
    module = compile_hlo(jnp.sin, array(64, 128), ins=(P("a"),))
    with pytest.raises(ValueError, match=r"8 devices; got.*4"):
        count(module, (("a", 4),))


def entry(body, others="", devices=8):
    return parse(
        f"HloModule jit_step, is_scheduled=true, num_partitions={devices}\n\n"
        "%sum (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
        "  %y = f32[] parameter(1)\n  ROOT %s = f32[] add(%x, %y)\n}\n\n"
        f"{others}ENTRY %main () -> f32[] {{\n  %p = f32[16,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


LOCAL = 16 * 8 * 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # GPU: asynchronous forms of their own
        (("  %s = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%p), channel_id=1, "
         "replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, "
         'backend_config={"collective_backend_config":{"is_sync":false}}\n'
         "  ROOT %d = f32[64,8]{1,0} all-gather-done(%s)"),
         ("all_gather", 4, ("b",), 4 * LOCAL, 1)),
        (("  %s = ((f32[16,8]{1,0}, f32[16,8]{1,0}), (f32[32,8]{1,0}, f32[32,8]{1,0})) "
         "all-gather-start(%p, %p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}\n"
         "  ROOT %d = (f32[32,8]{1,0}, f32[32,8]{1,0}) all-gather-done(%s)"),
         ("all_gather", 2, ("a",), 4 * LOCAL, 1)),
        (("  %s = (f32[16,8]{1,0}, f32[16,8]{1,0}) all-reduce-start(%p, %p), channel_id=1, "
         "replica_groups=mesh['x'=2,'y'=4] {'x'}, use_global_device_ids=true, to_apply=%sum\n"
         "  ROOT %d = (f32[16,8]{1,0}, f32[16,8]{1,0}) all-reduce-done(%s)"),
         ("all_reduce", 2, ("a",), 2 * LOCAL, 1)),
        (("  %s = ((f32[16,8]{1,0}), f32[4,8]{1,0}) reduce-scatter-start(%p), channel_id=1, "
         "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, "
         "to_apply=%sum\n  ROOT %d = f32[4,8]{1,0} reduce-scatter-done(%s)"),
         ("reduce_scatter", 4, ("b",), LOCAL, 1)),
        (("  %s = (f32[16,8]{1,0}, f32[16,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
         "collective-permute-start(%p), channel_id=1, source_target_pairs={{0,4},{4,0},{1,1}}\n"
         "  ROOT %d = f32[16,8]{1,0} collective-permute-done(%s)"),
         ("collective_permute", 2, ("a",), LOCAL, 1)),
        # everybody
        ("  ROOT %d = f32[16,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%sum",
         ("all_reduce", 8, ("a", "b"), LOCAL, 1)),
        # a channel without global ids names replicas, of which there is one
        (("  ROOT %d = f32[16,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0}}, "
         "to_apply=%sum"), ("all_reduce", 8, ("a", "b"), LOCAL, 1)),
        # half of an axis, in Shardy's words
        (("  ROOT %d = f32[16,8]{1,0} all-reduce(%p), channel_id=3, use_global_device_ids=true, "
         "replica_groups=[4,2]<=[8], to_apply=%sum"), ("all_reduce", 2, ('"b":(2)2',), LOCAL, 1)),
    ],
)  # fmt: skip
def test_printed_forms(body, expected):
    assert found(entry(body)) == [expected]


WRAPPED = """\
%async_computation (q: f32[16,8]) -> f32[16,8] {
  %q = f32[16,8]{1,0} parameter(0)
  ROOT %a2a = f32[16,8]{1,0} all-to-all(%q), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, metadata={op_name="jit(step)/all_to_all" source_file="/me/moe.py" source_line=7}
}, execution_thread="parallel"

"""


def test_an_async_wrapper_is_followed_once():
    body = """\
  %s = ((f32[16,8]{1,0}), f32[16,8]{1,0}, s32[]) async-start(%p), calls=%async_computation
  %u = ((f32[16,8]{1,0}), f32[16,8]{1,0}, s32[]) async-update(%s), calls=%async_computation
  ROOT %d = f32[16,8]{1,0} async-done(%u), calls=%async_computation"""
    assert count(entry(body, WRAPPED), AXES).collectives == (
        Collective(
            kind="all_to_all", group_size=2, mesh_axes=("a",), bytes=LOCAL, count=1,
            source="/me/moe.py:7",
        ),
    )  # fmt: skip


def test_groups_that_follow_no_axes_keep_their_members_and_are_told():
    body = (
        "  ROOT %d = f32[16,8]{1,0} all-reduce(%p), channel_id=3, use_global_device_ids=true, "
        "replica_groups={{2,5},{0,7},{1,6},{3,4}}, to_apply=%sum"
    )
    counts = count(entry(body), AXES)
    (one,) = counts.collectives
    assert (one.mesh_axes, one.members) == ((), (2, 5))
    assert counts.assumptions == (
        "all_reduce over groups that follow no mesh axes: one group stands for all",
    )


@pytest.mark.parametrize(
    "partners", ["replica_groups=[2,4]<=[8]", "source_target_pairs={{0,1},{1,0}}"]
)
@pytest.mark.parametrize("suffix", ["", "-start"])
def test_a_collective_of_an_unknown_kind_is_an_error(partners, suffix):
    body = f"  ROOT %r = f32[16,8]{{1,0}} all-scatter{suffix}(%p), {partners}"
    with pytest.raises(HloError, match=r"%r: got the collective all-scatter, expected one of all-"):
        count(entry(body), AXES)


def test_a_broadcast_counts_as_one_permutation_and_says_so():
    body = "  ROOT %r = f32[16,8]{1,0} collective-broadcast(%p), replica_groups={{0,1},{2,3}}"
    counts = count(entry(body), AXES)
    assert [c.kind for c in counts.collectives] == ["collective_permute"]
    assert "collective-broadcast %r: counted as one permutation" in counts.assumptions


def test_what_devices_send_to_each_other_by_hand_says_how_it_is_priced():
    body = (
        "  %s = (f32[16,8]{1,0}, u32[], token[]) send(%p, %p), channel_id=1\n"
        "  ROOT %d = token[] send-done(%s), channel_id=1"
    )
    said = "send %s: priced by its memory traffic, not by links"
    assert said in count(entry(body), AXES).assumptions
    to_host = body.replace("channel_id=1\n", "channel_id=1, is_host_transfer=true\n")
    assert said not in count(entry(to_host), AXES).assumptions


def test_a_ragged_all_to_all_counts_as_a_full_one_and_says_so():
    body = (
        "  ROOT %r = f32[16,8]{1,0} ragged-all-to-all(%p, %p, %p, %p, %p, %p), "
        "replica_groups=[2,4]<=[8]"
    )
    counts = count(entry(body), AXES)
    assert [c.kind for c in counts.collectives] == ["all_to_all"]
    assert counts.assumptions == ("ragged-all-to-all %r: counted as a full one",)


# libtpu 0.0.42 on v5e: a gather that starts in one fusion, goes on in another and ends in a third.
TPU_ASYNC = """\
%start.fused (s0: f32[16,8]) -> (f32[16,8], f32[32,8], u32[]) {
  %s0 = f32[16,8]{1,0} parameter(0)
  %ag.1 = f32[32,8]{1,0} all-gather(%s0), channel_id=70, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %cc.1 = (f32[16,8]{1,0}, f32[32,8]{1,0}, u32[]{:S(2)}) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}

%during.fused (d0: f32[16,8], d1: f32[32,8], d2: u32[], d3: f32[64,64]) -> (f32[64,64], f32[16,8], f32[32,8], u32[]) {
  %d0 = f32[16,8]{1,0} parameter(0)
  %ag.2 = f32[32,8]{1,0} all-gather(%d0), channel_id=70, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  %d1 = f32[32,8]{1,0} parameter(1)
  %d2 = u32[]{:S(2)} parameter(2)
  %d3 = f32[64,64]{1,0} parameter(3)
  %n = f32[64,64]{1,0} negate(%d3)
  ROOT %t = (f32[64,64]{1,0}, f32[16,8]{1,0}, f32[32,8]{1,0}, u32[]{:S(2)}) tuple(%n, %d0, %ag.2, %d2)
}

%done.fused (e0: f32[16,8], e1: f32[32,8], e2: u32[]) -> f32[32,8] {
  %e0 = f32[16,8]{1,0} parameter(0)
  %ag.3 = f32[32,8]{1,0} all-gather(%e0), channel_id=70, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  %e1 = f32[32,8]{1,0} parameter(1)
  %e2 = u32[]{:S(2)} parameter(2)
  ROOT %cc.2 = f32[32,8]{1,0} custom-call(%e0, %e1, %ag.3, %e2), custom_call_target="AsyncCollectiveDone"
}

"""


def test_tpu_counts_a_collective_that_spans_fusions_once():
    body = """\
  %x = f32[64,64]{1,0} parameter(1)
  %f.1 = (f32[16,8]{1,0}, f32[32,8]{1,0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start.fused, metadata={op_name="jit(step)/gather_here"}
  %g.0 = f32[16,8]{1,0} get-tuple-element(%f.1), index=0
  %g.1 = f32[32,8]{1,0} get-tuple-element(%f.1), index=1
  %g.2 = u32[]{:S(2)} get-tuple-element(%f.1), index=2
  %f.2 = (f32[64,64]{1,0}, f32[16,8]{1,0}, f32[32,8]{1,0}, u32[]{:S(2)}) fusion(%g.0, %g.1, %g.2, %x), kind=kOutput, calls=%during.fused, backend_config={"window_config":{"estimated_cycles":"93690"}}
  %h.1 = f32[16,8]{1,0} get-tuple-element(%f.2), index=1
  %h.2 = f32[32,8]{1,0} get-tuple-element(%f.2), index=2
  ROOT %f.3 = f32[32,8]{1,0} fusion(%h.1, %h.2, %g.2), kind=kCustom, calls=%done.fused"""
    counts = count(entry(body, TPU_ASYNC), AXES)
    assert counts.collectives == (
        Collective(
            kind="all_gather", group_size=2, mesh_axes=("a",), bytes=2 * LOCAL, count=1,
            source="jit(step)/gather_here",
        ),
    )  # fmt: skip
    assert counts.estimated_cycles == 93690
    # the gather, once, and the negation; what the fusions only pass on is no traffic
    assert counts.bytes_accessed == 3 * LOCAL + 2 * 64 * 64 * 4


TPU_SCATTER = """\
%all-reduce-scatter (input: f32[16,8]) -> f32[8,8] {{
  %input = f32[16,8]{{1,0}} parameter(0)
  %ar = f32[16,8]{{1,0}} all-reduce(%input), channel_id=36, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, use_global_device_ids=true, to_apply=%sum
  %partition = u32[] partition-id()
  %zero = u32[] constant(0)
  %seen = f32[128]{{0}} bitcast(%ar)
  ROOT %ds = f32[64]{{0}} {last}
}}

"""


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("dynamic-slice(%seen, %partition), dynamic_slice_sizes={64}", "reduce_scatter"),
        ("slice(%seen), slice={[0:64]}", "all_reduce"),
    ],
)
def test_tpu_prints_a_reduce_scatter_as_a_fused_slice_of_an_all_reduce(last, kind):
    body = "  ROOT %f = f32[64]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    module = entry(body, TPU_SCATTER.format(last=last))
    assert found(module) == [(kind, 2, ("a",), LOCAL, 1)]


@pytest.mark.parametrize(
    "body",
    [
        "  ROOT %d = f32[16,8]{1,0} all-reduce(%p), replica_groups=@mesh {'a'}, to_apply=%sum",
        "  ROOT %d = f32[16,8]{1,0} collective-permute(%p), channel_id=1",
        "  ROOT %d = f32[16,8]{1,0} collective-permute(%p), source_target_pairs=[8,2]<=[16]",
    ],
)
def test_unread_groups_are_an_error_never_free(body):
    with pytest.raises(HloError):
        count(entry(body), AXES)


def test_groups_of_one_and_permutes_in_place_send_nothing():
    body = """\
  %a = f32[16,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %d = f32[16,8]{1,0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}"""
    assert found(entry(body)) == []


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ('op_name="jit(step)/psum" source_file="/me/step.py" source_line=3', "/me/step.py:3"),
        ('op_name="jit(step)/psum" stack_frame_id=9', "jit(step)/psum"),
        ("", ""),
    ],
)
def test_the_source_is_the_line_or_else_the_operation(metadata, source):
    module = entry(
        "  ROOT %d = f32[16,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%sum, "
        f"metadata={{{metadata}}}"
    )
    assert [c.source for c in count(module, AXES).collectives] == [source]
