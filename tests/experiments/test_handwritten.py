"""The hand-written layouts: all compute the same, divide what they name, import no autoshard."""

import dataclasses
import functools
import math
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from autoshard.integrations.flax import TrainState
from experiments import sizes
from experiments.handwritten import rules, sized, steps, train_steps, trainer
from experiments.handwritten.layouts import HandLayout, Rules
from experiments.zoo.cases import CASES, case
from tests.compiled import compiled

# What differs most from data parallel, and all that one kind of model has alone. The others are
# marked slow: compiling a layout takes 2 to 20 seconds.
QUICKLY = {
    ("mlp", "fsdp x tensor parallel 4x2"),
    ("mlp", "data x tensor parallel 4x2"),
    ("mlp", "data parallel, optimizer divided"),
    ("decoder", "fsdp x tensor parallel 2x4"),
    ("decoder", "maxtext fsdp x tensor 4x2"),
    ("encoder_decoder", "fsdp x tensor parallel 4x2"),
    ("vit", "fsdp x tensor parallel 2x4"),
    ("resnet50", "data x spatial 4x2"),
    ("moe", "maxtext fsdp x expert 4x2"),
    ("unet", "fsdp"),
    ("state_space", "tensor parallel"),
    ("recurrent", "tensor parallel"),
    ("recommender", "tables by rows"),
    ("recommender", "tables by columns"),
    ("graph_network", "edge parallel"),
    ("clip", "data parallel"),
    ("linen_vit", "fsdp"),
    ("linen_resnet", "fsdp"),
    ("linen_recurrent", "tensor parallel"),
    ("plain_gpt", "fsdp x tensor parallel 4x2"),
}
EVERY = [
    pytest.param(name, layout, marks=() if (name, layout) in QUICKLY else pytest.mark.slow)
    for name in CASES
    for layout in steps.hand_steps(case(name, "small"), 8)
]


@functools.cache
def of(name):
    """The case at the scale small, trained so that a step is in proportion to the gradients.

    The others' optimizers make a step of any gradient, however small: of rounding errors too. With
    momentum there is something for the layouts of moments to divide.
    """
    return dataclasses.replace(case(name, "small"), optimizer=optax.sgd(0.1, momentum=0.9))


@functools.cache
def initial(name):
    """The state of `of(name)` on the host."""
    _, init = train_steps.train_step(of(name))
    return jax.tree.map(np.asarray, readable(compiled(init)()))


@functools.cache
def unsharded(name):
    """The state after a step of the case's own workload, and its metrics; on the host."""
    workload = of(name).workload()
    shapes, device = jax.eval_shape(workload.init), SingleDeviceSharding(jax.devices()[0])
    before = placed(
        of_workload(name, initial(name)), shapes, jax.tree.map(lambda _: device, shapes)
    )
    batch = of(name).sample(0)
    after, metrics = compiled(workload.step, before, batch)(before, batch)
    return jax.tree.map(np.asarray, readable((by_hand(name, after), metrics)))


def of_workload(name, state):
    """A state by hand as the case's workload has it."""
    kind = of(name).kind
    if kind == "plain":
        return state["params"]
    return TrainState(
        **state | ({"extra": {"collections": state["extra"]}} if kind == "linen" else {})
    )


def by_hand(name, state):
    """The parts that can be compared of a workload's state, as a state by hand has them."""
    kind = of(name).kind
    if kind == "plain":
        return {"params": state, "extra": {}}
    extra = state.extra["collections"] if kind == "linen" else state.extra
    return {"params": state.params, "extra": extra}


@functools.cache
def compiled_layout(name, layout):
    prepared = steps.prepare(of(name), steps.hand_steps(of(name), 8)[layout], jax.devices())
    return prepared, compiled(prepared.step, jax.eval_shape(prepared.init), of(name).sample(0))


def readable(tree):
    """With the numbers of random keys in place of them."""
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        tree,
    )


def placed(host, abstract, shardings):
    """A state on its devices: that of the host, with random keys where `abstract` has them."""

    def put(x, like, sharding):
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            x = jax.random.wrap_key_data(x)
        return jax.device_put(x, sharding)

    return jax.tree.map(put, host, abstract, shardings)


def gathered(name, layout):
    """Shapes of what all-gathers make."""
    text = compiled_layout(name, layout)[1].as_text()
    found = re.findall(r"= \(?(.*?)\)? all-gather(?:-start)?\(", text)
    return {
        tuple(int(n) for n in dims.split(",") if n)
        for result in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", result)
    }


@functools.cache
def shapes_of(name, scale):
    """The state with the case's own optimizer."""
    chosen = case(name, scale)
    _, init = train_steps.train_step(chosen)
    return jax.eval_shape(init)


def specs(name, layout, devices=8, scale="small"):
    """Leaf of the state -> (its shape, its shape on one device, its spec)."""
    chosen, state = case(name, scale), shapes_of(name, scale)
    laid = Rules.on(steps.hand_steps(chosen, devices)[layout], jax.devices()[:devices])
    names = functools.partial(steps.names_of, name)
    shardings = trainer.shardings(laid, names, chosen.optimizer, state)
    return {
        jax.tree_util.keystr(path): (x.shape, sharding.shard_shape(x.shape), sharding.spec)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True
        )
    }


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
    maxtext = ["maxtext fsdp", *(f"maxtext fsdp x tensor {shape}" for shape in ("4x2", "2x4"))]
    experts = [
        f"maxtext fsdp x expert {shape}{end}"
        for shape in ("4x2", "2x4", "1x8")
        for end in ("", " by batch")
    ]
    images = ("resnet50", "resnet152", "linen_resnet", "unet")
    own = {
        "decoder": [*megatron, *maxtext],
        "moe": [*megatron, *maxtext, "expert parallel", *experts],
        **{x: ["data parallel", *fsdp, *tensor] for x in ("encoder_decoder", "plain_gpt")},
        "recommender": [
            *everywhere,
            "tables by rows",
            "large tables by rows, small ones whole",
            "tables by columns",
        ],
        "graph_network": [*everywhere, "edge parallel"],
        **{x: [*everywhere, "data x spatial 4x2"] for x in images},
    }
    for name in CASES:
        assert list(steps.hand_steps(case(name, "small"), 8)) == own.get(name, megatron), name


def test_every_case_has_layouts_and_no_other():
    assert sorted(rules.HAND_LAYOUTS) == sorted(CASES)
    unknown = dataclasses.replace(case("vit", "small"), name="unknown")
    with pytest.raises(ValueError, match="no hand layouts for 'unknown': expected one of"):
        steps.hand_steps(unknown, 8)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_a_layout_computes_what_the_workload_does(name, layout):
    before, (after, metrics) = initial(name), unsharded(name)
    prepared, step = compiled_layout(name, layout)
    state = placed(before, jax.eval_shape(prepared.init), prepared.state)
    new, got = step(state, jax.device_put(of(name).sample(0), prepared.batch))

    assert jax.tree.map(lambda x: x.sharding, new) == prepared.state
    got = jax.tree.map(np.asarray, got)
    np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=1e-5)
    assert got.keys() == metrics.keys()
    new = jax.tree.map(np.asarray, readable(new))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        new["extra"],
        after["extra"],
    )
    old, want, have = (jax.tree.leaves(x["params"]) for x in (before, after, new))
    whole = norm_of([b - a for a, b in zip(old, want, strict=True)])
    for a, b, c in zip(old, want, have, strict=True):
        # Some gradients are zero but for rounding, as that of a bias before a norm.
        assert norm_of([c - b]) < 1e-3 * norm_of([b - a]) + 1e-5 * whole


def norm_of(arrays):
    return math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in arrays))


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_fsdp_divides_all_that_divides(name, devices):
    leaves = specs(name, "fsdp", devices, "shrunk")
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


def test_a_device_holds_its_share_of_a_fully_sharded_state():
    built = steps.build(case("mlp", "small"), steps.hand_steps(of("mlp"), 8)["fsdp"], jax.devices())
    leaves = jax.tree.leaves(built.state)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert held < 1.001 * sum(x.nbytes for x in leaves) / 8
    state, metrics = built.step(built.state, built.batch)
    assert np.isfinite(metrics["loss"]) and int(state["step"]) == 1
    assert leaves[0].is_deleted()


@pytest.mark.parametrize("name", ["state_space", "recurrent"])
def test_tensor_parallelism_gathers_no_parameter(name):
    shapes = {shape for path, (shape, _, _) in specs(name, "tensor parallel").items()}
    # Nor one of a layer alone, in a loop over stacked ones.
    shapes |= {shape[1:] for shape in shapes}
    assert not {shape for shape in gathered(name, "tensor parallel") if len(shape) > 1} & shapes


def test_divided_tables_are_not_gathered():
    first, last = "['params']['tables'][0]", "['params']['tables'][6]"  # 4096 rows, and 3
    by_rows, by_columns = (specs("recommender", f"tables by {x}") for x in ("rows", "columns"))
    assert (by_rows[first][2], by_rows[last][2]) == (P("data", None), P(None, None))
    assert (by_columns[first][2], by_columns[last][2]) == (P(None, "data"), P(None, "data"))
    large = of("recommender").config.table_rows[0]
    assert not any(large in shape for shape in gathered("recommender", "tables by rows"))
    assert not gathered("recommender", "tables by columns")
    assert "all-to-all" in compiled_layout("recommender", "tables by columns")[1].as_text()


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


def test_divided_edges_need_one_sum_for_each_round_of_messages():
    assert not gathered("graph_network", "edge parallel")


def test_rows_of_an_image_are_exchanged_at_the_border():
    prepared, step = compiled_layout("resnet50", "data x spatial 4x2")
    assert prepared.batch["image_BHWC"].spec == P("data", "space", None, None)
    assert "collective-permute" in step.as_text()


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


def test_maxtext_divides_the_width_at_rest_and_heads_mlp_and_vocabulary():
    laid = specs("decoder", "maxtext fsdp x tensor 4x2")
    gate, norm = (f"['params']['layers']['{x}" for x in ("mlp']['gate']", "mlp_norm']['scale']"))
    assert laid[gate][2] == P(None, "fsdp", "tensor")
    assert laid[norm][2] == P(None, "tensor")
    assert laid["['params']['embedding']"][2] == P("tensor", "fsdp")
    assert specs("decoder", "maxtext fsdp")[gate][2] == P(None, "fsdp", None)


def test_a_divided_optimizer_is_no_more_than_an_eighth_and_gathers_each_parameter_once():
    name, layout = "mlp", "data parallel, optimizer divided"
    leaves = specs(name, layout)
    assert all(part == shape for path, (shape, part, _) in leaves.items() if "['params']" in path)
    moments = [(x, part) for path, (x, part, _) in leaves.items() if ".mu" in path or ".nu" in path]
    assert all(math.prod(shape) == 8 * math.prod(part) for shape, part in moments)
    chosen = case(name, "small")
    prepared = steps.prepare(chosen, steps.hand_steps(chosen, 8)[layout], jax.devices())
    step = compiled(prepared.step, jax.eval_shape(prepared.init), chosen.batch())
    count = len(re.findall(r" all-gather(?:-start)?\(", step.as_text()))
    assert 0 < count <= len(moments) / 2


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


def test_a_layout_trains_with_the_factored_moments_of_its_case():
    chosen = case("encoder_decoder", "small")
    step, init = train_steps.train_step(chosen)
    layout = steps.hand_steps(chosen, 8)["fsdp x tensor parallel 4x2"]
    prepared = steps.prepare(chosen, layout, jax.devices())
    params = initial("encoder_decoder")["params"]
    before = {**jax.eval_shape(init), "step": np.int32(0), "params": params}
    before["opt_state"] = chosen.optimizer.init(params)
    before = jax.tree.map(np.asarray, before)
    losses = []
    for run, state in (
        (jax.jit(step), before),
        (prepared.step, jax.device_put(before, prepared.state)),
    ):
        batch = chosen.sample(0)
        quick = compiled(run, state, batch)
        for _ in range(3):
            if run is prepared.step:
                batch = jax.device_put(batch, prepared.batch)
            state, metrics = quick(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)
    assert losses[2] < losses[0]


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
        for layout in (rules.replicated(8), *steps.hand_steps(chosen, 8).values()):
            steps.prepare(chosen, layout, jax.devices())


def test_no_import_of_autoshard():
    code = (
        "import sys, experiments.handwritten.sized, experiments.handwritten.steps;"
        "sys.exit(any(name.split('.')[0] == 'autoshard' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
