"""The hand-written baselines: all compute the same, are sharded as named, import no autoshard."""

import functools
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.handwritten import decoder, mlp
from experiments.handwritten.layouts import hand_layouts
from experiments.sizes import DecoderSize, MLPSize
from models.decoder import DecoderConfig
from models.mlp import MLPConfig

DECODER = DecoderSize(
    model=DecoderConfig(
        d_model=32, heads=8, kv_heads=4, head_dim=8, mlp_dim=64, layers=2, sequence=16
    ),
    batch_size=8,
)
MLP = MLPSize(model=MLPConfig(width=32, layers=4), batch_size=16)


def test_the_baselines_of_8_devices():
    assert list(hand_layouts(8)) == [
        "replicated",
        "data parallel",
        "fsdp",
        "tensor parallel",
        "fsdp x tensor parallel 4x2",
        "fsdp x tensor parallel 2x4",
    ]


@functools.cache
def run(model, name):
    """Three steps of a baseline: its losses, and the spec of each leaf of its state."""
    build, size = {"decoder": (decoder.build, DECODER), "mlp": (mlp.build, MLP)}[model]
    built = build(size, hand_layouts(8)[name], jax.devices())
    state, losses = built.state, []
    shardings = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(3):
        state, metrics = built.step(state, built.batch)
        losses.append(float(metrics["loss"]))
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    specs = {
        jax.tree_util.keystr(path): tuple(sharding.spec)
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)
    }
    return losses, specs


@pytest.mark.parametrize("name", [name for name in hand_layouts(8) if name != "replicated"])
@pytest.mark.parametrize("model", ["decoder", "mlp"])
def test_every_baseline_computes_what_the_replicated_one_does(model, name):
    expected, _ = run(model, "replicated")
    losses, _ = run(model, name)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[-1] < losses[0]


def test_the_decoder_is_sharded_as_named():
    _, both = run("decoder", "fsdp x tensor parallel 2x4")
    assert both["['params']['layers']['mlp']['gate']"] == (None, "data", "model")
    assert both["['params']['layers']['mlp']['down']"] == (None, "model", "data")
    assert both["['opt_state'][0].mu['layers']['mlp']['down']"] == (None, "model", "data")
    _, fsdp = run("decoder", "fsdp")
    assert fsdp["['params']['layers']['attention']['query']"] == (None, "data", None, None)
    _, wide = run("decoder", "tensor parallel")
    assert wide["['params']['layers']['attention']['query']"] == (None, None, "model", None)
    # 4 key-value heads do not divide by 8.
    assert wide["['params']['layers']['attention']['key']"] == (None, None, None, None)


def test_the_mlp_alternates_columns_and_rows():
    _, specs = run("mlp", "tensor parallel")
    assert specs["['params']['layers'][0]['kernel']"] == (None, "model")
    assert specs["['params']['layers'][1]['kernel']"] == ("model", None)


def test_no_import_of_autoshard():
    code = (
        "import sys, experiments.handwritten.decoder, experiments.handwritten.mlp;"
        "sys.exit(any(name.split('.')[0] == 'autoshard' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
