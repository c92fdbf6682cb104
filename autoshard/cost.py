"""The one model of time that rungs 1 and 2 share, and its constants.

Time of a step = sum over kernels of max(operations / rate, bytes / bandwidth) + launch, plus for
each collective latency + bytes / bandwidth of its group (alpha-beta model; ring and tree costs are
in the measured or catalogued alpha and beta of each kind and group size). Devices of a fake mesh
share the cores of one host: there the rates are the host's, and the work of all devices adds up.

Not modelled: overlap of communication with computation, cache effects between kernels.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np

from autoshard.trial import Collective

MODEL_REVISION = 2
"""Part of every journal key: raise it when a change here changes estimates."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Cost of one kind of collective in groups of one size.

    Attributes:
      latency_s: of one execution with nothing to send.
      s_per_byte: for each byte of payload on one device (see `Collective.bytes`).
    """

    kind: str
    group_size: int
    latency_s: float
    s_per_byte: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the model knows of a target.

    Attributes:
      device: kind of device, for messages and keys.
      device_count: devices it was measured or catalogued for.
      contract_flops_per_s: matrix products and convolutions.
      element_flops_per_s: everything else, one operation an element.
      bandwidth_bytes_per_s: memory traffic.
      launch_s: fixed cost of a kernel.
      shared: the rates are of a host whose cores all devices share.
      forms_reduce_scatter: the compiler makes one reduce-scatter of an all-reduce whose result is
        sliced along the same axes; else the whole is reduced and then cut.
      links: measured or catalogued collectives.
      date: ISO date of the calibration, or of the catalogue entry.
    """

    device: str
    device_count: int
    contract_flops_per_s: float
    element_flops_per_s: float
    bandwidth_bytes_per_s: float
    launch_s: float
    shared: bool
    forms_reduce_scatter: bool
    links: tuple[LinkCost, ...]
    date: str

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "Constants":
        links = tuple(LinkCost(**link) for link in data["links"])  # type: ignore[attr-defined]
        return Constants(**{**data, "links": links})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far the higher rungs found the model off: factors on its two parts. 1, 1 says nothing."""

    compute: float = 1.0
    communication: float = 1.0


class CostModel:
    """Seconds of kernels and collectives on one target."""

    def __init__(self, constants: Constants, correction: Correction | None = None):
        self.constants = constants
        self.correction = correction or Correction()
        by_kind: dict[str, list[LinkCost]] = {}
        for link in constants.links:
            by_kind.setdefault(link.kind, []).append(link)
        self._links = {k: sorted(v, key=lambda x: x.group_size) for k, v in by_kind.items()}

    @property
    def _devices(self) -> int:
        """How many devices' work adds up."""
        return self.constants.device_count if self.constants.shared else 1

    def kernels_s(
        self, flops: np.ndarray, bytes_: np.ndarray, trips: np.ndarray, contracts: np.ndarray
    ) -> float:
        """Seconds of all kernels of a step; arrays of one entry a kernel, for one device."""
        c = self.constants
        rate = np.where(contracts, c.contract_flops_per_s, c.element_flops_per_s)
        each = np.maximum(flops / rate, bytes_ / c.bandwidth_bytes_per_s) + c.launch_s
        return float(self._devices * np.dot(each, trips)) * self.correction.compute

    def totals_s(
        self, contract_flops: float, element_flops: float, bytes_: float, launches: float
    ) -> float:
        """Seconds of kernels of which only totals are known, for one device."""
        c = self.constants
        busy = contract_flops / c.contract_flops_per_s + max(
            element_flops / c.element_flops_per_s, bytes_ / c.bandwidth_bytes_per_s
        )
        return self._devices * (busy + launches * c.launch_s) * self.correction.compute

    def collective_s(self, kind: str, group_size: int, bytes_: float) -> float:
        """Seconds of one execution of a collective."""
        if group_size <= 1:
            return 0.0
        links = self._links.get(kind) or self._links.get("all_gather")
        if not links:
            return 0.0
        # Between two measured group sizes both constants are taken to be linear in the size.
        sizes = [link.group_size for link in links]
        latency = float(np.interp(group_size, sizes, [x.latency_s for x in links]))
        per_byte = float(np.interp(group_size, sizes, [x.s_per_byte for x in links]))
        return (latency + per_byte * bytes_) * self.correction.communication

    def collectives_s(self, collectives: Iterable[Collective]) -> float:
        return sum(self.collective_s(c.kind, c.group_size, c.bytes) * c.count for c in collectives)


def fit_correction(
    pairs: Iterable[tuple[float, float, float]], prior_weight: float = 1.0
) -> Correction:
    """Least squares for the factors that bring predictions to what was seen.

    Each pair is (predicted compute seconds, predicted communication seconds, seen seconds), with
    the factors of any earlier correction taken out. Errors count relative to what was seen; a ridge
    towards the pairs' common scale keeps a factor that the pairs say nothing about in line.
    """
    rows = [(a / t, b / t) for a, b, t in pairs if t > 0]
    if not rows:
        return Correction()
    x = np.array(rows)
    scale = 1.0 / float(np.mean(x.sum(axis=1)))
    ridge = prior_weight * np.eye(2) * float(np.mean(x.sum(axis=1) ** 2))
    solved = np.linalg.solve(x.T @ x + ridge, x.T @ np.ones(len(rows)) + ridge @ [scale, scale])
    low, high = scale / 4, scale * 4
    compute, communication = (float(np.clip(v, low, high)) for v in solved)
    return Correction(compute=compute, communication=communication)
