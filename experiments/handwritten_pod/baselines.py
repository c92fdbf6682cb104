"""The baselines: (mesh, size) -> `HandStep`, and the meshes that people give them.

Replicated is left out: at these sizes it never fits.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from experiments.handwritten_pod import maxtext as maxtext_rules
from experiments.handwritten_pod.rules import AnyMesh, Rules, Table
from experiments.handwritten_pod.step import HandStep, hand_step
from experiments.pod_sizes import PodSize
from models.moe import MixtureConfig

# Everything at rest is divided along the width of the residual stream, which all matrices have.
FULLY_SHARDED: Table = dict.fromkeys(("embed", "embed_vocab", "embed_moe", "norm"), ("data",))
# The dimensions that Megatron splits: each is one matmul's output and the next one's contraction.
TENSOR_PARALLEL: Table = dict.fromkeys(
    ("heads", "q_heads", "kv_heads", "mlp", "mlp_moe", "vocab"), ("model",)
)
BY_BATCH: Table = {"batch": ("data",), "expert_batch": ("data",)}


def data_parallel(mesh: AnyMesh, size: PodSize) -> HandStep:
    """The batch over mesh axis `data`; every device holds the whole state."""
    return hand_step(Rules(mesh, {}, BY_BATCH), size)


def fsdp(mesh: AnyMesh, size: PodSize) -> HandStep:
    """ZeRO-3 (Rajbhandari et al. 2020) over mesh axis `data`.

    A layer's parameters are gathered when its turn comes.
    """
    return hand_step(Rules(mesh, FULLY_SHARDED, BY_BATCH), size)


def fsdp_x_tensor_parallel(mesh: AnyMesh, size: PodSize) -> HandStep:
    """FSDP over mesh axis `data`, Megatron (Shoeybi et al. 2019) over `model`."""
    return hand_step(
        Rules(mesh, {**FULLY_SHARDED, **TENSOR_PARALLEL}, {**BY_BATCH, **TENSOR_PARALLEL}), size
    )


def distributed_optimizer(mesh: AnyMesh, size: PodSize) -> HandStep:
    """Megatron-LM's `--use-distributed-optimizer`, tensor parallel over mesh axis `model`.

    Master weights and moments are divided over `data` too, gradients reduce-scattered; parameters
    are gathered once a step, in the dtype of the matmuls. Source: Megatron Core's user guide,
    "Distributed Optimizer" (looked up in November 2026), after Rajbhandari et al. 2020. Megatron
    keeps all gradients whole until the backward pass has ended; here XLA may scatter a layer's
    sooner.
    """
    rules = Rules(
        mesh,
        {**FULLY_SHARDED, **TENSOR_PARALLEL},
        {**BY_BATCH, **TENSOR_PARALLEL},
        gathered=TENSOR_PARALLEL,
    )
    return hand_step(rules, size)


def maxtext(mesh: AnyMesh, size: PodSize) -> HandStep:
    """MaxText's rules on any of the mesh axes `data`, `fsdp`, `tensor`, `expert`."""
    return hand_step(Rules(mesh, maxtext_rules.PARAMS, maxtext_rules.ACTIVATIONS), size)


def maxtext_by_batch(mesh: AnyMesh, size: PodSize) -> HandStep:
    """As `maxtext`, with the expert axis on the batch also inside the experts."""
    rules = Rules(mesh, maxtext_rules.PARAMS, maxtext_rules.ACTIVATIONS_BY_BATCH)
    return hand_step(rules, size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A hand layout on a mesh shape.

    Attributes:
      axes: names and sizes of the mesh axes, major to minor.
      build: (mesh of that shape, size) -> step.
    """

    axes: tuple[tuple[str, int], ...]
    build: Callable[[AnyMesh, PodSize], HandStep]

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        names, sizes = zip(*self.axes, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh on devices, live or of a topology, ordered as `jax.make_mesh` does."""
        names, sizes = zip(*self.axes, strict=True)
        types = (AxisType.Auto,) * len(names)
        return jax.make_mesh(sizes, names, axis_types=types, devices=tuple(devices))


def baselines(
    device_count: int, size: PodSize, model_axis: Sequence[int] = (2, 4, 8)
) -> dict[str, Baseline]:
    """Every baseline for this many devices, by name.

    Args:
      model_axis: sizes of the tensor-parallel mesh axis; those that divide the devices are used.
    """
    n = device_count
    split = [m for m in model_axis if m < n and n % m == 0]
    found = {
        "data parallel": Baseline(axes=(("data", n),), build=data_parallel),
        "fsdp": Baseline(axes=(("data", n),), build=fsdp),
    }
    for m in split:
        axes = (("data", n // m), ("model", m))
        name = f"fsdp x tensor parallel {n // m}x{m}"
        found[name] = Baseline(axes=axes, build=fsdp_x_tensor_parallel)
    found["distributed optimizer"] = Baseline(axes=(("data", n),), build=distributed_optimizer)
    for m in split:
        axes = (("data", n // m), ("model", m))
        name = f"distributed optimizer x tensor parallel {n // m}x{m}"
        found[name] = Baseline(axes=axes, build=distributed_optimizer)
    found["maxtext fsdp"] = Baseline(axes=(("fsdp", n),), build=maxtext)
    for m in split:
        axes = (("fsdp", n // m), ("tensor", m))
        found[f"maxtext fsdp x tensor {n // m}x{m}"] = Baseline(axes=axes, build=maxtext)
    if isinstance(size.model, MixtureConfig):
        experts = size.model.experts
        for e in (e for e in (2, 4, 8, 16) if e <= experts and n % e == 0 and experts % e == 0):
            axes = (("fsdp", n // e), ("expert", e))
            name = f"maxtext fsdp x expert {n // e}x{e}"
            found[name] = Baseline(axes=axes, build=maxtext)
            found[name + " by batch"] = Baseline(axes=axes, build=maxtext_by_batch)
    return found
