"""What measured programs start from: one initial state, and the batches of their steps."""

import contextlib
import dataclasses
import hashlib

import numpy as np

from autoshard.lowering import NOT_LOWERED, lower_init
from autoshard.module import Module
from autoshard.program import Program, sample_batch
from autoshard.rungs.bench import host_devices
from autoshard.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What `Benches.set_inputs` takes.

    Attributes:
      init: the program that makes the initial state.
      batches: their leaves in order, on the host.
    """

    init: Module
    batches: list[list[np.ndarray]]

    @property
    def digest(self) -> str:
        found = hashlib.sha256(self.init.digest.encode())
        for batch in self.batches:
            for value in batch:
                found.update(value.tobytes())
        return found.hexdigest()[:16]


def make_inputs(program: Program, target: Target, seed: int, count: int) -> Inputs:
    """`count` batches of the workload, with seeds from `seed` on.

    init() is for the host, where JAX has it: one accelerator may not hold the whole state.
    """
    batches = [sample_batch(program, seed + k) for k in range(count)]
    if target.platform != "cpu" and host_devices():
        with contextlib.suppress(*NOT_LOWERED):  # something in it is for the accelerator alone
            return Inputs(lower_init(program, "cpu"), batches)
    return Inputs(lower_init(program, target.lowering_platform), batches)
