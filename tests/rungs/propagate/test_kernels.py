"""Kernels read from a module: operations, trip counts, live ranges, against counts by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.lowering import lower as lowering
from autoshard.lowering.problem import SearchProblem
from autoshard.records.layout import Layout
from autoshard.rungs.propagate import Propagator
from autoshard.workload import Workload
from tests import programs
from tests.analysed import (
    analyse,
    baseline,
    judge,
    propagator,
    propagator_of_step,
    subject,
    target,
)
from tests.programs import BATCH, EMBED, LAYERS, MLP, SEQUENCE, shaped, train


def compiled_peak(of: SearchProblem, layout: Layout) -> int:
    """What XLA:CPU says that one device needs, bytes."""
    step = lowering.jit_step(of.analysis, of.space.specs(layout), target())
    memory = step.lower(*lowering.shapes(of.analysis.program.inputs)).compile().memory_analysis()
    assert memory is not None
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def contracts(rung: Propagator) -> np.ndarray:
    """(k,) which kernels are products or convolutions."""
    return np.array([dtype != "" for dtype in rung.kernels.dtypes], dtype=bool)


def contract_flops(rung: Propagator) -> float:
    chosen = contracts(rung)
    return float(np.dot(rung.kernels.flops[chosen], rung.kernels.trips[chosen]))


def written_bytes(rung: Propagator) -> np.ndarray:
    """(k,) size of what each kernel writes."""
    return np.array(rung.operations.sizes)[rung.kernels.value]


def test_a_product_in_a_scan_counts_every_iteration() -> None:
    def step(w, x):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)
        return w, jnp.sum(y)

    rung = propagator_of_step(step, shaped(5, 8, 8), shaped(16, 8))
    assert contract_flops(rung) == 5 * 2 * 16 * 8 * 8
    assert set(rung.kernels.trips[contracts(rung)]) == {5.0}
    assert rung.operations.assumptions == []


def test_loops_in_loops_multiply() -> None:
    def step(w, x):
        def outer(x, _):
            return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w), x), None

        return w, jnp.sum(jax.lax.scan(outer, x, None, length=3)[0])

    rung = propagator_of_step(step, shaped(8, 8), shaped(16, 8))
    assert contract_flops(rung) == 12 * 2 * 16 * 8 * 8


def test_an_unrolled_scan_executes_the_same_operations() -> None:
    rolled, unrolled = (
        Propagator(analyse(programs.scanned_mlp(layers=8, unroll=n)).analysis) for n in (1, 4)
    )
    assert contract_flops(unrolled) == contract_flops(rolled)


def test_a_scanned_and_an_unrolled_gpt_execute_the_same_products() -> None:
    plain = Propagator(analyse(programs.scanned_gpt(remat=False)).analysis)
    unrolled = propagator(subject("unrolled_gpt").analysis)
    assert contract_flops(plain) == contract_flops(unrolled)
    # And by hand: forward, and twice that backward.
    d, f, t = EMBED, MLP, BATCH * SEQUENCE
    layer = 2 * t * (4 * d * d + 2 * d * f) + 2 * 2 * t * SEQUENCE * d
    vocabulary = 2 * t * d * programs.VOCAB
    assert contract_flops(plain) == 3 * (LAYERS * layer + vocabulary)


def test_remat_computes_the_forward_pass_twice() -> None:
    plain = Propagator(analyse(programs.scanned_gpt(remat=False)).analysis)
    remat = propagator(subject("scanned_gpt").analysis)
    assert 1.1 < contract_flops(remat) / contract_flops(plain) < 4 / 3 + 0.01


def test_convolutions_by_hand() -> None:
    def step(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return w, jnp.sum(y)

    rung = propagator_of_step(step, shaped(3, 3, 4, 6), shaped(8, 10, 10, 4))
    # Along each side 3 taps for each place, but for one at either end that falls on padding.
    assert contract_flops(rung) == 2 * 8 * (3 * 10 - 2) ** 2 * 4 * 6


def test_an_unknown_trip_count_is_a_named_assumption() -> None:
    rung = propagator(subject("loops").analysis)
    assert any("unknown trip count" in a for a in rung.operations.assumptions)


def test_the_largest_branch_counts_and_is_a_named_assumption() -> None:
    def step(w, x):
        y = jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w @ w @ w, lambda: x @ w)
        return w, jnp.sum(y)

    rung = propagator_of_step(step, shaped(8, 8), shaped(16, 8))
    assert contract_flops(rung) == 3 * 2 * 16 * 8 * 8
    assert any("largest branch" in a for a in rung.operations.assumptions)


def test_of_branches_that_only_move_data_the_one_that_moves_more_is_taken() -> None:
    def step(w, x):
        y = jax.lax.cond(jnp.sum(x) > 0, lambda x: x.T, lambda x: x, x)
        return w, jnp.sum(y)

    rung = propagator_of_step(step, shaped(8, 8), shaped(256, 256))
    moved = written_bytes(rung) * rung.kernels.trips
    assert moved.max() >= 256 * 256 * 4


def test_branches_that_are_not_taken_send_nothing_and_loops_in_them_count_every_turn() -> None:
    def step(w, x):
        def long() -> jax.Array:
            return jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ w), x)

        y = jax.lax.switch(jnp.int32(jnp.sum(x)) % 2, [lambda: x @ (w @ w @ w @ w), long])
        return w, jnp.sum(y)

    of = analyse(
        Workload(step=step, init=lambda: jnp.zeros((8, 8)), batch=shaped(16, 8)),
    )
    rung = propagator(of.analysis)
    assert contract_flops(rung) == 50 * 2 * 16 * 8 * 8, "one turn is less than the other branch"
    # Tensor parallel: each product of the other branch would be gathered or summed.
    layout = baseline(of.space, "tensor parallel")
    counts = [c.count for c in judge(of, layout).collectives]
    assert counts and all(n in (1, 50) for n in counts), counts
    assert counts.count(1) <= 3, "what the loop starts from, the loss, the weights"


def gathers(first: int, second: int) -> int:
    """How many are sent of weights that two branches use, each in so many products."""

    def step(w, x):
        def products(count: int) -> Callable[[], jax.Array]:
            def branch() -> jax.Array:
                y = x
                for _ in range(count):
                    y = jnp.tanh(y @ w)
                return y

            return branch

        y = jax.lax.cond(jnp.sum(x) > 0, products(second), products(first))
        return w, jnp.sum(y)

    of = analyse(Workload(step=step, init=lambda: jnp.zeros((64, 64)), batch=shaped(16, 64)))
    sent = judge(of, baseline(of.space, "FSDP")).collectives
    return sum(c.count for c in sent if c.kind == "all_gather")


def test_what_two_branches_gather_is_gathered_in_the_one_that_is_taken() -> None:
    assert gathers(1, 3) == gathers(3, 1) == 1


def test_what_the_condition_of_a_loop_sends_is_sent_in_each_turn() -> None:
    def step(w, x):
        def turn(y, _):
            def going(carry):
                return (carry[0] < 1) & (jnp.sum(carry[1]) > 0)

            def again(carry):
                return carry[0] + 1, jnp.tanh(carry[1])

            return jax.lax.while_loop(going, again, (0, y))[1], None

        y, _ = jax.lax.scan(turn, x, length=7)
        return w, jnp.sum(y)

    of = analyse(Workload(step=step, init=lambda: jnp.zeros((8, 8)), batch=shaped(16, 8)))
    layout = baseline(of.space, "data parallel")
    counts = sorted(c.count for c in judge(of, layout).collectives)
    assert counts == [1, 7], "the loss, and the condition"


def test_elementwise_chains_are_not_written() -> None:
    def step(w, x):
        return w, jnp.sum(jnp.exp(x * 2.0 + 1.0) - x)

    rung = propagator_of_step(step, shaped(8, 8), shaped(1024, 8))
    assert sum(written_bytes(rung)) < 1024 * 8 * 4


def test_a_loop_makes_constants_itself() -> None:
    """XLA's while-loop-constant-sinking: a mask's fill is not an array that a loop is handed."""

    def step(w, x):
        fill = jnp.broadcast_to(jnp.float32(-1e9), (64, 64))

        def body(_, x):
            return jnp.where(x > 0, x.astype(jnp.float32), fill).astype(x.dtype) @ w

        return w, jnp.sum(jax.lax.fori_loop(0, 4, body, x))

    rung = propagator_of_step(
        step, shaped(64, 64, dtype=jnp.bfloat16), shaped(64, 64, dtype=jnp.bfloat16)
    )
    assert not np.any(written_bytes(rung) == 64 * 64 * 4)
    buffers = rung.buffers
    held = np.array(rung.operations.sizes)[(buffers.live_from >= 0) & (buffers.parents < 0)]
    assert not np.any(held == 64 * 64 * 4)


@pytest.mark.parametrize("name", list(programs.EVERY))
def test_tables_are_consistent(name: str) -> None:
    rung = propagator(subject(name).analysis)
    kernels, buffers, ops = rung.kernels, rung.buffers, rung.operations
    n, k = len(ops.sizes), len(kernels.value)
    for column in (kernels.flops, kernels.trips, kernels.writes, kernels.dtypes):
        assert len(column) == k
    assert np.all(kernels.value < n) and np.all(kernels.read_value < n)
    assert np.all(kernels.read_kernel < k)
    assert np.all(kernels.flops >= 0) and np.all(np.isfinite(kernels.flops))
    assert np.all((kernels.read_scale > 0) & (kernels.read_scale <= 2))
    assert np.all(buffers.live_from <= buffers.live_to)
    assert np.all(buffers.live_to < buffers.length + 1)
    program = subject(name).analysis.program
    for value, leaf in zip(ops.arguments, program.inputs, strict=True):
        assert ops.sizes[value] == leaf.bytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("scanned_mlp", "data parallel"),
        ("scanned_mlp", "FSDP"),
        ("adamw", "FSDP"),
        ("adamw", "data parallel"),
        ("conv_net", "data parallel"),
        ("scanned_gpt", "FSDP x TP"),
    ],
)
def test_peak_memory_is_near_the_compiler_s(name: str, layout: str) -> None:
    of = subject(name)
    chosen = baseline(of.space, layout)
    estimate = judge(of, chosen)
    peak = compiled_peak(of, chosen)
    ratio = estimate.peak_memory_bytes / peak
    print(f"{name}, {layout}: {estimate.peak_memory_bytes} of {peak} bytes, {ratio:.2f}")
    assert 0.4 <= ratio <= 2.0  # convolutions on CPU copy their operands: 0.44


def scanned(rows: jax.Array) -> jax.Array:
    """As much as it is given, made in a loop."""
    return jax.lax.scan(lambda c, row: (c + row, jnp.tanh(c)), jnp.zeros(rows.shape[1]), rows)[1]


def near_the_compilers(step: Callable[..., object], x: jax.ShapeDtypeStruct) -> bool:
    """Whether the peak of a step on one device is within 5 % of what the compiler says."""
    of = analyse(Workload(step=step, init=lambda: jnp.zeros((8, 8)), batch=x))
    layout = Layout(mesh=(("x", 8),))
    return 0.95 < judge(of, layout).peak_memory_bytes / compiled_peak(of, layout) < 1.05


def test_an_output_is_held_until_the_step_ends() -> None:
    def step(w, x):
        early = jnp.sin(x) * 2
        return w + jnp.sum(scanned(scanned(early))), early

    assert near_the_compilers(step, shaped(4096, 64))


def test_an_update_of_what_is_filled_takes_a_buffer_of_its_own() -> None:
    def step(w, x):
        at = jnp.int32(x[0, 0])
        y = jax.lax.dynamic_update_slice(jnp.zeros((4096, 64)), x, (at, 0))
        return w + jnp.sum(jnp.sort(y, axis=0) * y), jnp.sum(y)

    assert near_the_compilers(step, shaped(64, 64))


def test_what_one_loop_stacks_and_the_next_reads_is_held_once() -> None:
    """Activations saved for the backward pass: `while` shares one buffer with operand and result
    (XLA's buffer assignment), and what a loop only reads is not copied."""
    layers, batch, width = 16, 2048, 8

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    of = analyse(train(loss, lambda: jnp.zeros((layers, width, width)), shaped(batch, width)))
    layout = Layout(mesh=(("x", 8),))
    assert 0.8 < judge(of, layout).peak_memory_bytes / compiled_peak(of, layout) < 1.2


def test_a_gathered_array_is_held_while_it_is_used() -> None:
    """A constraint that gathers makes another array, live until its last use; one that cuts ends
    the need of the whole."""
    rung = propagator(subject("scanned_gpt").analysis)
    buffers, whole = rung.buffers, np.array(rung.operations.sizes)
    local = whole / 8
    constraint = next(
        int(c)
        for c in np.flatnonzero(buffers.parents >= 0)
        if buffers.live_to[c] > buffers.live_from[c] >= 0
        and buffers.live_from[buffers.buffer[buffers.parents[c]]] >= 0
    )
    parent = buffers.buffer[buffers.parents[constraint]]
    sizes, live_to = buffers.sized(local)
    assert sizes[constraint] == 0 and live_to[parent] >= live_to[constraint]
    local[constraint] *= 8
    sizes, _ = buffers.sized(local)
    assert sizes[constraint] == whole[constraint]


def test_state_is_counted_once_because_it_is_donated() -> None:
    of = subject("adamw")
    estimate = judge(of, Layout(mesh=(("x", 8),)))
    state = of.analysis.program.state_bytes
    assert estimate.state_bytes == state
    assert state < estimate.peak_memory_bytes < 2 * state


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (None, "f32"),
        (jax.lax.Precision.HIGH, "f32:high"),
        (jax.lax.Precision.HIGHEST, "f32:highest"),
        ((jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST), "f32:highest"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "f32:highest"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "bf16"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6, "bf16_x6"),
    ],
)
def test_a_product_keeps_its_precision(precision: jax.lax.PrecisionLike, dtype: str) -> None:
    def step(w, x):
        return w, jnp.sum(jax.lax.dot(x, w, precision=precision))

    assert set(propagator_of_step(step, shaped(8, 8), shaped(16, 8)).kernels.dtypes) - {""} == {
        dtype
    }


def test_a_convolution_keeps_its_precision_and_bf16_has_one() -> None:
    def step(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision="highest"
        )
        b = x[0, 0].astype(jnp.bfloat16)
        return w, jnp.sum(y) + jnp.sum(jax.lax.dot(b, b.T, precision="highest"))

    rung = propagator_of_step(step, shaped(3, 3, 4, 6), shaped(8, 10, 10, 4))
    assert set(rung.kernels.dtypes) - {""} == {"f32:highest", "bf16"}
