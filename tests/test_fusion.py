"""What fuses, against what XLA:CPU fuses: kernels, and the bytes that they read and write."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import hlo, lowering
from autoshard.compat.stablehlo import main_function
from autoshard.fusion import Fusion
from autoshard.kernels import KernelTable
from autoshard.operations import Operations
from autoshard.rungs import live_memory
from autoshard.workload import Workload
from tests.analysed import analyse, baseline, judge, kernels_of, kernels_of_step, target
from tests.programs import shaped

LENGTHS = (16, 64, 256)
X, Y = (8, 64, 96), (8, 64, 96)


def turned(x, w, sin, cos):  # type: ignore[no-untyped-def]
    first, second = jnp.split(jnp.einsum("btd,dhk->bthk", x, w), 2, axis=-1)
    return first * cos - second * sin


def five(z, y):  # type: ignore[no-untyped-def]
    return tuple(z * i + y for i in range(5))


def both(z):  # type: ignore[no-untyped-def]
    return jnp.sin(z), jnp.cos(z)


def divided(x, y):  # type: ignore[no-untyped-def]
    z = x / y + 1
    return jnp.max(z, axis=1), jnp.sum(z, axis=1)


def kept(make):  # type: ignore[no-untyped-def]
    """What a product needs, which no kernel can do for it, and something else, too."""

    def function(x, z, w):  # type: ignore[no-untyped-def]
        y = make(x, z)
        return y @ w, jnp.sin(y)

    return function


def constrained(x):  # type: ignore[no-untyped-def]
    """The same array for all that a mesh of one device can tell."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("x")))


def summed_and_more(y):  # type: ignore[no-untyped-def]
    return jnp.sum(y, -1), y * 3


def by_way_of(made, beside):  # type: ignore[no-untyped-def]
    """A product of what is made of arrays with what is made of that, by way of memory or not."""

    def function(x, y):  # type: ignore[no-untyped-def]
        first = made(x, y)
        written = jnp.exp(first)  # two need it
        return first * (beside(x, y, written) - 2), jnp.sin(written)

    return function


def gradients(x, w, above, named=lambda x: x):  # type: ignore[no-untyped-def]
    """Of a product with a matrix, by what is above it and by the matrix's transpose."""
    above = named(above * 2)
    return jnp.einsum("bto,io->bti", above, w), jnp.einsum("bto,bti->oi", above, x)


PROGRAMS: dict[str, tuple[Callable[..., Any], *tuple[tuple[int, ...], ...]]] = {
    "halves of a product": (turned, (8, 64, 32), (32, 4, 16), (64, 1, 8), (64, 1, 8)),
    "neighbours": (lambda x: (lambda y: y[:, 2:] + y[:, 1:-1] + y[:, :-2])(x * 2 + 1), X),
    "many neighbours": (lambda x: (lambda y: sum(y[:, i : i + 56] for i in range(8)))(x + 1), X),
    "differences of what is expensive": (lambda x: jnp.diff(jnp.tanh(x), axis=1) * 2, X),
    "rolled": (lambda x: jnp.roll(jnp.tanh(x), 1, 1) * x, X),
    "five users of a sum": (lambda x, y: five(x + y * y, y), X, Y),
    "divided for two": (divided, X, Y),
    "summed and more": (lambda x: summed_and_more(x * 2 + 1), X),
    "kept for a product, of two arrays": (kept(jnp.add), (64, 96), (64, 96), (96, 32)),
    "kept for a product, of one in the end": (
        kept(lambda x, z: jnp.maximum(x + z, 0.0)),
        (64, 96),
        (64, 96),
        (96, 32),
    ),
    "a sum that nothing needs": (lambda x: (jnp.sum(x * 2), x * 2 - 1)[1], X),
    "squares summed": (lambda x, y: (lambda z: (jnp.mean(z * z, -1), z - 1))(x + y), X, Y),
    "summed where positive": (lambda x: jnp.sum(jnp.where(x > 0, x * 2, 0.0), -1), X),
    "padded for two": (lambda x: both(jnp.pad(x * 2, ((0, 0), (1, 1), (0, 0)))), X),
    "a slice": (lambda x: x[:, 8:16], X),
    "a cast with a part": (
        lambda x, y: jax.lax.dynamic_update_slice(
            x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), (1, 2, 3)
        ),
        (64, 64, 96),
        (8, 8, 8),
    ),
    "a sum by way of memory": (by_way_of(jnp.add, lambda x, y, z: z), X, Y),
    "a choice by way of memory": (
        by_way_of(lambda x, y: jnp.where(x > 0, y, x), lambda x, y, z: z + y),
        X,
        Y,
    ),
    "a sum, not by way of memory": (by_way_of(jnp.add, lambda x, y, z: y), X, Y),
    "of one array, by way of memory": (by_way_of(lambda x, y: x * 2, lambda x, y, z: z), X, Y),
    "joined for two": (lambda x, y: both(jnp.concatenate([x * 2, y + 1], axis=1)), X, Y),
}


def attended(scores, values):  # type: ignore[no-untyped-def]
    weights = jax.nn.softmax(jnp.where(scores > 0.1, scores / 3.0, -1e9), -1)
    return jnp.einsum("bts,bsk->btk", weights, values)


def weighed(scores, above):  # type: ignore[no-untyped-def]
    return jax.vjp(lambda x: jax.nn.softmax(x, -1), scores)[1](above)[0]


def spread(mask, x):  # type: ignore[no-untyped-def]
    """A mask of fewer elements, as numbers of an array's shape."""
    return jnp.broadcast_to(mask[:, None], x.shape).astype(jnp.int32).astype(x.dtype)


AWAY = jax.lax.RoundingMethod.AWAY_FROM_ZERO
LIBRARY: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, y: jax.nn.softmax(x, -1),
    "softmax of a product, for a product": attended,
    "gradient of a softmax": weighed,
    "logarithm of a softmax": lambda x, y: jax.nn.log_softmax(x, -1),
    "logarithm of a sum": lambda x, y: jax.nn.logsumexp(x, -1),
    "normalized": lambda x, y: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) + y,
    "added to all": lambda x, y: jnp.exp(x + jnp.sum(x, 0, keepdims=True)) * y,
    "added to all, and its root": lambda x, y: jnp.cbrt(x + jnp.sum(x, 0, keepdims=True)) * y,
    "to even, and summed": lambda x, y: jnp.sum(jnp.round(x * y + 1), 0),
    "away from zero, and summed": lambda x, y: jnp.sum(jax.lax.round(x * y, AWAY), 0),
    "whole, and summed": lambda x, y: jnp.sum((x * y).astype(jnp.int32).astype(jnp.float32), 0),
    "counted": lambda x, y: jnp.sum(x * y > 1, 0),
    "masked, and summed": lambda x, y: jnp.sum(spread(x[:, 0] > 1, x) * y, 0),
    "of fewer bits": lambda x, y: jnp.sum((x * y).astype(jnp.bfloat16).astype(jnp.float32), 0),
    "divided by a sum": lambda x, y: x / jnp.sum(x, -1, keepdims=True) + y,
}
"""Of two arrays, around reductions that give fewer elements than XLA:CPU hands to its library."""


def fused_on(
    platform: str, function: Callable[..., Any], *shapes: tuple[int, ...]
) -> tuple[Operations, Fusion]:
    flat = jax.jit(function).lower(*(shaped(*s) for s in shapes)).compiler_ir("stablehlo")
    operations = Operations(main_function(flat.operation).regions[0].blocks[0], {}, platform)
    return operations, Fusion(operations)


def written_on(platform: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """The operations that write what they make, in a module lowered for a platform."""
    operations, fusion = fused_on(platform, function, *shapes)
    return [operations.op_of[v] for v, w in enumerate(fusion.written) if w]


def read_by(operation: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    """The bytes that the kernels of an operation read, on CPU."""
    operations, fusion = fused_on("cpu", function, *shapes)
    kernels = [v for v, w in enumerate(fusion.written) if w and operations.op_of[v] == operation]
    reads = [read for v in kernels for read in fusion.kernel(v)[0].items()]
    return sum(operations.sizes[i] * part for i, part in reads)


def neighbours(name: str) -> Callable[..., Any]:
    """What two kernels need, next to each other, of one function of an array."""

    def function(x):  # type: ignore[no-untyped-def]
        z = FUNCTIONS[name](x)
        return z * 2 + x, z * 3 - 1

    return function


def positive(x):  # type: ignore[no-untyped-def]
    """What every function below takes."""
    return x * x + 2.0


_UNARY = """
exp expm1 log log1p sqrt rsqrt cbrt tanh logistic abs sin cos tan sinh cosh erf erfc erf_inv lgamma
digamma
"""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(jax.lax, name) for name in _UNARY.split()},
    "div": lambda x: x / positive(x),
    "div by a constant": lambda x: x / 3.0,
    "rem": lambda x: jax.lax.rem(x, positive(x)),
    "pow": lambda x: jax.lax.pow(x, positive(x)),
    "atan2": lambda x: jax.lax.atan2(x, positive(x)),
    "fifth power": lambda x: x**5,
}


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> jax.stages.Compiled:
    return jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile()


def counts(program: jax.stages.Compiled) -> hlo.HloCounts:
    return hlo.count(hlo.parse(program.as_text() or ""), ())


def traffic(kernels: KernelTable) -> float:
    read = kernels.value_bytes[kernels.read_value] * kernels.read_scale
    written = kernels.value_bytes[kernels.kernel_value] * kernels.kernel_writes
    each = written + np.bincount(kernels.read_kernel, weights=read, minlength=len(written))
    return float(np.dot(each, kernels.kernel_trips))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_expensive_on_cpu_is_what_the_compiler_computes_once(name: str) -> None:
    function = neighbours(name)
    if "call @" in jax.jit(function).lower(shaped(*X)).as_text():
        pytest.skip("this jax makes the function of many operations")
    once = len(written_on("cpu", function, X)) > 3  # the argument and what both kernels make
    kernels = counts(compiled(function, X)).op_count
    # Where the compiler has no operation of its own it writes parts of the function, too.
    assert (kernels > 2) == once


def test_a_quotient_is_computed_again_where_that_is_cheap() -> None:
    quotient = neighbours("div")
    assert "stablehlo.divide" in written_on("cpu", quotient, X)
    for platform in ("cuda", "rocm", "tpu"):
        assert "stablehlo.divide" not in written_on(platform, quotient, X)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_and_their_bytes_are_the_compiled_ones(name: str) -> None:
    function, *shapes = PROGRAMS[name]
    kernels, seen = kernels_of(function, *shapes), counts(compiled(function, *shapes))
    assert len(kernels.kernel_value) == seen.op_count
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.01)


@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_library_takes_along_with_reductions_is_not_moved(name: str) -> None:
    shapes = (8, 64, 64), (8, 64, 64)
    kernels, seen = kernels_of(LIBRARY[name], *shapes), counts(compiled(LIBRARY[name], *shapes))
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.03)


def test_what_a_product_needs_transposed_is_copied_for_it() -> None:
    shapes = (8, 64, 96), (96, 128), (8, 64, 128)
    kernels, seen = kernels_of(gradients, *shapes), counts(compiled(gradients, *shapes))
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.01)


def test_a_constraint_is_the_same_array_by_another_name() -> None:
    shapes = (8, 64, 96), (96, 128), (8, 64, 128)
    by_another_name = functools.partial(gradients, named=constrained)
    operation = "stablehlo.dot_general"
    assert read_by(operation, by_another_name, *shapes) == read_by(operation, gradients, *shapes)

    summed = written_on("cpu", lambda x: summed_and_more(constrained(x * 2 + 1)), X)
    assert summed == written_on("cpu", lambda x: summed_and_more(x * 2 + 1), X)


def test_what_passes_a_barrier_is_used_as_each_of_it_is() -> None:
    """The product behind it needs one of two values, the other goes into a sum."""

    def barred(x, y, w):  # type: ignore[no-untyped-def]
        a, b = jax.lax.optimization_barrier((x * 2, y * 3))
        return a + 1, b @ w

    module = jax.jit(barred).lower(shaped(64, 32), shaped(64, 48), shaped(48, 16))
    main = main_function(module.compiler_ir("stablehlo").operation).regions[0].blocks[0]
    operations = Operations(main, {}, "cpu")
    barred_by = {
        operations.op_of[user]
        for v, name in enumerate(operations.op_of)
        if name == "stablehlo.multiply" and operations.dims[v] == (64, 48)
        for _, result in operations.uses[v]
        for _, user in operations.uses[result]
        if user >= 0
    }
    assert barred_by == {"stablehlo.dot_general"}


def scanned(weights, x):  # type: ignore[no-untyped-def]
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_a_loop_reads_of_what_it_is_given_the_turn_s_slice() -> None:
    shapes = (32, 96, 96), (4, 96)  # the weights of all turns are 32 times what one turn needs
    kernels, seen = kernels_of(scanned, *shapes), counts(compiled(scanned, *shapes))
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.1)


def stacked(rows):  # type: ignore[no-untyped-def]
    """Three stacks of a loop, two of one shape."""

    def turn(x, row):  # type: ignore[no-untyped-def]
        return x + row, (jnp.tanh(row), jnp.sin(row), jnp.sum(row, -1))

    return jax.lax.scan(turn, rows[0] * 2, rows)


def test_what_loops_begin_with_is_filled_once_and_copied() -> None:
    shape = (4, 64, 960)
    kernels, seen = kernels_of(stacked, shape), counts(compiled(stacked, shape))
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.02)


@jax.grad
def residual(matrices, x):  # type: ignore[no-untyped-def]
    """Sums of what every layer adds to the one before it, each normalized: one long chain."""
    for matrix in matrices:
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        x = x + jnp.tanh(scaled @ matrix) @ matrix
    return jnp.mean(x**2)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_long_chain_of_sums_is_written_now_and_then(platform: str) -> None:
    most = {}
    for layers in (4, 12):
        made = jax.jit(residual).lower([shaped(128, 128)] * layers, shaped(32, 128, 128))
        main = main_function(made.compiler_ir("stablehlo").operation).regions[0].blocks[0]
        fusion = Fusion(Operations(main, {}, platform))
        kernels = [fusion.kernel(v)[0] for v, written in enumerate(fusion.written) if written]
        most[layers] = max(len(reads) for reads in kernels)
    assert most[12] == most[4] < 10


@pytest.mark.parametrize("layers", [4, 12])
def test_a_long_chain_moves_about_the_bytes_of_the_compiled_one(layers: int) -> None:
    of = analyse(
        Workload(
            step=lambda ws, x: (jax.tree.map(jnp.subtract, ws, residual(ws, x)), 0.0),
            init=lambda: [jnp.zeros((128, 128))] * layers,
            batch=shaped(32, 128, 128),
        )
    )
    layout = baseline(of.space, "replicated")
    step = lowering.jit_step(of.analysis_for(layout), of.space.specs(layout), target())
    text = step.lower(*lowering.shapes(of.analysis.program.inputs)).compile().as_text()
    seen = hlo.count(hlo.parse(text or ""), layout.mesh)
    assert 0.85 < judge(of, layout).bytes_accessed / seen.bytes_accessed < 1.1


def test_what_four_slices_need_is_padded_once() -> None:
    def convolved(x, weight):  # type: ignore[no-untyped-def]
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return sum(padded[:, c : c + 64] * weight[c] for c in range(4))

    shapes = X, (4, 96)
    assert len(kernels_of(convolved, *shapes).kernel_value) == 2
    assert counts(compiled(convolved, *shapes)).op_count == 2


def held(kernels: KernelTable) -> float:
    """Most bytes of temporaries where nothing is divided."""
    return live_memory.peak_of(kernels, kernels.value_bytes.astype(float), [])


def convolve(x, weight):  # type: ignore[no-untyped-def]
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=dimensions)


def largest(x):  # type: ignore[no-untyped-def]
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def normalized(x):  # type: ignore[no-untyped-def]
    mean = jnp.mean(x, (0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(jnp.mean(x * x, (0, 1, 2)) - mean * mean + 1e-5)


@jax.grad
def blocks(weights, x):  # type: ignore[no-untyped-def]
    """Convolutions, each normalized and added to what it is of, where that is positive."""
    for weight in weights:
        x = jax.nn.relu(x + normalized(convolve(x, weight)))
    return jnp.mean(x**2)


def test_what_is_normalized_and_added_moves_the_bytes_of_the_compiled_program() -> None:
    """Where each block adds to the one before it, kernels go back to the first one's product."""
    weights, x = [shaped(3, 3, 16, 16)] * 4, shaped(16, 16, 16, 16)
    kernels = kernels_of_step(
        lambda weights, x: (jax.tree.map(jnp.subtract, weights, blocks(weights, x)), 0.0),
        weights,
        x,
    )
    program = jax.jit(blocks).lower(weights, x).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert 0.9 < traffic(kernels) / counts(program).bytes_accessed < 1.1
    assert 0.9 < held(kernels) / memory.temp_size_in_bytes < 1.1


def test_the_gradient_of_a_pool_looks_up_where_the_largest_lay() -> None:
    function = jax.grad(lambda x: jnp.sum(jnp.sin(largest(jnp.tanh(x)))))
    shape = (16, 32, 32, 16)
    kernels, program = kernels_of(function, shape), compiled(function, shape)
    memory = program.memory_analysis()
    assert memory is not None
    assert 0.9 < traffic(kernels) / counts(program).bytes_accessed < 1.1
    assert 0.9 < held(kernels) / memory.temp_size_in_bytes < 1.1


@pytest.mark.parametrize("of", [lambda x: x, jnp.tanh], ids=["an argument", "tanh"])
def test_what_a_product_needs_turned_is_copied_early(of: Callable[[Any], Any]) -> None:
    @jax.grad
    def function(weight, x):  # type: ignore[no-untyped-def]
        return jnp.mean(jnp.sin(convolve(of(x), weight)))

    shapes = (3, 3, 16, 16), (16, 32, 32, 16)
    kernels, program = kernels_of(function, *shapes), compiled(function, *shapes)
    memory = program.memory_analysis()
    assert memory is not None
    assert held(kernels) == pytest.approx(memory.temp_size_in_bytes, rel=0.02)
    assert held(dataclasses.replace(kernels, scratch=())) < 0.8 * memory.temp_size_in_bytes


def recurrence(decay, entering):  # type: ignore[no-untyped-def]
    def compose(first, then):  # type: ignore[no-untyped-def]
        return first[0] * then[0], first[1] * then[0] + then[1]

    return jax.lax.associative_scan(compose, (decay, entering), axis=1)[1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_associative_scan_computes_again_what_is_cheap(length: int, backward: bool) -> None:
    function = recurrence
    if backward:
        function = jax.grad(lambda *xs: jnp.sum(recurrence(*xs) ** 2), (0, 1))
    shapes = [(8, length, 96)] * 2
    kernels, program = kernels_of(function, *shapes), compiled(function, *shapes)
    seen, memory = counts(program), program.memory_analysis()
    assert memory is not None
    # Of a value that a kernel computes itself rung 1 counts the part that is needed there, rung 2
    # all of it: the nested slices are as large as the arrays they are of.
    assert 0.5 < traffic(kernels) / seen.bytes_accessed < 1.05
    assert 0.65 < float(np.dot(kernels.kernel_flops, kernels.kernel_trips)) / seen.flops < 1.05
    assert 0.75 < len(kernels.kernel_value) / seen.op_count < 1.5
    most = held(kernels) + memory.output_size_in_bytes
    assert 0.9 < most / (memory.temp_size_in_bytes + memory.output_size_in_bytes) < 1.45
