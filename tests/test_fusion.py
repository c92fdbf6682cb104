"""What fuses, against what XLA:CPU fuses: kernels, and the bytes that they read and write."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import hlo
from autoshard.compat.stablehlo import main_function
from autoshard.fusion import CHEAP_DIVISION, Fusion
from autoshard.kernels import KernelTable
from autoshard.operations import Operations
from autoshard.rungs import propagate
from autoshard.workload import Workload
from tests.analysed import analyse
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


PROGRAMS: dict[str, tuple[Callable[..., Any], *tuple[tuple[int, ...], ...]]] = {
    "halves of a product": (turned, (8, 64, 32), (32, 4, 16), (64, 1, 8), (64, 1, 8)),
    "neighbours": (lambda x: (lambda y: y[:, 2:] + y[:, 1:-1] + y[:, :-2])(x * 2 + 1), X),
    "many neighbours": (lambda x: (lambda y: sum(y[:, i : i + 56] for i in range(8)))(x + 1), X),
    "differences of what is expensive": (lambda x: jnp.diff(jnp.tanh(x), axis=1) * 2, X),
    "rolled": (lambda x: jnp.roll(jnp.tanh(x), 1, 1) * x, X),
    "five users of a sum": (lambda x, y: five(x + y * y, y), X, Y),
    "divided for two": (divided, X, Y),
    "padded for two": (lambda x: both(jnp.pad(x * 2, ((0, 0), (1, 1), (0, 0)))), X),
    "joined for two": (lambda x, y: both(jnp.concatenate([x * 2, y + 1], axis=1)), X, Y),
}


def kernels_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> KernelTable:
    arguments = [shaped(*s) for s in shapes]
    made = jax.eval_shape(function, *arguments)
    workload = Workload(
        step=lambda state, batch: (function(*batch), 0.0),
        init=lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), made),
        batch=tuple(arguments),
    )
    return analyse(workload).analysis.kernels


def test_a_quotient_is_computed_again_where_that_is_cheap() -> None:
    flat = jax.jit(divided).lower(shaped(*X), shaped(*Y)).compiler_ir("stablehlo")
    made = {}
    for platform in ("cpu", *CHEAP_DIVISION):
        main = main_function(flat.operation).regions[0].blocks[0]
        operations = Operations(main, {}, platform)
        written = Fusion(operations).written
        made[platform] = [operations.op_of[v] for v, w in enumerate(written) if w]
    assert "stablehlo.divide" in made.pop("cpu")
    assert all("stablehlo.divide" not in written for written in made.values())


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> jax.stages.Compiled:
    return jax.jit(function).lower(*(shaped(*s) for s in shapes)).compile()


def counts(program: jax.stages.Compiled) -> hlo.HloCounts:
    return hlo.count(hlo.parse(program.as_text() or ""), ())


def traffic(kernels: KernelTable) -> float:
    read = kernels.value_bytes[kernels.read_value] * kernels.read_scale
    written = kernels.value_bytes[kernels.kernel_value] * kernels.kernel_writes
    each = written + np.bincount(kernels.read_kernel, weights=read, minlength=len(written))
    return float(np.dot(each, kernels.kernel_trips))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_and_their_bytes_are_the_compiled_ones(name: str) -> None:
    function, *shapes = PROGRAMS[name]
    kernels, seen = kernels_of(function, *shapes), counts(compiled(function, *shapes))
    assert len(kernels.kernel_value) == seen.op_count
    assert traffic(kernels) == pytest.approx(seen.bytes_accessed, rel=0.01)


def test_what_four_slices_need_is_padded_once() -> None:
    def convolved(x, weight):  # type: ignore[no-untyped-def]
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        return sum(padded[:, c : c + 64] * weight[c] for c in range(4))

    shapes = X, (4, 96)
    assert len(kernels_of(convolved, *shapes).kernel_value) == 2
    assert counts(compiled(convolved, *shapes)).op_count == 2


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
    held = propagate._peak_of(kernels, kernels.value_bytes.astype(float), [])
    held += memory.output_size_in_bytes
    assert 0.9 < held / (memory.temp_size_in_bytes + memory.output_size_in_bytes) < 1.45
