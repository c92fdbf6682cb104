"""A case of the benchmark that is small enough to run."""

import dataclasses

import numpy as np

import autoshard
from tests import workloads


@dataclasses.dataclass(frozen=True)
class TinyCase:
    """A stand-in for a case of the zoo."""

    name: str = "tiny"
    family: str = "mlp"
    width: int = workloads.WIDTH

    def sample(self, seed: int) -> dict[str, np.ndarray]:
        del seed
        return {n: np.ones((workloads.BATCH, self.width), np.float32) for n in ("x", "y")}

    def workload(self) -> autoshard.Workload:
        return workloads.mlp(width=self.width)
