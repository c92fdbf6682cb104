"""The hand-written layouts: which there are, what they divide; they import no autoshard."""

import dataclasses
import math
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from experiments import sizes
from experiments.handwritten import rules, sized, steps
from experiments.handwritten.layouts import HandLayout, Rules
from experiments.zoo.cases import CASES, case
from tests.experiments.hand_layouts import of, specs


def test_the_layouts_of_8_devices():
    fsdp = ["fsdp", "fsdp, vectors whole"]
    everywhere = ["data parallel", "data parallel, optimizer divided", *fsdp]
    tensor = [
        "tensor parallel",
        *(
            f"{other} x tensor parallel {shape}"
            for other in ("data", "fsdp")
            for shape in ("4x2", "2x4")
        ),
    ]
    megatron = [*everywhere, *tensor]
    # Four heads are not divided by eight devices: Megatron refuses.
    few_heads = [name for name in megatron if name != "tensor parallel"]
    apart = [f"data parallel, gradients apart{x}" for x in ("", ", optimizer divided")]
    maxtext = ["maxtext fsdp", *(f"maxtext fsdp x tensor {shape}" for shape in ("4x2", "2x4"))]
    experts = [
        f"maxtext fsdp x expert {shape}{end}"
        for shape in ("4x2", "2x4", "1x8")
        for end in ("", " by batch")
    ]
    images = ("resnet50", "resnet152", "linen_resnet", "unet")
    own = {
        "decoder": [*megatron, *apart, "jax cookbook fsdp", *maxtext],
        **{x: [*megatron, *apart] for x in ("recurrent", "linen_recurrent")},
        **dict.fromkeys(("vit", "linen_vit", "clip"), few_heads),
        "moe": [*megatron, *apart, *maxtext, "expert parallel", *experts],
        **{
            x: [name for name in few_heads if "optimizer divided" not in name] + more
            for x, more in (("encoder_decoder", apart[:1]), ("plain_gpt", ["jax cookbook fsdp"]))
        },
        "recommender": [
            *everywhere,
            "tables by rows",
            "large tables by rows, small ones whole",
            "tables by columns, exchanged at once",
        ],
        "graph_network": [*everywhere, "edge parallel"],
        **{x: [*everywhere, "data x spatial 4x2"] for x in images},
    }
    for name in CASES:
        assert list(steps.hand_steps(case(name, "small"), 8)) == own.get(name, megatron), name


def test_a_model_is_divided_by_as_many_devices_as_divide_the_heads_of_all_its_towers():
    clip = case("clip", "shrunk")  # 12 heads and 8
    names = [list(steps.hand_steps(clip, n)) for n in (4, 8)]
    assert ["tensor parallel" in some for some in names] == [True, False]
    assert ["data x tensor parallel 2x4" in some for some in names] == [False, True]
    assert "data x tensor parallel 2x8" not in steps.hand_steps(clip, 16)
    assert "data x tensor parallel 2x8" in steps.hand_steps(case("decoder", "small"), 16)


def test_every_case_has_layouts_and_no_other():
    assert sorted(rules.HAND_LAYOUTS) == sorted(CASES)
    unknown = dataclasses.replace(case("vit", "small"), name="unknown")
    with pytest.raises(ValueError, match="no hand layouts for 'unknown': expected one of"):
        steps.hand_steps(unknown, 8)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_fsdp_divides_all_that_divides(name, devices):
    leaves = specs(name, "fsdp", devices, "shrunk")
    assert any("['params']" in path for path in leaves)
    for path, (shape, part, _) in leaves.items():
        if "['params']" in path:
            layers = 1 if re.search(r"\['layers'\]\['|_L", path) else 0  # stacked ones stay whole
            divides = any(size % devices == 0 for size in shape[layers:])
            assert math.prod(shape) == math.prod(part) * (devices if divides else 1), path
    whole = specs(name, "fsdp, vectors whole", devices, "shrunk")
    for path, (shape, part, _) in whole.items():
        if "['params']" in path and (len(shape) == 1 or "norm" in path):
            assert part == shape, path


@pytest.mark.parametrize("name", CASES)
def test_a_layout_reaches_the_activations(name):
    chosen = case(name, "small")
    layout = steps.hand_steps(chosen, 8)["data parallel"]
    prepared = steps.prepare(chosen, layout, jax.devices())
    lowered = prepared.step.lower(jax.eval_shape(prepared.init), chosen.batch())
    assert "sharding_constraint" in lowered.as_text()


@pytest.mark.parametrize("name", CASES)
def test_every_layout_of_a_shrunk_model_divides_its_state_or_its_batch(name):
    chosen = case(name, "shrunk")
    for devices in (4, 8):
        for layout in steps.hand_steps(chosen, devices).values():
            if layout.params:
                leaves = specs(name, layout.name, devices, "shrunk").values()
                assert any(shape != part for shape, part, _ in leaves), layout.name
            laid = Rules.on(layout, jax.devices()[:devices])
            for path, x in jax.tree_util.tree_leaves_with_path(chosen.batch()):
                key = path[-1].key if path else ""
                names = layout.batch.get(key, ("batch",))
                divided = any(layout.activations.get(name) for name in names)
                part = laid.batch(key, x.shape).shard_shape(x.shape)
                assert (part != x.shape) == divided, (layout.name, key)


def test_tables_of_fewer_rows_than_examples_are_whole():
    leaves = specs("recommender", "large tables by rows, small ones whole", scale="shrunk")
    parts = {
        path: (shape[0], part[0])
        for path, (shape, part, _) in leaves.items()
        if "['tables']" in path and "['params']" in path
    }
    assert len(parts) == 26
    for path, (rows, held) in parts.items():
        assert held == (rows // 8 if rows > rules.SMALL_TABLE else rows), path
    assert {24, 40, 96} < {rows for rows, held in parts.values() if rows == held}
    assert case("recommender", "shrunk").batch_size == rules.SMALL_TABLE


def test_megatron_divides_heads_mlp_and_vocabulary():
    both = specs("decoder", "fsdp x tensor parallel 2x4")
    assert both["['params']['layers']['mlp']['gate']"][2] == P(None, "data", "model")
    assert both["['params']['layers']['mlp']['down']"][2] == P(None, "model", "data")
    assert both["['opt_state'][0].mu['layers']['mlp']['down']"][2] == P(None, "model", "data")
    wide = specs("decoder", "tensor parallel")
    assert wide["['params']['layers']['attention']['query']"][2] == P(None, None, "model", None)
    # 4 key-value heads do not divide by 8.
    assert wide["['params']['layers']['attention']['key']"][2] == P(None, None, None, None)
    assert wide["['params']['embedding']"][2] == P("model", None)
    classical = specs("decoder", "data x tensor parallel 2x4")
    assert classical["['params']['layers']['mlp']['gate']"][2] == P(None, None, "model")
    assert classical["['opt_state'][0].mu['layers']['mlp']['down']"][2] == P(None, "model", None)
    assert list(steps.hand_steps(of("decoder"), 4)).count("data x tensor parallel 2x2") == 1
    wide = specs("mlp", "tensor parallel")
    assert wide["['params']['layers'][0]['kernel']"][2] == P(None, "model")
    assert wide["['params']['layers'][1]['kernel']"][2] == P("model", None)


def test_jax_s_cookbook_divides_the_stream_and_what_comes_out_of_heads_by_these():
    leaves = specs("decoder", "jax cookbook fsdp")
    layer = "['params']['layers']"
    for path, spec in {
        f"{layer}['attention']['query']": P(None, "fsdp", None, None),
        f"{layer}['attention']['key']": P(None, "fsdp", None, None),
        f"{layer}['attention']['out']": P(None, "fsdp", None, None),
        f"{layer}['mlp']['up']": P(None, "fsdp", None),
        f"{layer}['mlp']['down']": P(None, None, "fsdp"),
        f"{layer}['mlp_norm']['scale']": P(None, None),
        "['params']['embedding']": P(None, None),
        "['params']['head']": P("fsdp", None),
        "['opt_state'][0].mu['head']": P("fsdp", None),
    }.items():
        assert leaves[path][2] == spec, path
    plain = specs("plain_gpt", "jax cookbook fsdp", devices=4)
    whole = {path for path, (shape, part, _) in plain.items() if shape == part}
    assert {path for path in whole if "_bias_" not in path and "_scale_" not in path} == {
        "['step']",
        "['params']['embedding_VD']",
        "['params']['positions_TD']",
    }
    assert not any("_bias_" in path or "_scale_" in path for path in set(plain) - whole)


def test_maxtext_divides_the_width_at_rest_and_heads_mlp_and_vocabulary():
    laid = specs("decoder", "maxtext fsdp x tensor 4x2")
    gate, norm = (f"['params']['layers']['{x}" for x in ("mlp']['gate']", "mlp_norm']['scale']"))
    assert laid[gate][2] == P(None, "fsdp", "tensor")
    assert laid[norm][2] == P(None, "tensor")
    assert laid["['params']['embedding']"][2] == P("tensor", "fsdp")
    assert specs("decoder", "maxtext fsdp")[gate][2] == P(None, "fsdp", None)


def test_experts_are_divided_as_gshard_and_as_maxtext_do():
    up, query = (
        f"['params']['layers']{x}" for x in ("['experts']['up']", "['attention']['query']")
    )
    gshard = specs("moe", "expert parallel")
    assert (gshard[up][2], gshard[query][2]) == (P(None, "expert", None, None), P(*[None] * 4))
    maxtext = specs("moe", "maxtext fsdp x expert 4x2")
    assert maxtext[up][2] == P(None, "expert", "fsdp", None)
    assert maxtext[query][2] == P(None, ("fsdp", "expert"), None, None)


def test_factored_moments_are_whole_and_others_lie_as_their_parameters():
    leaves = specs("encoder_decoder", "fsdp")
    params = {path: leaf for path, leaf in leaves.items() if path.startswith("['params']")}
    moments = {path: leaf for path, leaf in leaves.items() if path.startswith("['opt_state']")}
    seen = set()
    for path, (shape, part, spec) in moments.items():
        owner = next((p for p in params if path.endswith(p.removeprefix("['params']"))), None)
        same = owner is not None and params[owner][0] == shape
        assert spec == params[owner][2] if same else part == shape, path
        seen.add(same)
    assert seen == {True, False}


def test_a_parameter_of_one_dimension_and_one_that_does_not_divide_stay_whole():
    laid = Rules.on(
        HandLayout(
            name="x",
            axes=(("data", 2), ("model", 4)),
            params={"norm": ("data", "model"), "heads": ("model",), "mlp": ("model", "data")},
            spread=("data",),
            vectors_whole=True,
        ),
        jax.devices(),
    )
    assert laid.param(("norm",), (8,)).spec == P("model")
    assert laid.param((None,), (8,)).spec == P(None)
    assert laid.param((None, None), (2, 8, 16)).spec == P(None, None, "data")
    assert laid.param((None, None), (16, 6, 3)).spec == P(None, "data", None)
    assert laid.param(("heads", None), (6, 3)).spec == P("data", None)
    assert laid.param(("heads", "mlp"), (8, 8)).spec == P("model", "data")
    assert laid.param(("mlp", "heads"), (8, 8)).spec == P(("model", "data"), None)


def test_a_batch_that_does_not_divide_is_refused():
    chosen = dataclasses.replace(case("vit", "small"), batch_size=12)
    match = r"data parallel: dimension 'batch' of batch leaf 'image_BHWC', \(12, .* of it, got 12"
    with pytest.raises(ValueError, match=match):
        steps.prepare(chosen, steps.hand_steps(chosen, 8)["data parallel"], jax.devices())


def test_a_parameter_without_names_is_refused():
    with pytest.raises(ValueError, match=r"vit: no names for the parameter \['odd'\]; expected"):
        steps.names_of("vit", "['odd']", 2)


def test_the_models_of_the_experiments_are_cases_too():
    for chosen in (sized.decoder_case(sizes.DECODER), sized.mlp_case(sizes.MLP)):
        alone = rules.replicated(8)
        for layout in (alone, *steps.hand_steps(chosen, 8).values()):
            prepared = steps.prepare(chosen, layout, jax.devices())
            shardings = jax.tree.leaves((prepared.state, prepared.batch))
            whole = all(sharding.is_fully_replicated for sharding in shardings)
            assert shardings and whole == (layout is alone), layout


def test_no_import_of_autoshard():
    code = (
        "import sys, experiments.handwritten.sized, experiments.handwritten.steps;"
        "sys.exit(any(name.split('.')[0] == 'autoshard' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
