"""What measured programs start from: one initial state, and the batches of their steps."""

import contextlib
import dataclasses
import hashlib

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard.compat.jaxpr.contexts import without_mesh
from autoshard.compat.jaxpr.jaxprs import as_function, equations
from autoshard.errors import LoweringError
from autoshard.lowering.lower import lower_init
from autoshard.program.program import Program, physical, sample_batch
from autoshard.records.module import Module
from autoshard.rungs.profile.runner import host_devices
from autoshard.target.target import Target


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What `Runner.set_inputs` takes.

    Attributes:
      init: the program that makes the initial state, or that state, where only this process, or
        only several devices, can make it.
      batches: their leaves in order, on the host.
    """

    init: Module | tuple[np.ndarray, ...]
    batches: list[list[np.ndarray]]

    @property
    def start_digest(self) -> str:
        """Of the initial state, or of what makes it."""
        return self.init.digest if isinstance(self.init, Module) else _digest(self.init)

    @property
    def digest(self) -> str:
        values = [value for batch in self.batches for value in batch]
        return _digest(values, self.start_digest)


def _digest(values: list[np.ndarray] | tuple[np.ndarray, ...], before: str = "") -> str:
    found = hashlib.sha256(before.encode())
    for value in values:
        found.update(value.tobytes())
    return found.hexdigest()[:16]


def make_inputs(program: Program, target: Target, seed: int, count: int) -> Inputs:
    """`count` batches of the workload, with seeds from `seed` on.

    init() is for the host, where JAX has it: one accelerator may not hold the whole state. One with
    manual regions (shard_map) runs here, on the devices that these name.
    """
    batches = [sample_batch(program, seed + k) for k in range(count)]
    made = equations(program.plain_init.jaxpr)
    regions = [eqn.params["mesh"] for eqn in made if eqn.primitive.name == "shard_map"]
    # A mesh that is set while it is traced names no devices.
    if program.init_is_bound or (regions and all(isinstance(m, Mesh) for m in regions)):
        return Inputs(_made_here(program), batches)
    if target.platform != "cpu" and host_devices():
        with contextlib.suppress(LoweringError):  # something in it is for the accelerator alone
            return Inputs(lower_init(program, "cpu"), batches)
    return Inputs(lower_init(program, target.lowering_platform), batches)


@without_mesh()
def _made_here(program: Program) -> tuple[np.ndarray, ...]:
    """What init() makes, run by this process."""
    with jax.default_device(next(iter(host_devices()), None)):
        made = jax.jit(as_function(program.plain_init))()
    return tuple(physical(leaf, value) for leaf, value in zip(program.state, made, strict=True))
