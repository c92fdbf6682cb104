"""The pods' baselines by hand: all compute the same, on any mesh, and import no autoshard."""

import ast
import functools
import pathlib
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest

from autoshard.records.trial import Failure
from autoshard.target.cost import CostModel
from autoshard.target.target import find_target
from experiments import hand_judge
from experiments.handwritten_pod.baselines import Baseline, baselines
from experiments.handwritten_pod.step import train_step
from experiments.pod_sizes import LLAMA3, LLAMA3_TINY, MIXTRAL, MIXTRAL_TINY
from tests.analysed import CONSTANTS
from tests.compiled import compiled

# Float32, so that routing is the same under every layout; short, and layers of a number of its own.
SHORT = {"dtype": "float32", "sequence": 32, "layers": 3, "attention": "full", "remat": "none"}
SIZES = {
    "llama3": LLAMA3_TINY.replace(**SHORT),
    "mixtral": MIXTRAL_TINY.replace(**SHORT, group=16, loss_parts=1),
}
RUN = [
    ("llama3", "data parallel"),
    ("llama3", "fsdp"),
    ("llama3", "fsdp x tensor parallel 4x2"),
    ("llama3", "distributed optimizer"),
    ("llama3", "maxtext fsdp x tensor 4x2"),
    ("mixtral", "fsdp x tensor parallel 2x4"),
    ("mixtral", "distributed optimizer x tensor parallel 4x2"),
    ("mixtral", "maxtext fsdp x expert 2x4"),
    ("mixtral", "maxtext fsdp x expert 2x4 by batch"),
]
QUICKLY = {  # as in `hand_layouts`
    ("llama3", "fsdp x tensor parallel 4x2"),
    ("mixtral", "distributed optimizer x tensor parallel 4x2"),
}


class Ran(NamedTuple):
    loss: float
    moments: object
    specs: dict
    text: str


def tokens(size):
    return np.random.default_rng(0).integers(0, 512, (16, size.model.sequence + 1), np.int32)


@functools.cache
def initial(model):
    _, init, _ = train_step(SIZES[model], None)
    return jax.device_get(compiled(init)())


def two_steps(step, state, batch):
    for _ in range(2):
        state, metrics = step(state, batch)
    return float(metrics["loss"]), jax.device_get(state["opt_state"][0].mu), state


@functools.cache
def unsharded(model, accumulate=1):
    size = SIZES[model].replace(accumulate=accumulate)
    step, _, _ = train_step(size, None)
    run_step = compiled(step, initial(model), tokens(size))
    loss, moments, _ = two_steps(run_step, initial(model), tokens(size))
    return loss, moments


@functools.cache
def run(model, name):
    size = SIZES[model]
    baseline = baselines(8, size)[name]
    hand = baseline.build(baseline.mesh(jax.devices()), size)
    state = jax.device_put(initial(model), hand.in_shardings[0])
    batch = jax.device_put(tokens(size), hand.in_shardings[1])
    run_step = compiled(hand.jit(), *hand.args)
    loss, moments, state = two_steps(run_step, state, batch)
    specs = {
        jax.tree_util.keystr(path): tuple(x.sharding.spec)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }
    return Ran(loss, moments, specs, run_step.as_text())


def assert_close(moments, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(np.linalg.norm(a - b), 1e-3 * np.linalg.norm(b)),
        moments,
        expected,
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [pytest.param(*one, marks=() if one in QUICKLY else pytest.mark.slow) for one in RUN],
)
def test_every_baseline_computes_what_the_unsharded_step_does(model, name):
    loss, moments = unsharded(model)
    np.testing.assert_allclose(run(model, name).loss, loss, rtol=1e-5)
    assert_close(run(model, name).moments, moments)


def test_accumulating_changes_nothing():
    loss, moments = unsharded("llama3")
    parts_loss, parts_moments = unsharded("llama3", accumulate=2)
    np.testing.assert_allclose(parts_loss, loss, rtol=1e-5)
    assert_close(parts_moments, moments)


def test_the_state_is_sharded_as_named():
    fsdp = run("llama3", "fsdp").specs
    assert fsdp["['params']['layers']['mlp']['down']"] == (None, None, "data")
    assert fsdp["['params']['norm']['scale']"] == ("data",)
    assert all(any(spec) for path, spec in fsdp.items() if "params" in path)
    both = run("llama3", "fsdp x tensor parallel 4x2").specs
    assert both["['opt_state'][0].nu['layers']['mlp']['gate']"] == (None, "data", "model")
    assert both["['params']['embedding']"] == ("model", "data")
    experts = run("mixtral", "maxtext fsdp x expert 2x4").specs
    assert experts["['params']['layers']['experts']['up']"] == (None, "expert", "fsdp", None)
    # What has no experts is divided by the expert axis as by fsdp.
    query = experts["['params']['layers']['attention']['query']"]
    assert query == (None, ("fsdp", "expert"), None, None)


@pytest.mark.parametrize("name", ["fsdp", "fsdp x tensor parallel 4x2"])
def test_parameters_are_gathered_layer_by_layer(name):
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", run("llama3", name).text)
    assert len(gathered) > 8
    assert not [shape for shape in gathered if shape.startswith("3,")]


def test_the_distributed_optimizer_gathers_every_parameter_once_before_the_loops():
    ran = run("llama3", "distributed optimizer")
    assert ran.specs == run("llama3", "fsdp").specs  # at rest
    loops, entry = ran.text.split("\nENTRY ")
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", entry)
    params = jax.tree.leaves(initial("llama3")["params"])
    assert sorted(gathered) == sorted(",".join(map(str, x.shape)) for x in params)
    assert " all-gather(" not in loops


def test_tokens_travel_to_the_experts_or_their_weights_come():
    def exchanges(name):
        return run("mixtral", name).text.count(" all-to-all(")

    # To the experts and back, forward and backward.
    by_expert = exchanges("maxtext fsdp x expert 2x4")
    assert by_expert >= exchanges("maxtext fsdp x expert 2x4 by batch") + 4


@pytest.mark.parametrize("size", [LLAMA3, MIXTRAL], ids=["llama3", "mixtral"])
def test_full_size_lowers_without_devices(size):
    found = baselines(64, size)
    for name in ("fsdp x tensor parallel 8x8", "maxtext fsdp x tensor 8x8"):
        hand = found[name].build(found[name].abstract_mesh(), size)
        text = hand.jit().trace(*hand.args).lower(lowering_platforms=("tpu",)).as_text()
        assert "sdy.sharding_constraint" in text


def test_a_batch_that_does_not_divide_is_refused():
    baseline = baselines(256, LLAMA3)["fsdp"]
    with pytest.raises(ValueError, match="multiple of 256"):
        baseline.build(baseline.abstract_mesh(), LLAMA3)


def test_the_baselines_of_8_devices():
    assert list(baselines(8, LLAMA3)) == [
        "data parallel",
        "fsdp",
        "fsdp x tensor parallel 4x2",
        "fsdp x tensor parallel 2x4",
        "distributed optimizer",
        "distributed optimizer x tensor parallel 4x2",
        "distributed optimizer x tensor parallel 2x4",
        "maxtext fsdp",
        "maxtext fsdp x tensor 4x2",
        "maxtext fsdp x tensor 2x4",
    ]
    more = set(baselines(8, MIXTRAL)) - set(baselines(8, LLAMA3))
    assert "maxtext fsdp x expert 1x8" in more
    assert len(more) == 6


def test_no_import_of_autoshard():
    root = pathlib.Path(__file__).parents[2] / "experiments"
    for path in [*(root / "handwritten_pod").glob("*.py"), root / "pod_sizes.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "autoshard" for name in names), path
            assert not any(name.startswith("experiments.pod_tasks") for name in names), path


def test_a_layout_that_does_not_divide_is_a_row_and_no_end(tmp_path) -> None:
    """Of 128 sequences over 72 devices, say: the others are still judged."""

    def build(mesh, size):
        raise ValueError("a batch of 128 in 1 parts must divide over the 72 devices")

    uneven = {"data parallel": Baseline(axes=(("data", 8),), build=build)}
    target = find_target(jax.devices()[:8])
    found = hand_judge.judged(uneven, LLAMA3_TINY, target, CostModel(CONSTANTS), tmp_path)
    assert isinstance(found["data parallel"], Failure)
    assert "must divide over the 72 devices" in found["data parallel"].message
