"""The timeline of hand-written schedules: what overlaps, what waits, what repeats."""

import dataclasses

import pytest

from autoshard.records.trial import Collective
from autoshard.rungs.compile.hlo import parse
from autoshard.rungs.compile.hlo.timeline import Timeline, Work, timeline

AXES = (("a", 2), ("b", 4))


class Told:
    """Prices that the text tells: kernels by their cycles, collectives by their op_name."""

    def kernel_s(self, work: Work) -> float:
        return float(work.cycles or 0)

    def collective_s(self, one: Collective) -> float:
        return float(one.source)


def kernel(name: str, seconds: int, reads: str = "p", root: str = "") -> str:
    return (
        f"  {root}%{name} = f32[16,8]{{1,0}} negate(%{reads}), "
        f'backend_config={{"estimated_cycles":"{seconds}"}}'
    )


def start(name: str, seconds: int, sync: bool = False) -> str:
    return (
        f"  %{name} = (f32[16,8]{{1,0}}, f32[64,8]{{1,0}}) all-gather-start(%p), channel_id=1, "
        "replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, "
        f'metadata={{op_name="{seconds}"}}, '
        f'backend_config={{"collective_backend_config":{{"is_sync":{str(sync).lower()}}}}}'
    )


def done(name: str, of: str) -> str:
    return f"  %{name} = f32[64,8]{{1,0}} all-gather-done(%{of})"


def reduce(name: str, seconds: int) -> str:
    return (
        f"  %{name} = f32[16,8]{{1,0}} all-reduce(%p), channel_id=2, to_apply=%sum, "
        f'replica_groups=[1,8]<=[8], use_global_device_ids=true, metadata={{op_name="{seconds}"}}'
    )


def replay(*lines: str, others: str = "", prices: object = None, tiled: str = "") -> Timeline:
    body = "\n".join(lines)
    module = parse(
        f"HloModule jit_step, is_scheduled=true, num_partitions=8{tiled}\n\n"
        "%sum (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
        "  %y = f32[] parameter(1)\n  ROOT %s = f32[] add(%x, %y)\n}\n\n"
        f"{others}ENTRY %main () -> f32[] {{\n  %p = f32[16,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )
    return timeline(module, AXES, prices or Told())  # type: ignore[arg-type]


def seconds(found: Timeline) -> tuple[float, float, float, float]:
    assert found.total_s >= max(found.compute_s, found.exposed_s)
    return found.total_s, found.compute_s, found.communication_s, found.exposed_s


def test_kernels_run_one_after_another():
    assert seconds(replay(kernel("k", 3), kernel("l", 4))) == (7, 7, 0, 0)


def test_communication_behind_enough_work_is_hidden():
    assert seconds(replay(start("s", 7), kernel("k", 10), done("d", "s"))) == (10, 10, 7, 0)


def test_kernels_wait_for_the_rest_of_it():
    found = replay(start("s", 7), kernel("k", 4), done("d", "s"), kernel("l", 1))
    assert seconds(found) == (8, 5, 7, 3)


def test_a_synchronous_collective_holds_up_kernels():
    assert seconds(replay(kernel("k", 4), reduce("r", 7), kernel("l", 1))) == (12, 5, 7, 7)
    found = replay(start("s", 7, sync=True), kernel("k", 10), done("d", "s"))
    assert seconds(found) == (17, 10, 7, 7)


def test_collectives_take_turns_and_that_is_said():
    lines = start("s", 7), start("t", 5), kernel("k", 4), done("u", "t"), done("d", "s")
    found = replay(*lines)
    assert seconds(found) == (12, 4, 12, 8)
    (said,) = found.assumptions
    assert "one communication queue" in said
    assert replay(start("s", 7), kernel("k", 9), start("t", 5), done("d", "t")).assumptions == ()


def test_a_synchronous_collective_waits_for_those_under_way():
    found = replay(start("s", 7), kernel("k", 2), reduce("r", 5), done("d", "s"))
    assert seconds(found) == (12, 2, 12, 10)


def test_what_nobody_waits_for_still_ends_within_the_step():
    assert seconds(replay(kernel("k", 2), start("s", 7))) == (9, 2, 7, 7)


def test_a_done_finds_its_start_through_updates():
    update = "  %u = (f32[16,8]{1,0}, f32[64,8]{1,0}) async-update(%s)"
    lines = start("s", 7), start("t", 5), update, kernel("k", 1), done("d", "u")
    # Without the update it would wait for both, 12 s.
    assert seconds(replay(*lines, kernel("l", 9), done("e", "t"))) == (16, 10, 12, 6)


GATHER = """\
%wrapped (q: f32[16,8]) -> f32[64,8] {
  %q = f32[16,8]{1,0} parameter(0)
  ROOT %g = f32[64,8]{1,0} all-gather(%q), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="7"}
}

"""


def test_an_asynchronous_computation_overlaps_as_what_it_calls():
    found = replay(
        "  %s = ((f32[16,8]{1,0}), f32[64,8]{1,0}, s32[]) async-start(%p), calls=%wrapped",
        kernel("k", 4),
        "  %d = f32[64,8]{1,0} async-done(%s), calls=%wrapped",
        others=GATHER,
    )
    assert seconds(found) == (7, 4, 7, 3)


def test_copies_have_a_queue_of_their_own_and_count_as_computing():
    copy = (
        "  %c = (f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%p), "
        'backend_config={"estimated_cycles":"6"}'
    )
    ended = "  %e = f32[16,8]{1,0:S(1)} copy-done(%c)"
    found = replay(start("s", 7), copy, kernel("k", 4), ended, done("d", "s"))
    assert seconds(found) == (7, 6, 7, 1)
    assert seconds(replay(copy, kernel("k", 10), ended)) == (10, 10, 0, 0)


LOOP = """\
%cond (a: (s32[], f32[16,8])) -> pred[] {{
  %a = (s32[], f32[16,8]{{1,0}}) parameter(0)
  %n = s32[] constant({trips})
  %i = s32[] get-tuple-element(%a), index=0
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}

%body (b: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {{
  %b = (s32[], f32[16,8]{{1,0}}) parameter(0)
  %one = s32[] constant(1)
  %j = s32[] get-tuple-element(%b), index=0
  %next = s32[] add(%j, %one)
  %p = f32[16,8]{{1,0}} get-tuple-element(%b), index=1
{lines}
  ROOT %t = (s32[], f32[16,8]{{1,0}}) tuple(%next, %p)
}}

"""
RUN_LOOP = (
    "  %zero = s32[] constant(0)\n  %init = (s32[], f32[16,8]{1,0}) tuple(%zero, %p)\n"
    "  %w = (s32[], f32[16,8]{1,0}) while(%init), condition=%cond, body=%body"
)


def loop(*lines: str, trips: int = 5, direction: str = "LT") -> str:
    return LOOP.format(trips=trips, direction=direction, lines="\n".join(lines))


def test_a_loop_repeats_its_body():
    body = loop(start("s", 7), kernel("k", 4), done("d", "s"))
    assert seconds(replay(RUN_LOOP, others=body)) == (35, 20, 35, 15)
    assert seconds(replay(RUN_LOOP, others=loop(kernel("k", 4), trips=0))) == (0, 0, 0, 0)


def test_a_loop_meets_what_is_under_way_once():
    body = loop(reduce("r", 1), kernel("k", 1), trips=3)
    found = replay(start("s", 10), RUN_LOOP, done("d", "s"), others=body)
    assert seconds(found) == (10 + 2 + 2 + 2, 3, 13, 13)


def test_an_asynchronous_pair_may_span_iterations():
    waits = "  %d = f32[64,8]{1,0} all-gather-done(%p)"
    body = loop(waits, kernel("k", 4), start("s", 7), kernel("l", 5), trips=10)
    # Of 7 s 5 are hidden in each iteration; the last one's are waited for at the end of the step.
    assert seconds(replay(RUN_LOOP, others=body)) == (10 * 11, 90, 70, 20)


def test_a_loop_of_unknown_length_runs_once_and_says_so():
    found = replay(RUN_LOOP, others=loop(kernel("k", 4), direction="NE", trips=-3))
    assert seconds(found) == (4, 4, 0, 0)
    assert "trip count unknown" in found.assumptions[0]


def test_a_conditional_takes_its_slowest_branch_and_says_so():
    branches = "".join(
        f"%{name} (p: f32[16,8]) -> f32[16,8] {{\n  %p = f32[16,8]{{1,0}} parameter(0)\n{line}\n}}\n\n"
        for name, line in [("quick", kernel("k", 3)), ("slow", reduce("r", 5))]
    )
    for order in ("%quick, %slow", "%slow, %quick"):
        line = (
            "  %q = s32[] parameter(1)\n"
            f"  %c = f32[16,8]{{1,0}} conditional(%q, %p, %p), branch_computations={{{order}}}"
        )
        found = replay(kernel("l", 1), line, others=branches)
        assert seconds(found) == (6, 1, 5, 5)
        assert found.assumptions == ("conditional %c: the largest of 2 branches taken",)


class Bytes(Told):
    """A second a byte, or a floating-point operation where there are more of them."""

    def kernel_s(self, work: Work) -> float:
        return max(work.bytes, sum(f for _, f in work.matmul_flops) + work.element_flops)


def call(target: str, config: str = "{}") -> str:
    return (
        f'  %c = f32[16,8]{{1,0}} custom-call(%p), custom_call_target="{target}", '
        f"backend_config={config}"
    )


def test_a_call_that_cannot_be_costed_is_named_with_its_share():
    found = replay(call("mystery"), "  %n = f32[16,8]{1,0} negate(%p)", prices=Bytes())
    assert found.unmodelled == (("custom call mystery x1: only its memory traffic", 0.5),)
    assert found.total_s == found.compute_s == 4 * 512
    many = replay(RUN_LOOP, others=loop(call("mystery")), prices=Bytes())
    ((what, share),) = many.unmodelled
    assert what == "custom call mystery x5: only its memory traffic"
    assert 0.95 < share < 1


def test_a_declared_cost_is_believed():
    cost = '{"custom_call_config":{"cost_estimate":{"flops":"9000","transcendentals":"7","bytes_accessed":"5"}}}'
    found = replay(call("tpu_custom_call", cost), prices=Bytes())
    assert found.unmodelled == ()
    assert found.total_s == 9007


@pytest.mark.parametrize("cycles", ["-12", "-9223372036854775808"])
def test_cycles_that_cannot_be_are_ignored_and_named(cycles):
    seen: list[Work] = []

    @dataclasses.dataclass
    class Seeing(Told):
        def kernel_s(self, work: Work) -> float:
            seen.append(work)
            return 1.0

    found = replay(kernel("k", 3).replace('"3"', f'"{cycles}"'), prices=Seeing())
    assert [work.cycles for work in seen] == [None]
    assert found.assumptions == (f"%k: its {cycles} estimated cycles cannot be, and are ignored",)


@pytest.mark.parametrize(
    "line",
    [
        # libtpu, then XLA:GPU: activations offloaded from a scan
        "  %s = ((f32[16,8]{1,0:T(8,128)S(5)}, f32[1,8]{1,0}, s32[]), f32[16,8]{1,0:T(8,128)S(5)}, "
        "u32[]) dynamic-update-slice-start(%h, %u, %i, %i)",
        "  %s = ((f32[16,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[16,8]{1,0:S(5)}, u32[]) "
        "fusion-start(%h, %u, %i, %i), kind=kCustom, calls=%moved",
    ],
)
def test_what_moves_to_the_host_overlaps_and_is_named(line):
    moved = """\
%moved (a: f32[16,8], b: f32[1,8], c: s32[], d: s32[]) -> f32[16,8] {
  %a = f32[16,8]{1,0:S(5)} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %c = s32[] parameter(2)
  %d = s32[] parameter(3)
  ROOT %e = f32[16,8]{1,0:S(5)} dynamic-update-slice(%a, %b, %c, %d)
}

"""
    opcode = "fusion" if "fusion" in line else "dynamic-update-slice"
    found = replay(
        "  %h = f32[16,8]{1,0:S(5)} parameter(1)\n  %u = f32[1,8]{1,0} parameter(2)",
        "  %i = s32[] parameter(3)",
        line + ', backend_config={"estimated_cycles":"6"}',
        kernel("k", 4),
        f"  %d = f32[16,8]{{1,0:S(5)}} {opcode}-done(%s)",
        others=moved,
    )
    assert seconds(found) == (6, 6, 0, 0)
    (said,) = found.assumptions
    assert "host" in said


class Launches(Told):
    """A second a launch."""

    def kernel_s(self, work: Work) -> float:
        return 1.0


def test_single_numbers_are_free_on_tpu_alone():
    lines = (
        "  %i = u32[1]{0} parameter(1)",
        "  %j = u32[1]{0:S(6)} add(%i, %i)",
        "  %k = u32[1]{0:S(6)} copy(%j)",
        "  %n = f32[16,8]{1,0} negate(%p)",
    )
    tiled = ", entry_computation_layout={(f32[16,8]{1,0:T(8,128)})->f32[]}"
    assert seconds(replay(*lines, prices=Launches(), tiled=tiled)) == (1, 1, 0, 0)
    assert seconds(replay(*lines, prices=Launches())) == (3, 3, 0, 0)


CHAIN = """\
%start.{n} (s: f32[16,8]) -> (f32[16,8], f32[64,8], u32[]) {{
  %s = f32[16,8]{{1,0}} parameter(0)
  %ag = f32[64,8]{{1,0}} all-gather(%s), {gather}
  ROOT %cc = (f32[16,8]{{1,0}}, f32[64,8]{{1,0}}, u32[]{{:S(2)}}) custom-call(%ag), custom_call_target="AsyncCollectiveStart"
}}

%during.{n} (d: f32[16,8], e: f32[16,8]) -> (f32[16,8], f32[64,8]) {{
  %d = f32[16,8]{{1,0}} parameter(0)
  %ag = f32[64,8]{{1,0}} all-gather(%d), {gather}
  %e = f32[16,8]{{1,0}} parameter(1)
  %n = f32[16,8]{{1,0}} negate(%e)
  ROOT %t = (f32[16,8]{{1,0}}, f32[64,8]{{1,0}}) tuple(%n, %ag)
}}

%done.{n} (f: f32[16,8]) -> f32[64,8] {{
  %f = f32[16,8]{{1,0}} parameter(0)
  %ag = f32[64,8]{{1,0}} all-gather(%f), {gather}
  ROOT %cc = f32[64,8]{{1,0}} custom-call(%f, %ag), custom_call_target="AsyncCollectiveDone"
}}

"""


def chain(number: int, seconds: int) -> str:
    """As libtpu prints it; collectives that shard_map makes all have channel 1."""
    gather = (
        "channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, "
        f'frontend_attributes={{chain_id="{number}"}}, metadata={{op_name="{seconds}"}}, '
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    )
    return CHAIN.format(n=number, gather=gather)


def fusion(name: str, calls: str, reads: str = "p", cycles: int = 0) -> str:
    config = f', backend_config={{"estimated_cycles":"{cycles}"}}' if cycles else ""
    return (
        f"  %{name} = f32[64,8]{{1,0}} fusion({', '.join('%' + r for r in reads.split())}), "
        f"kind=kCustom, calls=%{calls}{config}"
    )


def test_tpu_collectives_run_from_the_fusion_that_starts_them_to_the_one_that_ends_them():
    both = chain(0, 7) + chain(1, 5)
    one = fusion("a", "start.0"), fusion("b", "during.0", "p p", 4), fusion("c", "done.0")
    assert seconds(replay(*one, kernel("k", 9), others=both)) == (16, 13, 7, 3)
    lines = (
        fusion("a", "start.0"),
        fusion("b", "start.1"),
        fusion("c", "during.0", "p p", 4),
        fusion("d", "done.0"),
        fusion("e", "during.1", "p p", 4),
        fusion("f", "done.1"),
    )
    assert seconds(replay(*lines, others=both)) == (12, 8, 12, 4)


def test_what_is_fused_with_a_collective_adds_its_operations_and_no_traffic():
    fused = """\
%fused (a: f32[16,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[16,8]{1,0} multiply(%a, %a)
  ROOT %r = f32[16,8]{1,0} all-reduce(%b), channel_id=2, to_apply=%sum, replica_groups={}, metadata={op_name="7"}
}

"""
    found = replay(fusion("f", "fused"), others=fused, prices=Bytes())
    assert seconds(found) == (7 + 128, 128, 7, 7)
