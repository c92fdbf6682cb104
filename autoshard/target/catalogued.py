"""The constants of hardware that is not here, from its catalogue entry."""

from autoshard.records.precision import precise_rates
from autoshard.target.cost import GATHERS_AT_ONCE, SUMS_APART, Constants
from autoshard.target.topology import Topology


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
