"""A plan's step compared with the unsharded one, on the plan's own devices."""

from autoshard.errors import PlanError
from autoshard.lowering.lower import lower_unsharded
from autoshard.program.program import Program
from autoshard.records.module import Module
from autoshard.records.numerics import NumericsReport
from autoshard.records.trial import Failure
from autoshard.rungs.profile.inputs import make_inputs
from autoshard.rungs.profile.runner import LocalRunner
from autoshard.target.target import Target


def compared(
    program: Program, target: Target, step: Module, *, steps: int, seed: int
) -> NumericsReport:
    """Runs both from one initial state. See `Plan.check`."""
    inputs = make_inputs(program, target, seed, steps)
    bench = LocalRunner(target.placed)
    try:
        _must(bench.set_inputs(inputs.init, inputs.batches), "init() does not run unsharded")
        unsharded = lower_unsharded(program, target)
        _must(
            bench.trust("the unsharded step", unsharded, steps),
            "there is nothing to compare with, the unsharded step does not run",
        )
        _must(bench.load("the plan", step), "the plan's step cannot be loaded")
        report = bench.numerics("the plan", "the unsharded step")
    finally:
        bench.unload("the plan")
    if isinstance(report, Failure):
        raise PlanError(f"the plan's step does not run: {report.message}")
    if (failure := report.failure()) is not None:
        raise PlanError(f"the plan's step does not compute what it should: {failure.message}")
    return report


def _must(outcome: object, what: str) -> None:
    if isinstance(outcome, Failure):
        raise PlanError(f"{what}: {outcome.message}")
