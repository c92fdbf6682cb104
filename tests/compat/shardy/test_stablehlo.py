"""What is read of StableHLO operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compat.shardy import stablehlo
from tests.analysed import propagator_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.float32(2), "dense<2.000000e+00> : tensor<f32>"),
        (jnp.int32(-3), "dense<-3> : tensor<i32>"),
        (jnp.complex64(2 + 1j), "dense<(2.000000e+00,1.000000e+00)> : tensor<complex<f32>>"),
    ],
)
def test_constants_of_every_type_are_read(value, text):
    kind = jax.ShapeDtypeStruct((4,), value.dtype)
    module = jax.jit(lambda x: x * value).lower(kind).compiler_ir()
    stablehlo.tag(module.operation)  # which is not of the value
    (found,) = (
        stablehlo.literal(op)
        for op in stablehlo.walk(stablehlo.main_function(module.operation).regions[0].blocks[0])
        if op.name == "stablehlo.constant"
    )
    assert found == text


def test_a_step_with_complex_constants_is_analysed():
    """In MLIR's Python they have no type, and reading one raised TypeError."""
    rung = propagator_of(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * (2 + 1j)), (8, 16))
    assert np.sum(rung.kernels.flops) > 0
