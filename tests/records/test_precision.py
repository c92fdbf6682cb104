"""Precision of products: both rungs price what the compilers of hardware that is not here make."""

import pathlib

import jax.numpy as jnp
import pytest

from autoshard.lowering.lower import lower_step
from autoshard.records.trial import Estimate
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.job import CompileResult, compile_in_process, request_for
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.target import find_target
from autoshard.workload import Workload
from tests.analysed import analyse, baseline, propagator
from tests.hardware import needs
from tests.programs import normal, shaped, train

WIDTH = 2048


def product(precision: str) -> Workload:
    def loss(params, x):
        return jnp.mean(jnp.tanh(jnp.dot(x, params["kernel"], precision=precision)) ** 2)

    return train(loss, lambda: {"kernel": normal(0, WIDTH, WIDTH)}, shaped(WIDTH, WIDTH))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("platform", "name", "factors"),
    [("cuda", "h100:1x8", (1, 494.7 / 66.9)), ("tpu", "v5e:2x4", (3, 6))],
)
def test_both_rungs_price_the_precision_of_products(
    platform: str, name: str, factors: tuple[float, float], tmp_path: pathlib.Path
) -> None:
    needs(platform)
    there = find_target(name)
    cost = cost_model(there)
    compute_s: dict[tuple[str, str], float] = {}
    for precision in ("default", "high", "highest"):
        of = analyse(product(precision))
        layout = baseline(of.space, "replicated")
        judged = propagator(of.analysis).judge(of.space, layout, cost)
        module = lower_step(of.analysis, of.space.specs(layout), there)
        program = compile_in_process(request_for(module, there, str(tmp_path), 120.0))
        assert isinstance(judged, Estimate) and isinstance(program, CompileResult), program
        compute_s["rung 1", precision] = judged.compute_s
        compute_s["rung 2", precision] = estimate_of(module, program, cost).compute_s
    two_products_s = 2 * 2 * WIDTH**3 / cost.rate("f32")
    for precision, factor in zip(("high", "highest"), factors, strict=True):
        for rung in ("rung 1", "rung 2"):
            more_s = compute_s[rung, precision] - compute_s[rung, "default"]
            assert more_s == pytest.approx((factor - 1) * two_products_s, rel=0.15, abs=1e-6), rung
