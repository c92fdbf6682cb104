"""The rule tables: how each project lays out models of its kind, with its source.

`HAND_LAYOUTS` says which of them people write for which model. Left out:

- tables of a recommender that lie whole on one device each (Naumov et al. 2019): in `jax.jit` every
  array lies on every device of its mesh; cutting each table by columns (TorchRec) exchanges the
  same;
- graphs packed for each device apart, so that only gradients are exchanged (jraph,
  ogb_examples/train_pmap.py): another batch than the model's own, with more padding;
- what Megatron-LM came to later: moments divided over the batch's devices beside tensor parallelism
  (`--use-distributed-optimizer`), and activations divided along the sequence between its matmuls
  (Korthikanti et al. 2022).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any  # the configs of the models have no narrower type

from experiments.handwritten.layouts import HandLayout, Names, Table
from experiments.handwritten_pod import maxtext

Maker = Callable[[int, Any], Iterator[HandLayout]]
"""(number of devices, the model's config) -> layouts."""

# One example, or one node or edge of a batch of graphs, is on one device.
BY_BATCH: Table = {
    "batch": ("data",),
    "expert_batch": ("data",),
    "nodes": ("data",),
    "edges": ("data",),
}

# ZeRO-3 (Rajbhandari et al. 2020), in MaxText's way: all matrices are divided along the width of
# the residual stream (base.yml, `logical_axis_rules`: embed to fsdp). Where there is no such width,
# as in convolutions, in big_vision's way: the largest dimension that the devices divide
# (google-research/big_vision, big_vision/sharding.py, `fsdp`). The latter keeps arrays of up to
# 4 MiB whole and MaxText its norms: "vectors whole" is either's at any size.
FULLY_SHARDED: Table = dict.fromkeys(("embed", "embed_vocab", "embed_moe", "norm"), ("data",))

# Megatron-LM (Shoeybi et al. 2019, section 3): column-parallel into heads, mlp and vocabulary,
# row-parallel out of them. Each is one matmul's output and the next one's contraction, so that no
# parameter is ever gathered. For Mamba its channels (Dao & Gu 2024, section 8.1), for T5 the same
# names in T5X (`standard_logical_axis_rules`), for a GRU the units of all gates.
TENSOR_PARALLEL: Table = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "mlp_moe", "hidden", "vocab"), ("model",)
)

# JAX's documentation, The Training Cookbook (jax-ml/jax, docs/the-training-cookbook.py, commit
# 2e5a3b4d10fcf92c5a534f0d43288e5c5c758bf8, `Config`): maps into heads, mlp and vocabulary are
# divided along the stream (att_qkv, mlp_in, out_kernel), the one out of the heads along these
# (att_out), the one out of mlp along the stream again (mlp_out). Embedding and positions are whole
# (embed, pos_embed). It has neither biases nor scales: these are whole too.
COOKBOOK: Table = dict.fromkeys(("embed", "heads", "embed_vocab"), ("fsdp",))
COOKBOOK_WHOLE: dict[Names, Names] = {
    ("vocab", "embed_vocab"): (None, None),
    (None, "embed"): (None, None),
    ("embed",): (None,),
    (None, "heads", None): (None, None, None),
}

# GShard (Lepikhin et al. 2020, section 3.2): the devices that share the batch share the experts;
# tokens travel, and everything else is on every device.
EXPERT_PARAMS: Table = {"exp": ("expert",)}
EXPERT_ACTIVATIONS: Table = {
    "batch": ("data", "expert"),
    "expert": ("expert",),
    "expert_batch": ("data",),
}

# A table of up to so many rows is better whole. By the costs of TorchRec's planner
# (pytorch/torchrec, torchrec/distributed/planner/shard_estimators.py, commit
# 06884eebf191a50d62e1b2f205e8f35fe852e36f) a whole table sends its gradient, rows x width, and one
# that is cut by rows sends what is looked up, examples x width: as much where there are as many
# rows as examples, which are 128 in the published batch and in the shrunk one.
SMALL_TABLE = 128


def replicated(devices: int, config: Any = None) -> HandLayout:
    """Every device does everything; what the others are compared with."""
    del config
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
    del config
    yield HandLayout(
        name="data parallel, optimizer divided",
        axes=(("data", devices),),
        activations=BY_BATCH,
        spread_moments=("data",),
    )


def gradients_apart(devices: int, config: Any) -> Iterator[HandLayout]:
    """Data parallelism with one mean of gradients behind the backward pass, by `jax.shard_map`.

    For models of which `jax.jit` sums a gradient over the devices at each turn of a loop; see
    `apart`, which has the source.
    """
    del config
    yield HandLayout(
        name="data parallel, gradients apart",
        axes=(("data", devices),),
        activations=BY_BATCH,
        gradients_apart=("data",),
    )


def gradients_apart_optimizer_divided(devices: int, config: Any) -> Iterator[HandLayout]:
    """The same with ZeRO-1."""
    for layout in gradients_apart(devices, config):
        yield dataclasses.replace(
            layout, name=f"{layout.name}, optimizer divided", spread_moments=("data",)
        )


def fsdp(devices: int, config: Any) -> Iterator[HandLayout]:
    """As data parallel, and every parameter and moment is divided; or all but the vectors."""
    del config
    for name, vectors_whole in (("fsdp", False), ("fsdp, vectors whole", True)):
        yield HandLayout(
            name=name,
            axes=(("data", devices),),
            activations=BY_BATCH,
            params=FULLY_SHARDED,
            spread=("data",),
            vectors_whole=vectors_whole,
        )


def jax_fsdp(devices: int, config: Any) -> Iterator[HandLayout]:
    """FSDP of a decoder as JAX's documentation writes it (source at `COOKBOOK`)."""
    del config
    yield HandLayout(
        name="jax cookbook fsdp",
        axes=(("fsdp", devices),),
        activations={"batch": ("fsdp",)},
        params=COOKBOOK,
        renamed_params=COOKBOOK_WHOLE,
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
    """Megatron-LM's own (Shoeybi et al. 2019, section 5.1), for every factorization of the devices.

    The batch is divided over `data`, and every part of it is at a whole model divided over `model`.
    JAX's documentation (see `data_parallel`) has it as 4-way batch data parallelism and 2-way model
    tensor parallelism.
    """
    for model in _model_axes(devices, config):
        yield HandLayout(
            name=f"data x tensor parallel {devices // model}x{model}",
            axes=(("data", devices // model), ("model", model)),
            activations={**BY_BATCH, **TENSOR_PARALLEL},
            params=TENSOR_PARALLEL,
        )


def fsdp_x_tensor_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """FSDP over `data`, Megatron over `model`, for every factorization of the devices."""
    for model in _model_axes(devices, config):
        yield HandLayout(
            name=f"fsdp x tensor parallel {devices // model}x{model}",
            axes=(("data", devices // model), ("model", model)),
            activations={**BY_BATCH, **TENSOR_PARALLEL},
            params={**FULLY_SHARDED, **TENSOR_PARALLEL},
            spread=("data",),
        )


def maxtext_fsdp_x_tensor(devices: int, config: Any) -> Iterator[HandLayout]:
    """MaxText's rules (source and version in `maxtext`) on its mesh axes fsdp and tensor."""
    meshes = {"maxtext fsdp": (("fsdp", devices),)} | {
        f"maxtext fsdp x tensor {devices // m}x{m}": (("fsdp", devices // m), ("tensor", m))
        for m in _model_axes(devices, config)
    }
    for name, axes in meshes.items():
        yield HandLayout(
            name=name, axes=axes, activations=maxtext.ACTIVATIONS, params=maxtext.PARAMS
        )


def expert_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """GShard, with as many parts of the experts as there can be."""
    expert = max(_expert_axes(devices, config.experts), default=1)
    if expert > 1:
        yield HandLayout(
            name="expert parallel",
            axes=(("data", devices // expert), ("expert", expert)),
            activations=EXPERT_ACTIVATIONS,
            params=EXPERT_PARAMS,
        )


def maxtext_fsdp_x_expert(devices: int, config: Any) -> Iterator[HandLayout]:
    """MaxText's rules (source and version in `maxtext`) on its mesh axes fsdp and expert."""
    for expert in _expert_axes(devices, config.experts):
        name = f"maxtext fsdp x expert {devices // expert}x{expert}"
        axes = (("fsdp", devices // expert), ("expert", expert))
        for end, activations in (
            ("", maxtext.ACTIVATIONS),
            (" by batch", maxtext.ACTIVATIONS_BY_BATCH),
        ):
            yield HandLayout(
                name=name + end, axes=axes, activations=activations, params=maxtext.PARAMS
            )


def table_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """DLRM (Naumov et al. 2019): tables are divided, the MLPs are data parallel.

    By rows, what the devices found is summed into each one's examples; by columns, each is told the
    values of the whole batch, and what it found goes to its examples all to all (TorchRec's
    row-wise and column-wise sharding), that of all tables at once. A table that does not divide is
    on every device. The second keeps tables of up to `SMALL_TABLE` rows on every device, as
    TorchRec's planner does.
    """
    del config
    axes = (("data", devices),)
    yield HandLayout(
        name="tables by rows",
        axes=axes,
        activations=BY_BATCH,
        params={"rows": ("data",)},
    )
    yield HandLayout(
        name="large tables by rows, small ones whole",
        axes=axes,
        activations=BY_BATCH,
        params={"rows": ("data",)},
        whole_up_to={"rows": SMALL_TABLE},
    )
    yield HandLayout(
        name="tables by columns, exchanged at once",
        axes=axes,
        activations={**BY_BATCH, "columns": ("data",)},
        params={"columns": ("data",)},
        renamed={("batch", "embed"): (None, "columns")},
        # All vectors of an example in one array, which then goes to the examples.
        first={("batch", None, "embed"): (None, None, "columns")},
        batch={"value_BF": (None, None)},
    )


def edge_parallel(devices: int, config: Any) -> Iterator[HandLayout]:
    """Edges are divided, nodes are on every device (jraph/experimental/sharded_graphnet.py)."""
    del config
    yield HandLayout(
        name="edge parallel",
        axes=(("data", devices),),
        activations={"edges": ("data",)},
        batch={
            "source_E": ("edges",),
            "destination_E": ("edges",),
            "feature_EF": ("edges", None),
        },
    )


def spatial(devices: int, config: Any) -> Iterator[HandLayout]:
    """Data parallel, and each image's rows over two devices (GSPMD, Xu et al. 2021).

    A convolution exchanges the rows at the border. A height that is odd stays whole.
    """
    del config
    if devices % 2 == 0:
        image = ("batch", "height", None, None)
        yield HandLayout(
            name=f"data x spatial {devices // 2}x2",
            axes=(("data", devices // 2), ("space", 2)),
            # Of the pixels that look at others each device has its rows', of the others all.
            activations={**BY_BATCH, "height": ("space",), "queries": ("space",)},
            renamed=dict.fromkeys(
                (("batch", None, None, "channels"), ("batch", None, None, "hidden")), image
            ),
            batch={"image_BHWC": image},
        )


def _model_axes(devices: int, config: Any) -> list[int]:
    """Sizes of a second mesh axis, none of them 1 or all devices."""
    return [m for m in range(2, devices) if devices % m == 0 and _takes(config, m)]


def _takes(config: Any, model: int) -> bool:
    """Whether so many devices divide the query heads, of all towers; Megatron-LM refuses others."""
    towers = [config, *(getattr(config, name, None) for name in ("image", "text"))]
    return all(getattr(tower, "heads", 0) % model == 0 for tower in towers)


def _expert_axes(devices: int, experts: int) -> list[int]:
    return [e for e in range(2, devices + 1) if devices % e == 0 and experts % e == 0]


_EVERYWHERE: tuple[Maker, ...] = (data_parallel, optimizer_divided, fsdp)
_TENSOR: tuple[Maker, ...] = (tensor_parallel, data_x_tensor_parallel, fsdp_x_tensor_parallel)
_MEGATRON: tuple[Maker, ...] = (*_EVERYWHERE, *_TENSOR)
# Optimizers that keep nothing, or little, in a parameter's shape: SGD, and Adafactor.
_MEGATRON_NO_MOMENTS: tuple[Maker, ...] = (data_parallel, fsdp, *_TENSOR)
# Of parameters that a loop uses anew at each turn: weights of time steps, the head of a loss in
# parts, biases that all layers share.
_APART: tuple[Maker, ...] = (gradients_apart, gradients_apart_optimizer_divided)

HAND_LAYOUTS: dict[str, tuple[Maker, ...]] = {
    "mlp": _MEGATRON,
    "decoder": (*_MEGATRON, *_APART, jax_fsdp, maxtext_fsdp_x_tensor),
    "encoder_decoder": (*_MEGATRON_NO_MOMENTS, gradients_apart),
    "vit": _MEGATRON,
    "clip": _MEGATRON,
    "state_space": _MEGATRON,
    "recurrent": (*_MEGATRON, *_APART),
    "moe": (*_MEGATRON, *_APART, maxtext_fsdp_x_tensor, expert_parallel, maxtext_fsdp_x_expert),
    "resnet50": (*_EVERYWHERE, spatial),
    "resnet152": (*_EVERYWHERE, spatial),
    "unet": (*_EVERYWHERE, spatial),
    "recommender": (*_EVERYWHERE, table_parallel),
    "graph_network": (*_EVERYWHERE, edge_parallel),
    "linen_vit": _MEGATRON,
    "linen_resnet": (*_EVERYWHERE, spatial),
    "linen_recurrent": (*_MEGATRON, *_APART),
    "plain_gpt": (*_MEGATRON_NO_MOMENTS, jax_fsdp),
}
