"""What is read of StableHLO operations."""

import hashlib

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


def digest_of(*constants, hash_text=False):
    """The digest of a step that adds up constants, each times its place."""
    parts = [jnp.asarray(c) for c in constants]
    module = jax.jit(lambda x: (x, *parts)).lower(1.0).compiler_ir().operation
    stablehlo.tag(module)
    return stablehlo.digest_without(module, {}, hash_text=hash_text)


TYPES = ["float32", "bfloat16", "float16", "int8", "bool", "uint32", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [10, 10_000])
def test_digests_tell_constants_apart_of_every_type_and_size(dtype, size):
    values = (np.arange(size) % 3).astype(dtype)
    other = values.copy()
    other[-1] = values[-2]
    assert other[-1] != values[-1]
    digests = [
        digest_of(*constants)
        for constants in ([values, other], [other, values], [values, values], [values], [other])
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of(values, other) == digests[0]


def test_large_constants_are_never_text(monkeypatch):
    values = np.arange(10_000, dtype=np.float32)
    digest = digest_of(values)
    monkeypatch.setattr(stablehlo, "text", None)
    monkeypatch.setattr(stablehlo, "literal", None)
    assert digest_of(values) == digest
    splat = np.ones(10_000, np.float32)
    with pytest.raises(TypeError):
        digest_of(splat)
    assert digest_of(splat, values) != digest


@pytest.mark.parametrize("size", [10, 10_000])
def test_without_large_constants_a_digest_is_that_of_the_text(size):
    values = np.arange(size, dtype=np.float32)
    module = jax.jit(lambda x: x * values).lower(np.float32(1)).compiler_ir().operation
    expected = hashlib.sha256((stablehlo.text(module) + " more").encode()).hexdigest()
    stablehlo.tag(module)
    digests = [
        stablehlo.digest_without(module, {}, " more", hash_text=hash_text)
        for hash_text in (False, True)
    ]
    assert digests[1] == expected
    assert (digests[0] == expected) == (size == 10)
