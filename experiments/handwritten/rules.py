"""The rule tables: how each project lays out models of its kind, with its source.

`hand_layouts` has what people write for a model on the devices of one host, `pod_layouts` what they
write for a pod. Left out are activations that are divided along the sequence between Megatron's
matmuls (Korthikanti et al. 2022), and on pods the replicated layout, which never fits there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any  # the configs of the models have no narrower type

from experiments.handwritten import maxtext
from experiments.handwritten.layouts import HandLayout, Names, Table

Maker = Callable[[int, Any], Iterator[HandLayout]]
"""(number of devices, the model's config) -> layouts."""

BY_BATCH: Table = {"batch": ("data",), "expert_batch": ("data",)}

# ZeRO-3 (Rajbhandari et al. 2020), in MaxText's way: all matrices are divided along the width of
# the residual stream (base.yml, `logical_axis_rules`: embed to fsdp). Other parameters are divided
# in big_vision's way: along the largest dimension that the devices divide
# (google-research/big_vision, big_vision/sharding.py, `fsdp`). big_vision keeps arrays of up to
# 4 MiB whole and MaxText its norms: "vectors whole" is either's at any size.
FULLY_SHARDED: Table = dict.fromkeys(("embed", "embed_vocab", "embed_moe", "norm"), ("data",))

# Megatron-LM (Shoeybi et al. 2019, section 3): column-parallel into heads, mlp and vocabulary,
# row-parallel out of them. Each is one matmul's output and the next one's contraction: no
# parameter is ever gathered.
TENSOR_PARALLEL: Table = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "mlp_moe", "hidden", "vocab"), ("model",)
)

# JAX's documentation, The Training Cookbook (jax-ml/jax, docs/the-training-cookbook.py, commit
# 2e5a3b4d10fcf92c5a534f0d43288e5c5c758bf8, `Config`): maps into heads, mlp and vocabulary are
# divided along the stream (att_qkv, mlp_in, out_kernel), the one out of the heads along these
# (att_out), the one out of mlp along the stream again (mlp_out). The embedding is whole (embed).
# The cookbook's model has no scales: they are whole too.
COOKBOOK: Table = dict.fromkeys(("embed", "heads", "embed_vocab"), ("fsdp",))
COOKBOOK_WHOLE: tuple[Names, ...] = (("vocab", "embed_vocab"),)


def replicated(devices: int) -> HandLayout:
    """Every device does everything."""
    return HandLayout(name="replicated", axes=(("data", devices),))


def data_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """The batch is divided, every device holds the whole state.

    As in JAX's documentation, "Distributed arrays and automatic parallelization", 8-way batch data
    parallelism: the batch is put on the devices in parts, and `jax.jit` does the rest.
    """
    del config
    yield HandLayout(name="data parallel", axes=(("data", devices),), activations=BY_BATCH)


def optimizer_divided(devices: int, config: Any) -> Iterator[HandLayout]:
    """ZeRO-1 (Rajbhandari et al. 2020, section 5.1): as data parallel, but moments are divided.

    Each device updates its part of the parameters, and all gather the whole (Xu et al. 2020).
    """
    for layout in data_parallel(devices, config):
        yield _optimizer_divided(layout)


def gradients_apart(devices: int, config: Any) -> Iterator[HandLayout]:
    """Data parallelism with one mean of gradients behind the backward pass, by `jax.shard_map`.

    For models of which `jax.jit` sums a gradient over the devices at each turn of a loop; see
    `apart`, which has the source. Also with ZeRO-1.
    """
    (layout,) = data_parallel(devices, config)
    found = dataclasses.replace(
        layout, name=f"{layout.name}, gradients apart", gradients_apart=("data",)
    )
    yield found
    yield _optimizer_divided(found)


def _optimizer_divided(layout: HandLayout) -> HandLayout:
    return dataclasses.replace(
        layout, name=f"{layout.name}, optimizer divided", spread_moments=("data",)
    )


def fsdp(devices: int, config: Any) -> Iterator[HandLayout]:
    """As data parallel, and every parameter and moment is divided.

    A layer's parameters are gathered when the layer runs.
    """
    del config
    yield HandLayout(
        name="fsdp",
        axes=(("data", devices),),
        activations=BY_BATCH,
        params=FULLY_SHARDED,
        spread=("data",),
    )


def fsdp_vectors_whole(devices: int, config: Any) -> Iterator[HandLayout]:
    """As `fsdp`, but for parameters of one dimension."""
    for layout in fsdp(devices, config):
        yield dataclasses.replace(layout, name="fsdp, vectors whole", vectors_whole=True)


def jax_fsdp(devices: int, config: Any) -> Iterator[HandLayout]:
    """FSDP of a decoder as JAX's documentation writes it (source at `COOKBOOK`)."""
    del config
    yield HandLayout(
        name="jax cookbook fsdp",
        axes=(("fsdp", devices),),
        activations={"batch": ("fsdp",)},
        params=COOKBOOK,
        whole=COOKBOOK_WHOLE,
    )


def tensor_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """Megatron alone, if it takes so many devices."""
    if _takes(config, devices):
        yield HandLayout(
            name="tensor parallel",
            axes=(("model", devices),),
            activations=TENSOR_PARALLEL,
            params=TENSOR_PARALLEL,
        )


def data_x_tensor_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """Megatron-LM's own (Shoeybi et al. 2019, section 5.1).

    The batch is divided over `data`, and a whole model that is divided over `model` computes each
    part. JAX's documentation (see `data_parallel`) has it as 4-way batch data parallelism and 2-way
    model tensor parallelism.
    """
    for model in _model_axes(devices, config):
        yield HandLayout(
            name=f"data x tensor parallel {devices // model}x{model}",
            axes=(("data", devices // model), ("model", model)),
            activations={**BY_BATCH, **TENSOR_PARALLEL},
            params=TENSOR_PARALLEL,
        )


def fsdp_x_tensor_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """FSDP over `data`, Megatron over `model`."""
    for model in _model_axes(devices, config):
        yield HandLayout(
            name=f"fsdp x tensor parallel {devices // model}x{model}",
            axes=(("data", devices // model), ("model", model)),
            activations={**BY_BATCH, **TENSOR_PARALLEL},
            params={**FULLY_SHARDED, **TENSOR_PARALLEL},
            spread=("data",),
        )


def distributed_optimizer(devices: int, config: Any) -> Iterator[HandLayout]:
    """Megatron-LM's `--use-distributed-optimizer`, alone and with tensor parallelism over `model`.

    Master weights and moments are divided over `data` too, gradients reduce-scattered; parameters
    are gathered once a step, in the dtype of the matmuls. Source: Megatron Core's user guide,
    "Distributed Optimizer" (looked up in November 2026), after Rajbhandari et al. 2020. Megatron
    keeps all gradients whole until the backward pass has ended; here XLA may scatter a layer's
    sooner.
    """
    name = "distributed optimizer"
    meshes: dict[str, tuple[tuple[str, int], ...]] = {name: (("data", devices),)} | {
        f"{name} x tensor parallel {devices // m}x{m}": (("data", devices // m), ("model", m))
        for m in _model_axes(devices, config)
    }
    for name, axes in meshes.items():
        yield HandLayout(
            name=name,
            axes=axes,
            activations={**BY_BATCH, **TENSOR_PARALLEL},
            params={**FULLY_SHARDED, **TENSOR_PARALLEL},
            gathered=TENSOR_PARALLEL,
        )


def maxtext_fsdp_x_tensor(devices: int, config: Any) -> Iterator[HandLayout]:
    """MaxText's rules (source and version in `maxtext`) on its mesh axes fsdp and tensor."""
    meshes: dict[str, tuple[tuple[str, int], ...]] = {"maxtext fsdp": (("fsdp", devices),)} | {
        f"maxtext fsdp x tensor {devices // m}x{m}": (("fsdp", devices // m), ("tensor", m))
        for m in _model_axes(devices, config)
    }
    for name, axes in meshes.items():
        yield HandLayout(
            name=name, axes=axes, activations=maxtext.ACTIVATIONS, params=maxtext.PARAMS
        )


def maxtext_fsdp_x_expert(devices: int, config: Any) -> Iterator[HandLayout]:
    """MaxText's rules on its mesh axes fsdp and expert, if the model has experts.

    "by batch" keeps the expert axis on the batch also inside the experts.
    """
    experts = getattr(config, "experts", 0)
    for expert in (2, 4, 8, 16):
        if not experts or experts % expert or devices % expert:
            continue
        name = f"maxtext fsdp x expert {devices // expert}x{expert}"
        axes = (("fsdp", devices // expert), ("expert", expert))
        for end, activations in (
            ("", maxtext.ACTIVATIONS),
            (" by batch", maxtext.ACTIVATIONS_BY_BATCH),
        ):
            yield HandLayout(
                name=name + end, axes=axes, activations=activations, params=maxtext.PARAMS
            )


def _model_axes(devices: int, config: Any) -> list[int]:
    """Sizes of a second mesh axis: at most the devices of a host, and less than all devices."""
    return [m for m in (2, 4, 8) if m < devices and devices % m == 0 and _takes(config, m)]


def _takes(config: Any, model: int) -> bool:
    """Whether so many devices divide the query heads; Megatron-LM refuses others."""
    return getattr(config, "heads", 0) % model == 0


_MEGATRON: tuple[Maker, ...] = (
    *(data_parallel, optimizer_divided, fsdp, fsdp_vectors_whole),
    *(tensor_parallel, data_x_tensor_parallel, fsdp_x_tensor_parallel),
)
_ONE_HOST: dict[str, tuple[Maker, ...]] = {
    "mlp": _MEGATRON,
    "decoder": (*_MEGATRON, gradients_apart, jax_fsdp, maxtext_fsdp_x_tensor),
}
_POD: tuple[Maker, ...] = (
    *(data_parallel, fsdp, fsdp_x_tensor_parallel, distributed_optimizer),
    *(maxtext_fsdp_x_tensor, maxtext_fsdp_x_expert),
)


def hand_layouts(family: str, config: Any, devices: int) -> dict[str, HandLayout]:
    """Every layout that people write for a model on the devices of one host, by name.

    Args:
      family: key of `parameters.PARAMETERS`.
    """
    return _named(_ONE_HOST[family], config, devices)


def pod_layouts(config: Any, devices: int) -> dict[str, HandLayout]:
    """Every layout that people write for a decoder on a pod, by name."""
    return _named(_POD, config, devices)


def _named(makers: Iterable[Maker], config: Any, devices: int) -> dict[str, HandLayout]:
    return {layout.name: layout for make in makers for layout in make(devices, config)}
