"""A layout by hand: a mesh, and tables from axis names to mesh axes, as in MaxText."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AnyMesh: TypeAlias = Mesh | AbstractMesh
"""A mesh of live devices, of a topology's devices, or of none."""
Names: TypeAlias = tuple[str | None, ...]
"""One axis name or None for each dimension of an array."""
Table: TypeAlias = Mapping[str, tuple[str, ...]]
"""Axis name -> mesh axes that divide it, major first; a name that is not there stays whole."""
Spec: TypeAlias = list[tuple[str, ...]]
"""For each dimension of an array the mesh axes that divide it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandLayout:
    """A layout by hand.

    Attributes:
      name: as tables print it.
      axes: names and sizes of the mesh axes, major to minor.
      activations: of activations and of the batch.
      params: of parameters and of the optimizer's moments, at rest.
      gathered: of parameters during a step, if each is gathered once before the first layer; None
        if the partitioner gathers each layer's parameters when the layer runs.
      whole: parameters of these names stay whole.
      spread: mesh axes of FSDP. A parameter to which the table gives none of them is divided along
        its largest dimension that is whole and that they divide (big_vision's rule). The dimension
        of stacked layers stays whole.
      spread_moments: as `spread`, for the optimizer's moments alone (ZeRO-1).
      vectors_whole: the axes of `spread` divide no parameter of one dimension.
      gradients_apart: mesh axes whose devices compute the gradients of their part of the batch
        alone, inside `jax.shard_map`; nothing else is divided then (see `apart`).
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    activations: Table = dataclasses.field(default_factory=dict)
    params: Table = dataclasses.field(default_factory=dict)
    gathered: Table | None = None
    whole: tuple[Names, ...] = ()
    spread: tuple[str, ...] = ()
    spread_moments: tuple[str, ...] = ()
    vectors_whole: bool = False
    gradients_apart: tuple[str, ...] = ()

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh on devices, live or of a topology, ordered as `jax.make_mesh` does."""
        names, sizes = zip(*self.axes, strict=True)
        types = (AxisType.Auto,) * len(names)
        return jax.make_mesh(sizes, names, axis_types=types, devices=tuple(devices))

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        names, sizes = zip(*self.axes, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """A layout on its mesh: turns axis names into shardings."""

    layout: HandLayout
    mesh: AnyMesh

    def param(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How a parameter lies in memory between steps.

        Args:
          names: of its last dimensions; dimensions of stacked layers come first and have none.
        """
        return self._param(self.layout.params, self.layout.spread, names, shape)

    def moment(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How the optimizer's moment of a parameter lies in memory between steps."""
        spread = self.layout.spread + self.layout.spread_moments
        return self._param(self.layout.params, spread, names, shape)

    def used(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How a parameter lies during a step, under a layout that gathers once."""
        return self._param(self.layout.gathered or {}, (), names, shape)

    def activation(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How an activation of this shape is sharded."""
        return self._sharding(self._divided(self.layout.activations, names, shape))

    def batch(self, shape: tuple[int, ...], accumulate: int = 1) -> NamedSharding:
        """How a leaf of the batch is sharded.

        Raises:
          ValueError: a part of the batch does not divide over the devices that share it.
        """
        axes = [a for a in self.layout.activations.get("batch", ()) if a in self.mesh.shape]
        parts = self._count(axes) * accumulate
        if shape[0] % parts:
            raise ValueError(
                f"{self.layout.name}: a batch of {shape[0]} in {accumulate} parts must divide over "
                f"the {self._count(axes)} devices of the mesh axes {axes}: choose a batch that is "
                f"a multiple of {parts}"
            )
        return self.activation(("batch",) + (None,) * (len(shape) - 1), shape)

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """The `Constrain` hook of the models."""
        return jax.lax.with_sharding_constraint(x, self.activation(names, x.shape))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _param(
        self, table: Table, spread: tuple[str, ...], names: Names, shape: tuple[int, ...]
    ) -> NamedSharding:
        stacked = len(shape) - len(names)
        if names in self.layout.whole:
            return self._sharding([()] * len(shape))
        if self.layout.vectors_whole and len(names) == 1:
            table = {k: tuple(a for a in v if a not in spread) for k, v in table.items()}
            spread = ()
        spec = self._divided(table, (None,) * stacked + names, shape)
        if spread and not {*spread} & {axis for axes in spec for axis in axes}:
            count = self._count(spread)
            free = [i for i in range(stacked, len(shape)) if not spec[i] and shape[i] % count == 0]
            if free:
                spec[max(free, key=lambda i: shape[i])] = spread
        return self._sharding(spec)

    def _divided(self, table: Table, names: Names, shape: tuple[int, ...]) -> Spec:
        spec: Spec = []
        used: set[str] = set()
        for name, size in zip(names, shape, strict=True):
            taken: tuple[str, ...] = ()
            for axis in table.get(name, ()) if name else ():
                if axis in used or axis not in self.mesh.shape:
                    continue  # a mesh axis divides one dimension, the first that asks for it
                # Key-value heads fewer than the mesh axis stay whole, as in Megatron.
                if size % self._count((*taken, axis)) == 0:
                    taken = (*taken, axis)
            used.update(taken)
            spec.append(taken)
        return spec

    def _count(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis in self.mesh.shape)

    def _sharding(self, spec: Spec) -> NamedSharding:
        short = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
        return NamedSharding(self.mesh, PartitionSpec(*short))
