"""The vision transformer: learns digits, scanned equals unrolled, the published sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.vit import VIT_B16, VIT_L16, ViT, ViTConfig, loss, sample
from tests.compiled import compiled, split
from tests.models.descent import descend, made, parameter_count

SMALL = {"image": 16, "patch": 8, "d_model": 16, "mlp_dim": 32, "layers": 2}


def logits(model, image_BHWC):
    graphdef, params = nnx.split(model)
    return compiled(lambda p, x: nnx.merge(graphdef, p)(x), params, image_BHWC)(params, image_BHWC)


@pytest.mark.slow
def test_training_lowers_the_loss():
    config = ViTConfig()
    losses = descend(
        made(ViT, config), loss, [sample(seed, 64, config) for seed in range(40)], 3e-3
    )
    assert losses[0] == pytest.approx(np.log(10), rel=0.3)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def test_scanned_equals_unrolled():
    scanned = made(ViT, ViTConfig(**SMALL, scanned=True))
    unrolled = made(ViT, ViTConfig(**SMALL, scanned=False))
    stacked = nnx.to_pure_dict(nnx.state(scanned))
    layers = stacked["encoder"].pop("layers")
    stacked["encoder"]["layers"] = {i: jax.tree.map(lambda x, i=i: x[i], layers) for i in range(2)}
    state = nnx.state(unrolled)
    nnx.replace_by_pure_dict(state, stacked)
    nnx.update(unrolled, state)
    image_BHWC = sample(0, 4, scanned.encoder.config)["image_BHWC"]
    np.testing.assert_allclose(
        logits(scanned, image_BHWC), logits(unrolled, image_BHWC), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.slow
def test_remat_changes_no_gradient(scanned):
    def gradient(remat):
        config = ViTConfig(**SMALL, remat=remat, scanned=scanned)
        graphdef, params = split(ViT, config)
        batch = sample(0, 4, config)
        function = jax.grad(lambda p: loss(nnx.merge(graphdef, p), batch)[0])
        return compiled(function, params)(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradient("none"),
        gradient("full"),
    )


def test_patches_are_a_set_but_for_their_positions():
    config = ViTConfig(**SMALL)
    model = made(ViT, config)
    image_BHWC = sample(0, 4, config)["image_BHWC"]
    swapped_BHWC = np.roll(image_BHWC, config.patch, axis=1)
    assert np.abs(logits(model, image_BHWC) - logits(model, swapped_BHWC)).max() > 1e-4
    model.encoder.positions[...] = jnp.zeros((config.positions, config.d_model))
    np.testing.assert_allclose(
        logits(model, image_BHWC), logits(model, swapped_BHWC), rtol=1e-4, atol=1e-5
    )


def test_the_hook_sees_each_activation_with_its_rank():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append(names)
        return x

    config = ViTConfig(**SMALL, scanned=False)
    jax.eval_shape(lambda: loss(ViT(config), sample(0, 4, config), record)[0])
    assert seen.count(("batch", None, "heads", None)) == 2 * 4
    assert seen.count(("batch", None, "mlp")) == 2
    assert seen[-1] == ("batch", "classes")


@pytest.mark.parametrize(
    ("config", "millions", "exact"),
    [(VIT_B16, 86, 86_567_656), (VIT_L16, 307, 304_326_632)],
    ids=["B16", "L16"],
)
def test_published_sizes(config, millions, exact):
    count = parameter_count(lambda: ViT(config))
    # The paper counts in millions and does not say which head it counts with.
    assert count == pytest.approx(millions * 1e6, rel=0.01)
    assert count == exact, "that of the implementations in use, with a head of 1000 classes"


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="patch=7 must divide image=32"):
        ViTConfig(patch=7)
    with pytest.raises(ValueError, match="d_model=66 must be a multiple of heads=4"):
        ViTConfig(d_model=66)
    with pytest.raises(ValueError, match="causal=True"):
        ViTConfig(causal=True)
    with pytest.raises(ValueError, match="remat='some'"):
        ViTConfig(remat="some")
