"""Rules: tables from axis names to mesh axes, and the shardings they give on a mesh."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AnyMesh: TypeAlias = Mesh | AbstractMesh
Names: TypeAlias = tuple[str | None, ...]
"""One axis name or None for each dimension of an array."""
Table: TypeAlias = Mapping[str, tuple[str, ...]]
"""Axis name -> mesh axes that divide it, major first; a name that is not there stays whole."""

# Axis names of the parameters, by the last words of their paths. They are MaxText's (maxtext.py).
PARAMS: dict[str, Names] = {
    "embedding": ("vocab", "embed_vocab"),
    "head": ("embed_vocab", "vocab"),
    "query": ("embed", "q_heads", "kv"),
    "key": ("embed", "kv_heads", "kv_head_dim"),
    "value": ("embed", "kv_heads", "kv_head_dim"),
    "out": ("heads", "kv", "embed"),
    "mlp.gate": ("embed", "mlp"),
    "mlp.up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
    "router": ("embed", None),
    "experts.gate": ("exp", "embed_moe", "mlp_moe"),
    "experts.up": ("exp", "embed_moe", "mlp_moe"),
    "experts.down": ("exp", "mlp_moe", "embed_moe"),
    "scale": ("norm",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """A layout by hand on its mesh.

    Attributes:
      mesh: live, of a topology, or abstract.
      params: of parameters and the optimizer's moments; names as in `PARAMS`.
      activations: of activations and the batch; names as the models' `Constrain` hook gives them.
      gathered: of parameters during a step, where they are gathered once, as they are cast; None
        where each layer's are when its turn comes.
    """

    mesh: AnyMesh
    params: Table
    activations: Table
    gathered: Table | None = None

    def param(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """How the parameter of this path lies in memory between steps; layers stay in front."""
        return self._param(self.params, path, shape)

    def used(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """How it lies while the step runs, where it is gathered once."""
        return self._param(self.gathered or {}, path, shape)

    def batch(self, shape: tuple[int, ...], accumulate: int) -> NamedSharding:
        """How a batch leaf is sharded.

        Raises:
          ValueError: a part of the batch does not divide over the devices that share it.
        """
        wanted = [axis for axis in self.activations["batch"] if axis in self.mesh.shape]
        count = math.prod(self.mesh.shape[axis] for axis in wanted)
        if shape[0] % (count * accumulate):
            raise ValueError(
                f"a batch of {shape[0]} in {accumulate} parts must divide over the {count} devices "
                f"of the mesh axes {wanted}: choose a batch that is a multiple of "
                f"{count * accumulate}"
            )
        return self._sharding(self.activations, ("batch",) + (None,) * (len(shape) - 1), shape)

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """The `Constrain` hook of the models."""
        return jax.lax.with_sharding_constraint(x, self._sharding(self.activations, names, x.shape))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _param(self, table: Table, path: str, shape: tuple[int, ...]) -> NamedSharding:
        words = re.findall(r"'(\w+)'", path)
        names = PARAMS.get(words[-1]) or PARAMS[".".join(words[-2:])]
        return self._sharding(table, (None,) * (len(shape) - len(names)) + names, shape)

    def _sharding(self, table: Table, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        used: set[str] = set()
        spec: list[tuple[str, ...] | None] = []
        for name, size in zip(names, shape, strict=True):
            taken: list[str] = []
            for axis in table.get(name, ()) if name else ():
                if axis in used or axis not in self.mesh.shape:
                    continue  # a mesh axis divides one dimension, the first that asks for it
                # Key-value heads fewer than the mesh axis stay whole, as in Megatron.
                if size % math.prod(self.mesh.shape[a] for a in (*taken, axis)) == 0:
                    taken.append(axis)
            used.update(taken)
            spec.append(tuple(taken) or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))
