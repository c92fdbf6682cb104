"""Memory that a step or a loop comes back to while the caches hold it: as fast as they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compat.executable import compile_module
from autoshard.cost import CostModel, MeshPrices
from autoshard.hlo.work import Work
from autoshard.rungs.compile import estimate_of
from autoshard.rungs.compile_job import CompileResult
from autoshard.rungs.kernel_shares import _touched
from autoshard.workload import Workload
from tests import lowered
from tests.analysed import CONSTANTS, analyse, baseline, kernels_of, propagator
from tests.programs import shaped

SHARED = dataclasses.replace(CONSTANTS, shared=True)
SMALL, LARGE = 1 << 20, 1 << 28
SLOW = SHARED.bandwidth_bytes_per_s
CACHED = dataclasses.replace(SHARED, bandwidths=((SMALL, 8 * SLOW), (LARGE, SLOW)))


def test_the_time_of_a_byte_grows_between_what_was_measured() -> None:
    cost = CostModel(CACHED)
    each = [cost.memory_s(1.0, bytes_ / 8) * SLOW for bytes_ in (1, SMALL, 1 << 24, LARGE, 1e15)]
    assert each == pytest.approx([1 / 8, 1 / 8, (1 / 8 + 1) / 2, 1, 1])
    assert cost.memory_s(1.0) == CostModel(SHARED).memory_s(1.0, 1.0) == 1 / SLOW


def test_both_rungs_price_what_is_cached_alike() -> None:
    work = Work(opcode="fusion", name="f", bytes=1e9)
    arrays = np.array([0.0]), np.array([1e9]), np.array([1.0])
    for bytes_ in (SMALL, LARGE):
        touched = bytes_ / 8
        one = CostModel(CACHED).kernel_s(work, touched)
        assert one == CostModel(CACHED).kernels_s(*arrays, [""], touched=np.array([touched]))
    assert MeshPrices(CostModel(CACHED), (), LARGE).kernel_s(work, SMALL / 8) < one / 7


def scanned(turns: int, width: int):  # type: ignore[no-untyped-def]
    def step(state, x):  # type: ignore[no-untyped-def]
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ state), None), x, length=turns)[0], {}

    def init():  # type: ignore[no-untyped-def]
        return jnp.zeros((width, width))

    return Workload(step=step, init=init, batch=shaped(width, width))


def test_a_loop_touches_what_one_turn_does() -> None:
    width, matrix = 64, 64 * 64 * 4

    def nested(x):  # type: ignore[no-untyped-def]
        def inner(x, _):  # type: ignore[no-untyped-def]
            return jnp.sin(x @ x), None

        def outer(x, _):  # type: ignore[no-untyped-def]
            return jnp.cos(jax.lax.scan(inner, x, length=3)[0] @ x), None

        return jax.lax.scan(outer, x, length=5)[0] @ x

    kernels = kernels_of(nested, (width, width))
    assert sorted(kernels.loops_around) == [-1, 1]
    products = kernels.kernel_contracts
    traffic = np.where(products, 3.0 * matrix, 0.0)
    touched = _touched(kernels, traffic, kernels.kernel_trips, 1e12)
    assert dict(zip(kernels.kernel_trips[products], touched[products], strict=True)) == {
        15.0: 3 * matrix,  # one product in a turn of the inner loop
        5.0: 4 * 3 * matrix,  # three turns of that, and one product more
        1.0: 1e12,
    }
    assert _touched(kernels, traffic, kernels.kernel_trips, 100.0).max() == 100.0


@pytest.mark.parametrize("around", [1, 5])
def test_what_runs_once_comes_up_again_with_what_is_around_it(around: int) -> None:
    def nested(x):  # type: ignore[no-untyped-def]
        def once(x, _):  # type: ignore[no-untyped-def]
            return jnp.sin(x @ x), None

        def outer(x, _):  # type: ignore[no-untyped-def]
            return jnp.cos(jax.lax.scan(once, x, length=1)[0] @ x), None

        return jax.lax.scan(outer, x, length=around)[0]

    kernels = kernels_of(nested, (64, 64))
    traffic = np.where(kernels.kernel_contracts, 100.0, 0.0)
    touched = _touched(kernels, traffic, kernels.kernel_trips, 1e12)
    assert set(touched[kernels.kernel_contracts]) == {200.0 if around > 1 else 1e12}


def scanned_beside(turns: int, width: int) -> Workload:
    """A small loop in a step that touches more than the caches hold."""

    def step(state, batch):  # type: ignore[no-untyped-def]
        x, large = batch
        return scanned(turns, width).step(state, x)[0], {"sum": jnp.sum(large)}

    one = scanned(turns, width)
    return Workload(step=step, init=one.init, batch=(one.batch, shaped(8192, 8192)))


@pytest.mark.parametrize(("width", "cached"), [(64, True), (4096, False)])
def test_rung_1_reads_weights_of_a_loop_from_the_cache_where_they_fit(
    width: int, cached: bool
) -> None:
    of = analyse(scanned_beside(9, width))
    layout = baseline(of.space, "replicated")
    slow, fast = (
        propagator(of.analysis).judge(of.space, layout, CostModel(c)) for c in (SHARED, CACHED)
    )
    assert (fast.compute_s < slow.compute_s) == cached
    assert cached or fast.compute_s == pytest.approx(slow.compute_s)


def test_rung_2_knows_from_the_compiler_what_a_step_touches() -> None:
    module = lowered.train_module()
    made = compile_module(module, jax.devices()[: module.device_count])
    free = dataclasses.replace(CACHED, launch_s=0.0)
    found = []
    none = {"temporaries_bytes": 0, "outputs_bytes": 0, "aliased_bytes": 0}
    both = {"outputs_bytes": LARGE, "aliased_bytes": LARGE}
    changes = [{}, both, {"temporaries_bytes": LARGE}, {"outputs_bytes": LARGE}]
    for change in changes:
        memory = dataclasses.replace(made.memory, **none | change)
        result = CompileResult(memory=memory, hlo_text=made.hlo_text, warnings=(), elapsed_s=0.0)
        found.append(estimate_of(module, result, CostModel(free)).compute_s)
    assert made.memory.arguments_bytes * 8 < SMALL
    assert found[0] == found[1] < found[2] / 2 and found[2] == found[3]
