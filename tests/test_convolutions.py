"""Which convolutions XLA:CPU turns around, and their operations by both rungs."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import hlo
from autoshard.hlo.steps import Launch, Steps
from tests.analysed import kernels_of
from tests.programs import shaped

LABELS = ("NHWC", "HWIO", "NHWC")


def forward(x, k, stride: int = 1):  # type: ignore[no-untyped-def]
    return jax.lax.conv_general_dilated(x, k, (stride,) * 2, "SAME", dimension_numbers=LABELS)


def all_places(x, k):  # type: ignore[no-untyped-def]
    """Each place of the kernel meets the one place of the data."""
    padding = ((k.shape[0] - 1,) * 2,) * 2
    return jax.lax.conv_general_dilated(x, k, (1, 1), padding, dimension_numbers=LABELS)


def towards_the_images(x, k):  # type: ignore[no-untyped-def]
    return jax.grad(lambda x: jnp.sum(jnp.sin(forward(x, k, stride=2))))(x)


@pytest.mark.parametrize(
    ("function", "side", "kernel", "turned"),
    [
        (forward, 8, 3, False),
        (forward, 3, 3, False),
        (forward, 2, 3, True),
        (forward, 1, 1, False),
        (forward, 1, 3, True),
        (all_places, 1, 3, False),
        (forward, 4, 5, True),
        (towards_the_images, 8, 3, False),
        (towards_the_images, 4, 3, True),
    ],
)
def test_a_convolution_with_less_data_than_kernel_is_turned_around(
    function, side: int, kernel: int, turned: bool
) -> None:  # type: ignore[no-untyped-def]
    shapes = (4, side, side, 16), (kernel, kernel, 16, 24)
    kernels = kernels_of(function, *shapes)
    text = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile().as_text()
    module = hlo.parse(text)
    launches = [s.work for s in Steps(module, ()).of(module.entry) if isinstance(s, Launch)]
    assert any(kernels.kernel_turned) == turned
    assert any(work.turned_flops for work in launches) == turned
    products = kernels.kernel_flops[kernels.kernel_contracts].sum()
    assert products == sum(flops for work in launches for _, flops in work.matmul_flops)
