"""Programs written by hand, judged by rung 2 for hardware that is not here."""

import pathlib
from collections.abc import Mapping

from autoshard.compat.shardy import stablehlo
from autoshard.records.module import Module
from autoshard.records.trial import Estimate, Failure, Kind, Stage
from autoshard.rungs.compile.estimate import estimate_of
from autoshard.rungs.compile.job import compile_in_process, request_for
from autoshard.target.cost import CostModel
from autoshard.target.target import Target
from experiments.handwritten_pod.baselines import Baseline
from experiments.kept_compiles import KeptCompiles
from experiments.pod_sizes import PodSize


def judged(
    baselines: Mapping[str, Baseline],
    size: PodSize,
    target: Target,
    cost: CostModel,
    folder: pathlib.Path,
    time_limit_s: float = 600.0,
) -> dict[str, Estimate | Failure]:
    """Compiles each baseline with the target's own compiler and prices it as rung 2 does.

    Args:
      folder: what was compiled stays there, and is not compiled again.
    """
    with KeptCompiles(folder) as compiles:
        waiting = {}
        found: dict[str, Estimate | Failure] = {}
        for name, baseline in baselines.items():
            try:
                module = lowered(baseline, size, target)
            except ValueError as error:  # sizes that do not divide over so many devices
                found[name] = Failure(
                    stage=Stage.COMPILE, kind=Kind.UNSUPPORTED, message=str(error), elapsed_s=0.0
                )
                continue
            request = request_for(module, target, str(folder / "workers"), time_limit_s)
            waiting[name] = (module, compiles.submit(compile_in_process, request))
        for name, (module, future) in waiting.items():
            result = future.result()
            found[name] = (
                result if isinstance(result, Failure) else estimate_of(module, result, cost)
            )
    return {name: found[name] for name in baselines}


def lowered(baseline: Baseline, size: PodSize, target: Target) -> Module:
    """The baseline's program, for the target's platform and without a device."""
    hand = baseline.build(baseline.abstract_mesh(), size)
    traced = hand.jit().trace(*hand.args)
    program = traced.lower(lowering_platforms=(target.lowering_platform,))
    return Module(
        stablehlo=stablehlo.bytecode(program.compiler_ir("stablehlo").operation),
        mesh=baseline.axes,
        platform=target.lowering_platform,
        inputs=(),
        outputs=(),
        state_count=0,
    )
