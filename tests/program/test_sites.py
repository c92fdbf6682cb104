"""Sites: where they are, which rules they take, and that they can be found again once lowered."""

import collections
import dataclasses
import math
import re

import jax
import pytest
from jax.sharding import PartitionSpec

from autoshard.compat.jaxpr import jaxprs
from autoshard.compat.shardy import stablehlo
from autoshard.lowering import lower as lowering
from autoshard.lowering.problem import SearchProblem
from autoshard.program import rewrite
from autoshard.program.sites import Place, Site, site_of_location
from autoshard.records.trial import Collective
from autoshard.rungs.compile import hlo
from autoshard.space.specs import Specs
from tests import programs
from tests.analysed import analyse, baseline, judge, subject, target
from tests.programs import BATCH, EMBED, LAYERS, MLP, SEQUENCE


def constrained(of: SearchProblem) -> jaxprs.ClosedJaxpr:
    """The step with an open constraint at every site."""
    return rewrite.constrained(of.analysis.sites, lambda s: jaxprs.open_sharding(len(s.shape)))


def constraints(closed: jaxprs.ClosedJaxpr) -> list[jaxprs.JaxprEqn]:
    return [e for e in jaxprs.equations(closed.jaxpr) if e.primitive.name == "sharding_constraint"]


def test_a_tag_goes_through_a_location() -> None:
    site = Site(index=17, place=Place.USE, storage=True, shape=(2,), operation="", source="")
    assert site_of_location(f'loc("jit(f)/{site.tag}/sharding_constraint")') == 17
    assert site_of_location('loc("jit(f)/sharding_constraint")') is None


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_every_lowered_site_is_known_by_its_tag_and_shape(name: str) -> None:
    analysis = subject(name).analysis
    by_tag = {
        op.attributes[stablehlo.TAG].value: stablehlo.shape_of(op.results[0])
        for op in stablehlo.walk(stablehlo.main_function(analysis.module).regions[0].blocks[0])
        if op.name == "sdy.sharding_constraint"
    }
    assert set(by_tag) == set(analysis.site_of_tag)
    for tag, index in analysis.site_of_tag.items():
        assert by_tag[tag] == analysis.sites.sites[index].shape
    assert set(analysis.site_of_tag.values()) == set(analysis.axes.sites)


def test_a_step_is_covered_by_some_dozens_of_sites() -> None:
    assert 50 <= len(subject("scanned_gpt").analysis.sites.sites) <= 130


def test_an_unrolled_scan_has_several_operations_for_one_site() -> None:
    counts = collections.Counter(subject("scan_unrolled_by_four").analysis.site_of_tag.values())
    assert max(counts.values()) >= 4


def test_a_function_jitted_once_and_called_six_times_stays_one_function() -> None:
    of = subject("jit_called_six_times")
    shapes = lowering.shapes(of.analysis.program.inputs)

    def calls(closed: jaxprs.ClosedJaxpr) -> list[int]:
        """How often each jitted function is called."""
        bodies = [
            id(jaxprs.open_jaxpr(e.params["jaxpr"]))
            for e in closed.jaxpr.eqns
            if e.params.get("name") == "_shared_layer"
        ]
        return sorted(collections.Counter(bodies).values())

    def functions(closed: jaxprs.ClosedJaxpr) -> int:
        return str(stablehlo.lower_abstract(closed, shapes, "cpu")).count("func.func private")

    plain, sited = of.analysis.program.step, constrained(of)
    assert calls(sited) == calls(plain) and max(calls(sited)) >= 5
    assert functions(sited) == functions(plain)


def test_no_site_is_inside_a_manual_region() -> None:
    of = subject("manual_region")
    found = [e for e in jaxprs.equations(constrained(of).jaxpr) if e.primitive.name == "shard_map"]
    assert found
    for eqn in found:
        inner = str(eqn.params["jaxpr"])
        assert "sharding_constraint" not in inner
    assert of.analysis.sites.sites


def test_the_rewritten_step_keeps_the_user_s_source_lines() -> None:
    of = subject("scanned_gpt")
    plain, sited = of.analysis.program.step, constrained(of)

    def lines(closed: jaxprs.ClosedJaxpr) -> list[str]:
        return [
            jaxprs.source_line(e)
            for e in jaxprs.equations(closed.jaxpr)
            if e.primitive.name != "sharding_constraint"
        ]

    assert lines(plain) == lines(sited)
    own = [jaxprs.source_line(e) for e in constraints(sited)]
    assert own and all(not line or "tests/programs.py:" in line for line in own)
    named = [s for s in of.analysis.sites.sites if s.place is Place.RESULT]
    assert all("tests/programs.py:" in s.source for s in named if s.operation == "dot_general")


def test_closing_no_site_leaves_the_step_as_it_was() -> None:
    closed = rewrite.constrained(subject("scanned_gpt").analysis.sites, lambda site: None)
    assert not constraints(closed)
    assert str(closed) == str(subject("scanned_gpt").analysis.program.step)


def storage_of(
    of: SearchProblem, operation: str, shape: tuple[int, ...], place: Place
) -> set[bool]:
    return {
        s.storage
        for s in of.analysis.sites.sites
        if s.operation == operation and s.shape == shape and s.place is place
    }


def test_roles_in_a_scanned_gpt() -> None:
    of = subject("scanned_gpt")
    activation = (BATCH, SEQUENCE, MLP)
    assert storage_of(of, "dot_general", activation, Place.RESULT) == {False}
    # Parameters come to their compute spec where they are used, gradients are storage at once.
    assert storage_of(of, "dot_general", (EMBED, MLP), Place.USE) == {False}
    assert storage_of(of, "transpose", (EMBED, MLP), Place.RESULT) == {True}
    # Stacks of parameters and of gradients.
    assert storage_of(of, "scan", (LAYERS, EMBED, MLP), Place.RESULT) == {True}
    assert storage_of(of, "scan", (EMBED, MLP), Place.ENTRY) == {True}
    assert storage_of(of, "scan", (BATCH, SEQUENCE, EMBED), Place.ENTRY) == {False}


# The roles at work: what FSDP sends, as the partitioner and as the compiler see it.

ONE_LAYER = EMBED * MLP * 4  # bytes of its largest parameter
SMALLEST_STACK = LAYERS * EMBED * programs.HEADS * programs.HEAD_DIM * 4
LARGEST_TABLE = programs.VOCAB * EMBED * 4  # embedding and output, which no loop holds


def sends_no_stack(collectives: list[Collective]) -> bool:
    gathers = [c for c in collectives if c.kind == "all_gather"]
    sums = [c for c in collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert gathers and sums
    return max(c.bytes for c in gathers + sums) <= LARGEST_TABLE < SMALLEST_STACK


def test_fsdp_gathers_no_stacked_parameter_and_reduces_no_stacked_gradient() -> None:
    of = subject("scanned_gpt")
    estimate = judge(of, baseline(of.space, "FSDP"))
    assert sends_no_stack(list(estimate.collectives))
    layers = [c for c in estimate.collectives if c.count == LAYERS]
    # Parameters are gathered layer by layer: six of them forward, and again backward.
    assert sum(c.kind == "all_gather" and c.bytes <= ONE_LAYER for c in layers) >= 12
    assert sum(c.kind == "reduce_scatter" for c in layers) >= 6


def compiled(of: SearchProblem, specs: Specs) -> jax.stages.Compiled:
    step = lowering.jit_step(of.analysis, specs, target())
    return step.lower(*lowering.shapes(of.analysis.program.inputs)).compile()


def test_fsdp_compiled_sends_no_stack_either() -> None:
    of = subject("scanned_gpt")
    specs = of.space.specs(baseline(of.space, "FSDP"))
    text = compiled(of, specs).as_text()
    counts = hlo.count(hlo.parse(text), specs.mesh)
    # XLA merges small all-reduces: arrays are looked at one by one.
    largest = 0
    for computation in hlo.parse(text).computations:
        for i in computation.instructions:
            if i.opcode.removesuffix("-start") in ("all-gather", "all-reduce", "reduce-scatter"):
                largest = max(largest, *(math.prod(s.dims) * 4 for s in i.shapes))
    assert 0 < largest <= LARGEST_TABLE
    assert {c.kind for c in counts.collectives} >= {"all_gather"}


def test_fsdp_compiled_gathers_parameters_after_their_cast() -> None:
    """Half the bytes of a gather before it. XLA:CPU has no bf16: its name tells, not its type."""
    of = subject("bfloat16")
    text = compiled(of, of.space.specs(baseline(of.space, "FSDP"))).as_text()
    gathers = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    named = [found[1] for line in gathers if (found := re.search(r'op_name="([^"]*)"', line))]
    assert len(named) == len(gathers) > 0
    assert not [name for name in named if "convert_element_type" in name]


def test_compute_rules_at_every_site_would_destroy_fsdp() -> None:
    """The measure above can fail: with one role for all, FSDP reduces whole gradients."""
    of = analyse(programs.scanned_mlp())
    layout = baseline(of.space, "FSDP")
    right = judge(of, layout)
    sites = tuple(dataclasses.replace(site, storage=False) for site in of.space.sites)
    other = dataclasses.replace(of, space=dataclasses.replace(of.space, sites=sites))
    wrong = judge(other, layout)
    assert wrong.peak_memory_bytes > right.peak_memory_bytes
    assert wrong.bytes_by_kind() != right.bytes_by_kind()


def test_a_site_of_the_running_step_has_the_sharding_of_its_spec() -> None:
    of = subject("custom_derivatives")
    specs = of.space.specs(baseline(of.space, "FSDP x TP", 2))
    closed = lowering.constrained_step(of.analysis, specs, target().mesh(specs.mesh))
    found = constraints(closed)
    assert len(found) == len(specs.sites)

    def text(spec: tuple[object, ...]) -> str:
        return str(PartitionSpec(*spec))

    wanted = [
        tuple(
            PartitionSpec.UNCONSTRAINED if is_open else (axes or None)
            for axes, is_open in zip(s.spec, s.open, strict=True)
        )
        for s in specs.sites.values()
    ]
    placed = [text(tuple(e.params["sharding"].spec)) for e in found]
    assert sorted(placed) == sorted(text(spec) for spec in wanted)


def test_tokens_travel_to_experts_and_back() -> None:
    of = subject("grouped_experts")
    layout = baseline(of.space, "FSDP x EP", mesh_axes=2)
    (data, _), (own, ways) = layout.mesh
    judged = judge(of, layout)
    # To the experts, back, and the gradient to the experts again: nothing asks for that of x.
    slots = BATCH * 8 * (2 * SEQUENCE // 8) * EMBED * 4 // 8
    small = EMBED * 8 * 4  # the router
    travels = [c for c in judged.collectives if c.kind == "all_to_all" and c.bytes > small]
    assert [(c.mesh_axes, c.bytes, c.count) for c in travels] == [((own,), slots, 1)] * 3
    gathered = {c.mesh_axes for c in judged.collectives if c.kind == "all_gather"}
    others = [c for c in judged.collectives if own in c.mesh_axes and c.kind != "all_to_all"]
    assert gathered and all(c.bytes <= small for c in others), "no expert is gathered"
    assert ways == 2 and data == "x"


def test_what_passes_into_a_product_is_left_alone_where_both_ends_agree() -> None:
    of = subject("grouped_experts")
    passing = [s for s in of.analysis.sites.sites if s.passing]
    to, back = ({s.index for s in passing if s.batch_first is first} for first in (False, True))
    assert to and back
    for name, speak in (("FSDP", False), ("FSDP x EP", True)):
        placed = of.space.specs(baseline(of.space, name)).sites
        assert bool(to & set(placed)) is bool(back & set(placed)) is speak, name


def test_only_products_with_parameters_of_their_own_have_passing_sites() -> None:
    for name in ("scanned_gpt", "rnn", "conv_net", "mixture_of_experts", "clip"):
        passing = [s for s in subject(name).analysis.sites.sites if s.passing]
        assert bool(passing) is (name == "mixture_of_experts"), name
