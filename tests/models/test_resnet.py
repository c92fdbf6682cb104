"""The residual network: learns digits, keeps batch statistics, the published sizes."""

import jax
import numpy as np
import pytest
from flax import nnx

from models.resnet import RESNET_50, Norm, ResNet, ResNetConfig, loss, sample
from tests.models.made import made


def averages(model):
    return jax.tree.leaves(nnx.state(model, nnx.BatchStat))


@pytest.mark.slow
def test_training_moves_the_running_averages_and_evaluation_does_not():
    config = ResNetConfig(image=16, width=4, blocks=(1, 1))
    model = made(ResNet, config)
    batch = sample(0, 16, config)
    before = averages(model)
    model(batch["image_BHWC"])
    assert all(map(np.array_equal, before, averages(model)))
    loss(model, batch)
    assert not any(map(np.array_equal, before, averages(model)))


def test_running_averages_follow_the_batch_by_the_momentum():
    norm = Norm(ResNetConfig(momentum=0.75), 2, rngs=nnx.Rngs(0))
    x_BHWC = np.random.default_rng(0).standard_normal((8, 3, 3, 2), dtype=np.float32) + 2
    unit_BHWC = norm(x_BHWC, use_running_average=False)
    np.testing.assert_allclose(norm.mean[...], 0.25 * x_BHWC.mean(axis=(0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(unit_BHWC.var(axis=(0, 1, 2)), 1, rtol=1e-3)


@pytest.mark.slow
def test_a_batch_is_normalised_as_a_whole():
    config = ResNetConfig(image=16, width=4, blocks=(1, 1))
    model = made(ResNet, config)
    image_BHWC = sample(0, 16, config)["image_BHWC"]
    apart = model(image_BHWC[:8], train=False)
    np.testing.assert_allclose(model(image_BHWC)[:8], apart, rtol=1e-4, atol=1e-5)
    together = model(image_BHWC, train=True)[:8]
    assert np.abs(together - model(image_BHWC[:8], train=True)).max() > 1e-2


@pytest.mark.slow
def test_blocks_start_as_the_identity():
    model = nnx.eval_shape(lambda: ResNet(RESNET_50))
    assert [block.projected for block in model.blocks].count(True) == 4
    model = made(ResNet, ResNetConfig(blocks=(2,)))
    x_BHWC = np.random.default_rng(0).random((2, 8, 8, 32), dtype=np.float32)
    identity = model.blocks[1](x_BHWC, lambda x, names: x, train=True)
    np.testing.assert_array_equal(identity, x_BHWC)


def test_strides_divide_the_image_by_32():
    seen = []

    def record(x, names):
        assert x.ndim == len(names)
        seen.append((x.shape, names))
        return x

    image = jax.ShapeDtypeStruct((2, 224, 224, 3), np.float32)
    logits = jax.eval_shape(lambda x: ResNet(RESNET_50)(x, record), image)
    assert logits.shape == (2, 1000)
    outputs = [shape for shape, names in seen if names == ("batch", None, None, "channels")]
    assert outputs[0] == (2, 112, 112, 64)
    assert [outputs[i] for i in (1, 4, 8, 14)] == [
        (2, 56, 56, 256),
        (2, 28, 28, 512),
        (2, 14, 14, 1024),
        (2, 7, 7, 2048),
    ]
    inside = [shape for shape, names in seen if names == ("batch", None, None, "hidden")]
    assert inside[6:8] == [(2, 56, 56, 128), (2, 28, 28, 128)], "the 3 x 3 convolution strides"
