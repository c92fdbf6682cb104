"""A layout by hand: a mesh, and tables from axis names to mesh axes, as in MaxText."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

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
      params: of parameters, and of what the optimizer keeps in their shapes, at rest.
      whole_up_to: axis name -> size up to which a parameter's dimension of this name stays whole.
      spread: mesh axes of FSDP. Where the table gives a parameter none of them, they divide its
        largest dimension that is whole and that they divide (big_vision's rule). Layers that are
        stacked stay whole.
      spread_moments: as `spread`, of what the optimizer keeps alone (ZeRO-1).
      vectors_whole: parameters of one dimension keep off the axes of `spread`.
      renamed: names of an activation, all of them -> other names; for dimensions that the model
        leaves without a name, or names as it does others.
      renamed_params: the same of a parameter.
      first: names of an activation -> names as which it is laid out first, before its own.
      gradients_apart: mesh axes whose devices compute the gradients of their part of the batch each
        by itself, inside `jax.shard_map`, where nothing else is divided (see `apart`).
      batch: key of a batch leaf -> names; any other leaf is ("batch", None, ...).
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    activations: Table = dataclasses.field(default_factory=dict)
    params: Table = dataclasses.field(default_factory=dict)
    whole_up_to: Mapping[str, int] = dataclasses.field(default_factory=dict)
    spread: tuple[str, ...] = ()
    spread_moments: tuple[str, ...] = ()
    vectors_whole: bool = False
    renamed: Mapping[Names, Names] = dataclasses.field(default_factory=dict)
    renamed_params: Mapping[Names, Names] = dataclasses.field(default_factory=dict)
    first: Mapping[Names, Names] = dataclasses.field(default_factory=dict)
    gradients_apart: tuple[str, ...] = ()
    batch: Mapping[str, Names] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """A layout on its mesh: turns axis names into shardings."""

    layout: HandLayout
    mesh: Mesh

    @staticmethod
    def on(layout: HandLayout, devices: list[jax.Device]) -> "Rules":
        names, sizes = zip(*layout.axes, strict=True)
        types = (AxisType.Auto,) * len(names)
        return Rules(layout, jax.make_mesh(sizes, names, axis_types=types, devices=devices))

    def param(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How a parameter lies in memory between steps.

        Args:
          names: of its last dimensions; those before them are of stacked layers.
        """
        layout, stacked = self.layout, len(shape) - len(names)
        names = layout.renamed_params.get(names, names)
        names = tuple(
            None if name and size <= layout.whole_up_to.get(name, 0) else name
            for name, size in zip(names, shape[stacked:], strict=True)
        )
        spread = set(layout.spread)
        if layout.vectors_whole and len(names) == 1:
            table = {k: tuple(a for a in v if a not in spread) for k, v in layout.params.items()}
            return self._sharding(self._divided(table, (None,) * stacked + names, shape))
        spec = self._divided(layout.params, (None,) * stacked + names, shape)
        if spread and not spread & {axis for axes in spec for axis in axes}:
            count = self._count(layout.spread)
            free = [i for i in range(stacked, len(shape)) if not spec[i] and shape[i] % count == 0]
            if free:
                spec[max(free, key=lambda i: shape[i])] = layout.spread
        return self._sharding(spec)

    def moment(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How what the optimizer keeps in a parameter's shape lies in memory between steps."""
        spread = self.layout.spread + self.layout.spread_moments
        return Rules(dataclasses.replace(self.layout, spread=spread), self.mesh).param(names, shape)

    def activation(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How an activation of this shape is sharded."""
        names = self.layout.renamed.get(names, names)
        return self._sharding(self._divided(self.layout.activations, names, shape))

    def batch(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """How the batch leaf of this key is sharded.

        Raises:
          ValueError: the devices that share the batch do not divide it.
        """
        names = self.layout.batch.get(key, ("batch",) + (None,) * (len(shape) - 1))
        spec = self._divided(self.layout.activations, names, shape)
        for name, axes, size in zip(names, spec, shape, strict=True):
            wanted = self._count(self.layout.activations.get(name, ()) if name else ())
            if self._count(axes) != wanted:
                raise ValueError(
                    f"{self.layout.name}: dimension {name!r} of batch leaf {key!r}, {shape}, is "
                    f"divided by {wanted}: expected a multiple of it, got {size}"
                )
        return self._sharding(spec)

    def batch_of(self, batch: Any) -> Any:
        """A sharding for each leaf of a batch, or of its shapes."""

        def key_of(path: tuple[Any, ...]) -> str:
            return str(path[-1].key) if path else ""  # a batch may be one array

        return jax.tree_util.tree_map_with_path(
            lambda path, x: self.batch(key_of(path), x.shape), batch
        )

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """The `Constrain` hook of the models."""
        if names in self.layout.first:
            first = self.activation(self.layout.first[names], x.shape)
            x = jax.lax.with_sharding_constraint(x, first)
        return jax.lax.with_sharding_constraint(x, self.activation(names, x.shape))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _divided(self, table: Table, names: Names, shape: tuple[int, ...]) -> Spec:
        spec: Spec = []
        used: set[str] = set()
        for name, size in zip(names, shape, strict=True):
            taken: tuple[str, ...] = ()
            for axis in table.get(name, ()) if name else ():
                if axis in used or axis not in self.mesh.shape:
                    continue  # a mesh axis divides one dimension, the first that asks for it
                # What does not divide stays whole, as key-value heads fewer than the mesh axis.
                if size % self._count((*taken, axis)) == 0:
                    taken = (*taken, axis)
            used.update(taken)
            spec.append(taken)
        return spec

    def _count(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis in self.mesh.shape)

    def _sharding(self, spec: Spec) -> NamedSharding:
        short = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
        return NamedSharding(self.mesh, PartitionSpec(*short))
