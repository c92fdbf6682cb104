"""A lowered program as plain data: StableHLO bytes and shardings that any process can compile."""

import dataclasses
import hashlib
import math

from autoshard.records.layout import Spec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One flat argument or result of a module, as the device holds it.

    Attributes:
      path: the pytree path, such as `state.params['layers']['w']`; for messages.
      shape, dtype: the whole array's; PRNG keys appear as their uint32 words.
      spec: mesh axes of each dimension.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec

    @property
    def bytes(self) -> int:
        """Size of the whole array, bytes."""
        import numpy as np

        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A program ready to be compiled for a mesh: no Python objects, no live devices; pickles small.

    Attributes:
      stablehlo: StableHLO bytecode with its shardings and donations as attributes.
      mesh: (mesh axis, size) pairs, major to minor over the device order.
      platform: "cpu", "cuda", "rocm" or "tpu".
      inputs, outputs: every flat argument and result, in order; none is dropped as unused.
      state_count: the first `state_count` inputs and outputs are the state; output i becomes
        input i of the next step. The other inputs are the batch, the other outputs the metrics.
    """

    stablehlo: bytes
    mesh: tuple[tuple[str, int], ...]
    platform: str
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    state_count: int

    @property
    def device_count(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def held_bytes(self, batches: int) -> int:
        """What the state and so many batches take on one device, bytes."""
        sizes = dict(self.mesh)
        parts = [
            array.bytes // math.prod(sizes[m] for dim in array.spec for m in dim)
            for array in self.inputs
        ]
        return sum(parts[: self.state_count]) + batches * sum(parts[self.state_count :])

    @property
    def digest(self) -> str:
        """Hex digest of the program and its shardings; bytecode must hold no locations."""
        return hashlib.sha256(
            repr((self.mesh, self.platform)).encode() + self.stablehlo
        ).hexdigest()
