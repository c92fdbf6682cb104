"""Layouts by hand: their names, their shardings, and that each computes the unsharded step."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.records.trial import Estimate, Failure
from autoshard.rungs.compile import hlo
from autoshard.target.cost import CostModel
from autoshard.target.target import find_target
from experiments import pod_by_hand, sizes
from experiments.handwritten import cases, rules
from experiments.handwritten.layouts import HandLayout, Rules
from experiments.handwritten.parameters import names_of
from experiments.handwritten.step import prepare, train_step
from experiments.pod_sizes import LLAMA3, LLAMA3_TINY, MIXTRAL, MIXTRAL_TINY
from models.decoder import DecoderConfig
from models.mlp import MLPConfig
from tests.analysed import CONSTANTS
from tests.compiled import compiled
from tests.hardware import needs

# Float32, so that routing is the same under every layout; short, and layers of a number of its own.
SHORT = {"dtype": "float32", "sequence": 32, "layers": 3, "attention": "full", "remat": "none"}
DENSE = LLAMA3_TINY.replace(**SHORT)
CASES = {
    "llama3": cases.pod_case(DENSE),
    "llama3 in 2 parts": cases.pod_case(DENSE.replace(accumulate=2)),
    "mixtral": cases.pod_case(MIXTRAL_TINY.replace(**SHORT, group=16, loss_parts=1)),
    "mlp": cases.mlp_case(sizes.MLPSize(model=MLPConfig(width=64, layers=4), batch_size=16)),
}
LAYOUTS = {
    name: {**rules.pod_layouts(case.config, 8), **rules.hand_layouts(case.family, case.config, 8)}
    for name, case in CASES.items()
}
# One of each kind of step and of rules; a layout takes 2 to 10 seconds to compile.
RUN = [
    ("mlp", "data parallel, optimizer divided"),
    ("llama3", "fsdp x tensor parallel 4x2"),
    ("llama3", "data parallel, gradients apart, optimizer divided"),
    ("mixtral", "distributed optimizer x tensor parallel 4x2"),
]
SLOWLY = [
    ("mlp", "fsdp, vectors whole"),
    ("mlp", "fsdp x tensor parallel 4x2"),
    ("mlp", "tensor parallel"),
    ("llama3", "data parallel"),
    ("llama3", "fsdp"),
    ("llama3", "data x tensor parallel 4x2"),
    ("llama3", "distributed optimizer"),
    ("llama3", "jax cookbook fsdp"),
    ("llama3", "maxtext fsdp x tensor 4x2"),
    ("llama3 in 2 parts", "data parallel"),
    ("mixtral", "fsdp x tensor parallel 2x4"),
    ("mixtral", "maxtext fsdp x expert 2x4"),
    ("mixtral", "maxtext fsdp x expert 2x4 by batch"),
]


class Ran(NamedTuple):
    loss: float
    moments: object
    text: str


@functools.cache
def initial(model):
    _, init = train_step(CASES[model], None)
    return jax.device_get(compiled(init)())


def two_steps(step, state, batch):
    for _ in range(2):
        state, metrics = step(state, batch)
    return float(metrics["loss"]), jax.device_get(state["opt_state"][0].mu), state


@functools.cache
def unsharded(model):
    """Loss and moments after two steps without a layout, in one part."""
    step, _ = train_step(dataclasses.replace(CASES[model], accumulate=1), None)
    batch = CASES[model].sample(0)
    run_step = compiled(step, initial(model), batch)
    loss, moments, _ = two_steps(run_step, initial(model), batch)
    return loss, moments


@functools.cache
def run(model, name):
    layout = LAYOUTS[model][name]
    prepared = prepare(CASES[model], layout, layout.mesh(jax.devices()))
    state = jax.device_put(initial(model), prepared.state)
    batch = jax.device_put(CASES[model].sample(0), prepared.batch)
    run_step = compiled(prepared.step, *prepared.args)
    loss, moments, state = two_steps(run_step, state, batch)
    assert jax.tree.map(lambda x: x.sharding, state) == prepared.state
    return Ran(loss, moments, run_step.as_text())


def specs(model, name, part="params"):
    """Leaf of a part of the state -> its spec."""
    layout = LAYOUTS[model][name]
    state = prepare(CASES[model], layout, layout.abstract_mesh()).state[part]
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): tuple(x.spec) for path, x in leaves}


def gathered(text):
    """Shapes of the float32 results of all-gathers; the batch is gathered as integers."""
    return re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", text)


def collectives(model, name):
    """(kind, how often a step does it) of each collective."""
    axes = LAYOUTS[model][name].axes
    found = hlo.count(hlo.parse(run(model, name).text), axes).collectives
    return [(one.kind, one.count) for one in found]


def test_the_layouts_of_8_devices() -> None:
    """Megatron refuses 8 devices for 4 heads."""
    everywhere = [
        "data parallel",
        "data parallel, optimizer divided",
        "fsdp",
        "fsdp, vectors whole",
    ]
    tensor = [f"{x} x tensor parallel {y}" for x in ("data", "fsdp") for y in ("4x2", "2x4")]
    apart = [f"data parallel, gradients apart{x}" for x in ("", ", optimizer divided")]
    maxtext = ["maxtext fsdp", "maxtext fsdp x tensor 4x2", "maxtext fsdp x tensor 2x4"]
    megatron = [*everywhere, "tensor parallel", *tensor]
    one_host = [*megatron, *apart, "jax cookbook fsdp", *maxtext]
    decoder = sizes.DECODER.model
    assert list(rules.hand_layouts("mlp", sizes.MLP.model, 8)) == megatron
    assert list(rules.hand_layouts("decoder", decoder, 8)) == one_host
    few_heads = dataclasses.replace(decoder, heads=4, kv_heads=4)
    refused = set(one_host) - set(rules.hand_layouts("decoder", few_heads, 8))
    assert refused == {"tensor parallel"}
    on_pods = [
        *("data parallel", "fsdp", "fsdp x tensor parallel 4x2", "fsdp x tensor parallel 2x4"),
        "distributed optimizer",
        *(f"distributed optimizer x tensor parallel {x}" for x in ("4x2", "2x4")),
        *maxtext,
    ]
    assert list(rules.pod_layouts(LLAMA3.model, 8)) == on_pods
    experts = [
        f"maxtext fsdp x expert {x}{y}" for x in ("4x2", "2x4", "1x8") for y in ("", " by batch")
    ]
    assert list(rules.pod_layouts(MIXTRAL.model, 8)) == [*on_pods, *experts]


@pytest.mark.parametrize(
    ("model", "name"), [*RUN, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOWLY)]
)
def test_every_layout_computes_what_the_unsharded_step_does(model: str, name: str) -> None:
    loss, moments = unsharded(model)
    np.testing.assert_allclose(run(model, name).loss, loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(np.linalg.norm(a - b), 1e-3 * np.linalg.norm(b)),
        run(model, name).moments,
        moments,
    )


def test_the_state_is_sharded_as_named() -> None:
    layers = "['layers']"
    fsdp = specs("llama3", "fsdp")
    assert fsdp[f"{layers}['mlp']['down']"] == (None, None, "data")
    assert fsdp["['norm']['scale']"] == ("data",)
    assert all(any(spec) for spec in fsdp.values())
    assert specs("llama3", "distributed optimizer") == fsdp  # at rest
    both = specs("llama3", "fsdp x tensor parallel 4x2", "opt_state")
    assert both[f"[0].nu{layers}['mlp']['gate']"] == (None, "data", "model")
    assert both["[0].count"] == ()
    wide = specs("llama3", "tensor parallel")
    assert wide[f"{layers}['attention']['query']"] == (None, None, "model", None)
    # 4 key-value heads do not divide by 8.
    assert wide[f"{layers}['attention']['key']"] == (None,) * 4
    divided = specs("mlp", "tensor parallel")
    assert divided[f"{layers}[0]['kernel']"] == (None, "model")
    assert divided[f"{layers}[1]['kernel']"] == ("model", None)


def test_jax_s_cookbook_divides_the_stream_and_what_comes_out_of_heads_by_these() -> None:
    leaves = specs("llama3", "jax cookbook fsdp")
    layer = "['layers']"
    assert {path: leaves[path] for path in leaves if "['value']" not in path} == {
        f"{layer}['attention']['query']": (None, "fsdp", None, None),
        f"{layer}['attention']['key']": (None, "fsdp", None, None),
        f"{layer}['attention']['out']": (None, "fsdp", None, None),
        f"{layer}['mlp']['gate']": (None, "fsdp", None),
        f"{layer}['mlp']['up']": (None, "fsdp", None),
        f"{layer}['mlp']['down']": (None, None, "fsdp"),
        f"{layer}['attention_norm']['scale']": (None, None),
        f"{layer}['mlp_norm']['scale']": (None, None),
        "['norm']['scale']": (None,),
        "['embedding']": (None, None),
        "['head']": ("fsdp", None),
    }


def test_maxtext_divides_the_width_at_rest_and_heads_mlp_and_vocabulary() -> None:
    laid = specs("llama3", "maxtext fsdp x tensor 4x2")
    assert laid["['layers']['mlp']['gate']"] == (None, "fsdp", "tensor")
    assert laid["['layers']['mlp_norm']['scale']"] == (None, "tensor")
    assert laid["['embedding']"] == ("tensor", "fsdp")
    experts = specs("mixtral", "maxtext fsdp x expert 2x4")
    assert experts["['layers']['experts']['up']"] == (None, "expert", "fsdp", None)
    # The expert axis divides other parameters as fsdp does.
    query = experts["['layers']['attention']['query']"]
    assert query == (None, ("fsdp", "expert"), None, None)


def test_a_parameter_of_one_dimension_and_one_that_does_not_divide_stay_whole() -> None:
    layout = HandLayout(
        name="x",
        axes=(("data", 2), ("model", 4)),
        params={"norm": ("data", "model"), "heads": ("model",), "mlp": ("model", "data")},
        spread=("data",),
        vectors_whole=True,
    )
    laid = Rules(layout, layout.mesh(jax.devices()))
    assert laid.param(("norm",), (8,)).spec == P("model")
    assert laid.param((None,), (8,)).spec == P(None)
    assert laid.param((None, None), (2, 8, 16)).spec == P(None, None, "data")
    assert laid.param((None, None), (16, 6, 3)).spec == P(None, "data", None)
    assert laid.param(("heads", None), (6, 3)).spec == P("data", None)
    assert laid.param(("heads", "mlp"), (8, 8)).spec == P("model", "data")
    assert laid.param(("mlp", "heads"), (8, 8)).spec == P(("model", "data"), None)


def test_a_divided_optimizer_is_an_eighth_and_gathers_each_parameter_once() -> None:
    name = "data parallel, optimizer divided"
    assert not any(any(spec) for spec in specs("mlp", name).values())
    layout = LAYOUTS["mlp"][name]
    prepared = prepare(CASES["mlp"], layout, layout.mesh(jax.devices()))
    moments = jax.tree.leaves(prepared.args[0]["opt_state"])
    shardings = jax.tree.leaves(prepared.state["opt_state"])
    for x, sharding in zip(moments, shardings, strict=True):
        if x.shape:
            assert math.prod(x.shape) == 8 * math.prod(sharding.shard_shape(x.shape))
    count = len(gathered(run("mlp", name).text))
    assert 0 < count <= len(jax.tree.leaves(prepared.args[0]["params"]))


def test_parameters_are_gathered_layer_by_layer() -> None:
    found = gathered(run("llama3", "fsdp x tensor parallel 4x2").text)
    assert len(found) > 8
    assert not [shape for shape in found if shape.startswith("3,")]


@pytest.mark.slow
def test_the_distributed_optimizer_gathers_every_parameter_once_before_the_loops() -> None:
    loops, entry = run("llama3", "distributed optimizer").text.split("\nENTRY ")
    params = jax.tree.leaves(initial("llama3")["params"])
    assert sorted(gathered(entry)) == sorted(",".join(map(str, x.shape)) for x in params)
    assert not gathered(loops)


@pytest.mark.slow
def test_tokens_travel_to_the_experts_or_their_weights_come() -> None:
    def exchanges(name):
        return run("mixtral", name).text.count(" all-to-all(")

    # To the experts and back, forward and backward.
    by_expert = exchanges("maxtext fsdp x expert 2x4")
    assert by_expert >= exchanges("maxtext fsdp x expert 2x4 by batch") + 4


def test_gradients_that_are_apart_are_summed_behind_the_loops() -> None:
    found = collectives("llama3", "data parallel, gradients apart, optimizer divided")
    sums = [n for kind, n in found if kind in ("all_reduce", "reduce_scatter")]
    leaves = len(jax.tree.leaves(initial("llama3")["params"]))
    assert max(sums) == 1 and sum(sums) <= leaves + 3  # and those of the metrics


@pytest.mark.parametrize("size", [LLAMA3, MIXTRAL], ids=["llama3", "mixtral"])
def test_full_size_lowers_without_devices(size) -> None:
    needs("tpu")
    case, layouts = cases.pod_case(size), rules.pod_layouts(size.model, 64)
    target = find_target("v5p:4x4x4")
    for name in ("fsdp x tensor parallel 8x8", "maxtext fsdp x tensor 8x8"):
        module = pod_by_hand.lowered(case, layouts[name], target)
        assert module.mesh == layouts[name].axes and module.platform == "tpu"
        assert b"sharding_constraint" in module.stablehlo


def test_a_batch_that_does_not_divide_is_refused() -> None:
    layout = rules.pod_layouts(LLAMA3.model, 256)["fsdp"]
    with pytest.raises(ValueError, match=r"fsdp: a batch of 128 in 2 parts .* multiple of 512"):
        prepare(cases.pod_case(LLAMA3.replace(accumulate=2)), layout, layout.abstract_mesh())


def test_a_layout_that_does_not_divide_is_a_row_and_no_end() -> None:
    """A row for 128 sequences over 72 devices, say; the others are still judged."""
    uneven = HandLayout(name="uneven", axes=(("data", 3),), activations={"batch": ("data",)})
    one = HandLayout(name="one", axes=(("data", 1),))
    layouts = {"uneven": uneven, "one": one, "large": one}
    case = cases.mlp_case(sizes.MLPSize(model=MLPConfig(width=8, layers=2), batch_size=8))
    here = find_target(jax.devices()[:1])
    found = pod_by_hand.judged(case, layouts, here, CostModel(CONSTANTS))
    assert list(found) == list(layouts)
    assert isinstance(found["uneven"], Failure) and "divide over the 3" in found["uneven"].message
    assert isinstance(found["one"], Estimate)
    peak, time_s = found["one"].peak_memory_bytes, found["one"].time_s
    rows = pod_by_hand.rows(0.5 * time_s, peak, found)
    assert [row["verdict"] for row in rows] == ["unsupported", "met", "met"]
    assert rows[1]["ratio"] == pytest.approx(0.5)
    (row,) = pod_by_hand.rows(time_s, peak, {"one": found["one"]})
    assert row["verdict"] == "equal"
    (row,) = pod_by_hand.rows(2 * time_s, peak, {"one": found["one"]})
    assert row["verdict"] == "missed"
    (row,) = pod_by_hand.rows(time_s, peak - 1, {"one": found["one"]})
    assert row["verdict"] == "does not fit"


def test_a_parameter_without_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp: no names for the parameter \['odd'\]; expected"):
        names_of("mlp", "['odd']")


def test_the_models_of_compare_have_layouts() -> None:
    for case in (cases.decoder_case(sizes.DECODER), cases.mlp_case(sizes.MLP)):
        alone = rules.replicated(8)
        layouts = rules.hand_layouts(case.family, case.config, 8)
        for layout in (alone, *layouts.values()):
            prepared = prepare(case, layout, layout.mesh(jax.devices()))
            shardings = jax.tree.leaves((prepared.state, prepared.batch))
            whole = all(sharding.is_fully_replicated for sharding in shardings)
            assert shardings and whole == (layout is alone), layout


def test_samples_have_the_shapes_of_the_batch() -> None:
    size = sizes.DecoderSize(model=DecoderConfig(sequence=8, layers=1), batch_size=2)
    for case in (cases.decoder_case(size), CASES["mlp"], CASES["mixtral"]):
        batch = jax.eval_shape(lambda case=case: case.sample(0))
        assert jax.tree.map(str, batch) == jax.tree.map(str, case.batch)
