"""Every model of the zoo learns; loops over layers, remat, causality, sizes that are refused."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.zoo.cases import CASES, case, of_size
from models.clip import TextConfig
from models.decoder import DecoderConfig
from models.encoder_decoder import T5_XXL, EncoderDecoder, EncoderDecoderConfig
from models.graph_network import GraphNetworkConfig
from models.moe import MixtureConfig
from models.plain_gpt import PlainGPTConfig
from models.recommender import CRITEO_TERABYTE, Recommender, RecommenderConfig
from models.recurrent import JOZEFOWICZ_WIDE, Recurrent
from models.resnet import ResNetConfig
from models.state_space import MAMBA_2_8B, StateSpace, StateSpaceConfig
from models.unet import UNetConfig
from models.vit import VIT_L16, ViT, ViTConfig
from tests.compiled import compiled, split
from tests.models.made import parameter_count

# Case -> learning rate of Adam, steps, and the share of the first loss that remains at most.
LEARNING = {
    "decoder": (1e-2, 30, 0.75),
    "encoder_decoder": (1e-2, 30, 0.65),
    "vit": (3e-3, 40, 0.8),
    "resnet50": (3e-3, 30, 0.7),
    "moe": (1e-2, 30, 0.75),
    "unet": (3e-3, 40, 0.8),
    "state_space": (1e-2, 30, 0.75),
    "recurrent": (1e-2, 30, 0.75),
    "recommender": (2e-2, 40, 0.9),
    "graph_network": (1e-2, 30, 0.75),
    "clip": (1e-3, 60, 0.9),
    "linen_vit": (3e-3, 40, 0.8),
    "linen_resnet": (3e-3, 30, 0.7),
    "linen_recurrent": (1e-2, 30, 0.75),
    "plain_gpt": (0.0, 30, 0.9),  # has an optimizer of its own
}
QUICK = ("recommender", "plain_gpt", "linen_recurrent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LEARNING]
)
def test_training_lowers_the_loss_of_batches_that_are_new(name: str) -> None:
    rate, steps, share = LEARNING[name]
    chosen = case(name, "small")
    if name == "plain_gpt":
        chosen = of_size(name, dataclasses.replace(chosen.config, learning_rate=0.5), 16)
    workload = dataclasses.replace(chosen, optimizer=optax.adam(rate)).workload()
    state, losses = compiled(workload.init)(), []
    step = compiled(workload.step, state, chosen.sample(0))
    for seed in range(steps):
        state, metrics = step(state, chosen.sample(seed))
        losses.append(float(metrics["loss"]))
    assert 0 < np.mean(losses[-5:]) < share * losses[0], losses


SMALL: dict[str, dict[str, object]] = {
    "decoder": {"layers": 2, "sequence": 12},
    "moe": {"layers": 2, "sequence": 16, "group": 8, "experts": 4, "capacity_factor": 0.5},
    "state_space": {"d_model": 16, "state": 4, "step_rank": 2, "layers": 2, "sequence": 12},
    "recurrent": {"width": 16, "layers": 2, "sequence": 12},
    "encoder_decoder": {"window": 36, "spans": 2},
    "vit": {"image": 16, "d_model": 16, "mlp_dim": 32},
}


def small(name: str, **changes: object):
    """A case of a few numbers and a batch of two."""
    config = dataclasses.replace(case(name, "small").config, **SMALL[name], **changes)
    return of_size(name, config, 2)


@functools.cache
def params_of(name: str):
    return nnx.to_pure_dict(split(lambda _: small(name).make_model(), None)[1])


def unstacked(tree, layers: int):
    """The parameters of a loop over stacked layers, for layers one after the other."""
    if not isinstance(tree, dict):
        return tree
    return {
        key: {i: jax.tree.map(lambda x, i=i: x[i], value) for i in range(layers)}
        if key == "layers"
        else unstacked(value, layers)
        for key, value in tree.items()
    }


def value_and_gradient(name: str, params, **changes: object):
    chosen = small(name, **changes)
    graphdef, abstract = nnx.split(nnx.eval_shape(chosen.make_model))
    state = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(params))
    function = jax.value_and_grad(
        lambda p: chosen.loss(nnx.merge(graphdef, p), chosen.sample(0))[0]
    )
    value, gradient = compiled(function, state)(state)
    return value, nnx.to_pure_dict(gradient)


@pytest.mark.parametrize("name", ["decoder", "vit", "encoder_decoder", "moe", "state_space"])
def test_a_loop_over_layers_and_remat_change_nothing(name: str) -> None:
    value, gradient = value_and_gradient(name, params_of(name))
    layers = small(name).config.layers
    others = [
        value_and_gradient(name, unstacked(params_of(name), layers), scanned=False, remat="full")
    ]
    if name == "decoder":
        others.append(value_and_gradient(name, params_of(name), remat="dots"))
    for other, found in others:
        np.testing.assert_allclose(other, value, rtol=1e-5)
        expected = gradient
        if jax.tree.structure(found) != jax.tree.structure(gradient):
            expected = unstacked(gradient, layers)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected
        )


@pytest.mark.parametrize("name", ["decoder", "moe", "state_space", "recurrent"])
def test_a_position_sees_all_of_its_past_and_nothing_else(name: str) -> None:
    """The mixture has half the places that an even routing takes."""
    chosen = small(name)
    graphdef, params = split(lambda _: chosen.make_model(), None)
    before = chosen.sample(0)[:, :-1]
    run = compiled(lambda p, t: nnx.merge(graphdef, p)(t), params, before)
    after = before.copy()
    after[:, 2] += 1
    changed_T = np.abs(run(params, before) - run(params, after)).max(axis=(0, 2))
    assert (changed_T[:2] == 0).all()
    # Convolutions of the state space model alone would reach position 8.
    assert (changed_T[2:] > 0).all()


@pytest.mark.parametrize("name", [n for n in CASES if n != "resnet152"])
def test_the_hook_sees_activations_with_their_ranks_and_leaves_no_trace(name: str) -> None:
    chosen, seen = case(name, "small"), []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    if chosen.kind == "linen":
        init = chosen.make_model(constrain=record).init
        jax.eval_shape(init, jax.random.key(0), *chosen.inputs(chosen.sample(0)))
    else:
        jax.eval_shape(lambda: chosen.loss(chosen.make_model(), chosen.sample(0), constrain=record))
    axes = collections.Counter(axis for names in seen for axis in names if axis)
    assert len(seen) > 3 and len(axes) > 1 and {"batch", "nodes"} & set(axes)
    if name in ("decoder", "moe"):
        assert axes["heads"] == axes["kv_heads"] == 2 and axes["mlp"] == axes["vocab"] == 1
    if name == "mlp":
        assert axes["hidden"] == axes["embed"] == chosen.config.layers // 2
        jaxpr = jax.make_jaxpr(lambda: chosen.loss(chosen.make_model(), chosen.sample(0)))()
        assert "sharding_constraint" not in str(jaxpr)


@pytest.mark.parametrize(
    ("module", "config", "count", "relative"),
    [
        (ViT, VIT_L16, 304_326_632, 0),
        (EncoderDecoder, T5_XXL, 11_135_332_352, 0),
        (StateSpace, MAMBA_2_8B, 2_768_345_600, 0),
        # Rows of the tables, and the maps of 13-512-256-128 and 479-1024-1024-512-256-1.
        (Recommender, CRITEO_TERABYTE, 187_767_399 * 128 + 171_392 + 2_197_505, 0),
        # 8 x 8192 x 8192 would be one LSTM layer; three of those four maps, twice, and bytes.
        (Recurrent, JOZEFOWICZ_WIDE, 2 * 3 / 4 * 8 * 8192**2, 0.01),
    ],
)
def test_published_sizes_beside_those_of_the_zoo(module, config, count, relative) -> None:
    assert parameter_count(lambda: module(config)) == pytest.approx(count, rel=relative, abs=0)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DecoderConfig, {"kv_heads": 3}, "multiple of kv_heads=3"),
        (DecoderConfig, {"head_dim": 7}, "head_dim=7 must be even"),
        (DecoderConfig, {"remat": "some"}, "remat='some'"),
        (DecoderConfig, {"attention": "flash"}, "attention='flash'"),
        (
            DecoderConfig,
            {"attention": "blockwise", "query_block": 9},
            "query_block=9 must divide sequence=128",
        ),
        (DecoderConfig, {"loss_parts": 5}, "loss_parts=5 must divide sequence=128"),
        (DecoderConfig, {"dtype": "float16"}, "dtype='float16'"),
        (MixtureConfig, {"experts_per_token": 9}, "experts_per_token=9 exceeds experts=8"),
        (MixtureConfig, {"group": 5}, "group=5 must divide sequence=128"),
        (MixtureConfig, {"kv_heads": 3}, "multiple of kv_heads=3"),
        (ViTConfig, {"patch": 7}, "patch=7 must divide image=32"),
        (ViTConfig, {"d_model": 66}, "d_model=66 must be a multiple of heads=4"),
        (ViTConfig, {"causal": True}, "causal=True"),
        (ViTConfig, {"remat": "some"}, "remat='some'"),
        (ResNetConfig, {"image": 40}, "image=40 must be a multiple of 16"),
        (ResNetConfig, {"blocks": (2, 0)}, r"blocks=\(2, 0\)"),
        (UNetConfig, {"width": 18}, r"width=18 must be even, .* a multiple of groups=4"),
        # One frequency, of nothing.
        (UNetConfig, {"width": 2, "groups": 2}, "width=2 must be even, at least 4"),
        (UNetConfig, {"image": 9}, "image=9 must be a multiple of 2"),
        (TextConfig, {"vocab_size": 128}, "vocab_size=128 must exceed 255"),
        (PlainGPTConfig, {"heads": 5}, "d_model=64 must be a multiple of heads=5"),
        (EncoderDecoderConfig, {"vocab_size": 257}, "vocab_size=257 has no room"),
        (EncoderDecoderConfig, {"window": 7}, "do not fit into window=7"),
        (EncoderDecoderConfig, {"buckets": 2}, "buckets=2 must be at least 4"),
        (EncoderDecoderConfig, {"buckets": 32, "longest": 16}, "longest=16 more than half"),
        (EncoderDecoderConfig, {"remat": "some"}, "remat='some'"),
        (StateSpaceConfig, {"convolution": 65}, "convolution=65 exceeds sequence=64"),
        (StateSpaceConfig, {"remat": "some"}, "remat='some'"),
        (RecommenderConfig, {"bottom": (16, 8), "dim": 4}, r"bottom=\(16, 8\) must end in dim=4"),
        (RecommenderConfig, {"row_multiple": 0}, "row_multiple=0: expected at least 1"),
        (GraphNetworkConfig, {"types": 64}, "types=64 has no room"),
        (GraphNetworkConfig, {"masked_share": 1.5}, "masked_share=1.5: expected between 0 and 1"),
    ],
)
def test_bad_sizes_are_refused(config, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)
