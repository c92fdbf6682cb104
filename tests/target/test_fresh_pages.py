"""Temporaries too large for the allocator to keep cost their pages, in rung 1 and in rung 2."""

import dataclasses

import jax
import pytest

from autoshard.compat.xla.executable import compile_module
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.job import CompileResult
from autoshard.target.cost import FRESH_FROM_BYTES, CostModel
from tests import lowered, workloads
from tests.analysed import CONSTANTS, analyse, baseline, propagator

KEPT = CostModel(dataclasses.replace(CONSTANTS, shared=True))
FRESH = CostModel(dataclasses.replace(CONSTANTS, shared=True, fresh_s_per_byte=1e-9))


def both_costs(width, name):
    of = analyse(workloads.mlp(width=width))
    layout = baseline(of.space, name)
    return [propagator(of.analysis).judge(of.space, layout, cost) for cost in (KEPT, FRESH)]


def test_rung_1_takes_its_own_peak_for_the_block():
    kept, fresh = both_costs(1 << 18, "replicated")  # each gradient is 128 MiB
    block = kept.peak_memory_bytes - kept.state_bytes
    assert block > 2 * FRESH_FROM_BYTES
    extra_s = fresh.compute_s - kept.compute_s
    batch_bytes = 2 * 32 * (1 << 18) * 4
    assert extra_s == pytest.approx(8 * 1e-9 * (block - batch_bytes))
    assert block - batch_bytes > 128 << 20
    assert fresh.time_s - kept.time_s == pytest.approx(extra_s)


def test_what_is_divided_small_enough_is_kept():
    kept, fresh = both_costs(1 << 14, "FSDP")
    assert kept.peak_memory_bytes < FRESH_FROM_BYTES
    assert fresh.compute_s == kept.compute_s


@pytest.mark.parametrize("block", [FRESH_FROM_BYTES - 1, FRESH_FROM_BYTES])
def test_rung_2_knows_the_block_from_the_compiler(block):
    module = lowered.train_module()
    executable = compile_module(module, jax.devices()[: module.device_count])
    result = CompileResult(
        memory=dataclasses.replace(executable.memory, temporaries_bytes=block),
        hlo_text=executable.hlo_text,
        warnings=(),
        elapsed_s=0.0,
    )
    kept, fresh = (estimate_of(module, result, cost) for cost in (KEPT, FRESH))
    expected = FRESH.fresh_s(block)
    assert (expected > 0) == (block == FRESH_FROM_BYTES)
    assert fresh.time_s - kept.time_s == pytest.approx(expected)
