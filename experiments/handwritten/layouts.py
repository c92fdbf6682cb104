"""The hand-written layouts: a mesh and two tables from axis names to mesh axes, as in MaxText.

Replicated, data parallel, FSDP and tensor parallel are the corners; FSDP x tensor parallel runs
over every factorization of the devices into two axes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]
"""One axis name or None for each dimension of an array."""

# The dimensions that Megatron splits: each is one matmul's output and the next one's contraction.
TENSOR_PARALLEL = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "hidden": "model",
    "vocab": "model",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandLayout:
    """A layout by hand.

    Attributes:
      name: as tables print it.
      data, model: sizes of the two mesh axes.
      activations: axis name -> mesh axis, for activations and the batch.
      params: axis name -> mesh axis, for parameters and the optimizer's moments at rest.
    """

    name: str
    data: int
    model: int
    activations: Mapping[str, str]
    params: Mapping[str, str]


def hand_layouts(device_count: int) -> dict[str, HandLayout]:
    """Every baseline for this many devices, by name."""
    n = device_count
    batch = {"batch": "data"}
    found = [
        HandLayout(name="replicated", data=n, model=1, activations={}, params={}),
        HandLayout(name="data parallel", data=n, model=1, activations=batch, params={}),
        HandLayout(name="fsdp", data=n, model=1, activations=batch, params={"embed": "data"}),
        HandLayout(
            name="tensor parallel",
            data=1,
            model=n,
            activations=TENSOR_PARALLEL,
            params=TENSOR_PARALLEL,
        ),
    ]
    for model in range(2, n):
        if n % model == 0:
            layout = HandLayout(
                name=f"fsdp x tensor parallel {n // model}x{model}",
                data=n // model,
                model=model,
                activations=batch | TENSOR_PARALLEL,
                params={"embed": "data"} | TENSOR_PARALLEL,
            )
            found.append(layout)
    return {layout.name: layout for layout in found}


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """A layout on its mesh: turns axis names into shardings."""

    layout: HandLayout
    mesh: Mesh

    @staticmethod
    def on(layout: HandLayout, devices: list[jax.Device]) -> "Rules":
        mesh = jax.make_mesh(
            (layout.data, layout.model),
            ("data", "model"),
            axis_types=(AxisType.Auto, AxisType.Auto),
            devices=devices,
        )
        return Rules(layout, mesh)

    def param(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How a parameter of this shape lies in memory between steps."""
        return self._sharding(self.layout.params, names, shape)

    def activation(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """How an activation or a batch leaf of this shape is sharded."""
        return self._sharding(self.layout.activations, names, shape)

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """The `Constrain` hook of the models."""
        return jax.lax.with_sharding_constraint(x, self.activation(names, x.shape))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _sharding(
        self, table: Mapping[str, str], names: Names, shape: tuple[int, ...]
    ) -> NamedSharding:
        spec: list[Any] = []
        for name, size in zip(names, shape, strict=True):
            axis = table.get(name) if name else None
            # Key-value heads fewer than the mesh axis stay whole on each device, as in Megatron.
            divides = axis is not None and size % self.mesh.shape[axis] == 0
            spec.append(axis if divides else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))
