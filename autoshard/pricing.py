"""The model of time of a target: calibrated where it is here, else from the catalogue."""

import os
from collections.abc import Callable

from autoshard.calibrations import calibrated
from autoshard.compat.contexts import without_mesh
from autoshard.cost import GATHERS_AT_ONCE, SUMS_APART, Constants, CostModel
from autoshard.network import Network
from autoshard.precision import precise_rates
from autoshard.target import Target
from autoshard.topology import Topology


@without_mesh()
def cost_model(
    target: Target,
    calibration: str | os.PathLike[str] | None = None,
    on_measuring: Callable[[], None] = lambda: None,
) -> CostModel:
    """What kernels and collectives cost on a target.

    Args:
      calibration: folder that keeps calibrations of live targets; default in the user's cache.
      on_measuring: called before a live target without a calibration is measured.
    """
    if target.topology is not None:
        return CostModel(catalogued(target.topology), network=Network(target.topology))
    return CostModel(calibrated(target, calibration, on_measuring))


def catalogued(topology: Topology) -> Constants:
    """The constants of hardware that is not here, from its catalogue entry."""
    chip = topology.chip
    rates = {dtype: figure.value for dtype, figure in chip.flops.items()}
    rates |= precise_rates(chip.platform, rates["f32"], chip.element_flops.value)
    return Constants(
        device=chip.device_kind,
        device_count=topology.device_count,
        contract_flops_per_s=rates["f32"],
        contract_by_dtype=tuple(sorted(rates.items())),
        element_flops_per_s=chip.element_flops.value,
        bandwidth_bytes_per_s=chip.memory_bandwidth.value,
        launch_s=chip.launch_s.value,
        shared=False,
        forms_reduce_scatter=True,
        gathers_by_dimension=topology.chip.platform not in GATHERS_AT_ONCE,
        folds_sums=topology.chip.platform not in SUMS_APART,
        links=(),
        date="",
        clock_hz=chip.clock_hz.value if chip.clock_hz else 0.0,
        source=f"{topology.name} {chip.digest}",
    )
