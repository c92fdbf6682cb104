"""What each model's authors published: its configuration, the batch it is trained with, its sizes.

Sizes are what `experiments.zoo.shrink` makes smaller. What a configuration counts besides them is
its structure, and stays: heads, experts, stages, groups, tables, classes, kernels and patches,
steps of a loop of our choosing.

Papers are named by authors, year and section where the configuration's own comment in `models/`
does not name them.
"""

import dataclasses
from typing import Any, Literal

from models.clip import CLIP_VIT_B32
from models.decoder import LLAMA3_8B
from models.encoder_decoder import T5_BASE
from models.graph_network import GIN_CODE2
from models.mlp import MLPConfig
from models.moe import MIXTRAL_8X7B
from models.plain_gpt import GPT3_6_7B
from models.recommender import CRITEO_KAGGLE
from models.recurrent import ZAREMBA_LARGE
from models.resnet import RESNET_50, RESNET_152
from models.state_space import MAMBA_130M
from models.unet import DDPM_CIFAR10
from models.vit import VIT_B16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A field of a configuration, or each number of a field that is a tuple.

    Attributes:
      kind: width of a vector; depth, layers one after the other; extent of one example, such as
        its positions, pixels or nodes; rows of a table.
      multiple: what the model asks the size to be a multiple of.
      least: the smallest that the model or its data allow.
      share_of: another field, of which it remains the same share.
    """

    kind: Literal["width", "depth", "extent", "rows"]
    multiple: int = 1
    least: int = 1
    share_of: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A configuration as published.

    Attributes:
      batch_size: examples of the global batch.
      source: where the batch size is from.
      sizes: field -> what kind of size it is; `text.layers` is the field of a field.
    """

    config: Any
    batch_size: int
    source: str
    sizes: dict[str, Size]


DEPTH, WIDTH, EXTENT = Size(kind="depth"), Size(kind="width"), Size(kind="extent")
HEAD = Size(kind="width", share_of="d_model")  # all heads together remain as wide as the stream
BYTES = Size(kind="rows", least=256)  # a vocabulary that text is read with
STAGES = 2 * 2**4  # a residual network's stem and four stages make an image so many times smaller
CAPTION = 20  # tokens of the longest caption, its end included

_TRANSFORMER = {"d_model": WIDTH, "mlp_dim": WIDTH, "layers": DEPTH}
_DECODER = {
    **_TRANSFORMER,
    "vocab_size": BYTES,
    "head_dim": HEAD,
    "sequence": EXTENT,
    "query_block": Size(kind="extent", share_of="sequence"),
}
_RESNET = {
    "image": Size(kind="extent", multiple=STAGES),
    "width": WIDTH,
    "blocks": DEPTH,
}
_RECURRENT = {"vocab_size": BYTES, "width": WIDTH, "layers": DEPTH, "sequence": EXTENT}

_VIT = Published(
    config=VIT_B16,
    batch_size=4096,
    source="Dosovitskiy et al. 2021, section 4.1",
    sizes={
        **_TRANSFORMER,
        "d_model": Size(kind="width", multiple=VIT_B16.heads),
        "image": Size(kind="extent", multiple=VIT_B16.patch),
    },
)
_RESNET_50 = Published(
    config=RESNET_50, batch_size=256, source="He et al. 2016, section 3.4", sizes=_RESNET
)
_ZAREMBA = Published(
    config=ZAREMBA_LARGE,
    batch_size=20,
    source="Zaremba et al. 2014, section 4.1",
    sizes=_RECURRENT,
)

PUBLISHED: dict[str, Published] = {
    "mlp": Published(
        # The MLP benchmark of PARAM, "compute benchmarks for DLRM and other important AI
        # workloads": facebookresearch/param, train/compute/pt/README.md, data set A.
        config=MLPConfig(width=1024, layers=18),
        batch_size=512,
        source="PARAM, ibid., the largest of its three",
        sizes={"width": WIDTH, "layers": DEPTH},
    ),
    "decoder": Published(
        config=LLAMA3_8B,
        batch_size=1024,
        source="Grattafiori et al. 2024, section 3.4.1: 8M tokens (there of the 405B model)",
        sizes=_DECODER,
    ),
    "encoder_decoder": Published(
        config=T5_BASE,
        batch_size=2048,
        source="Raffel et al. 2020, section 3.7: 2^20 tokens of 512 to a sequence",
        sizes={
            **_TRANSFORMER,
            "vocab_size": Size(kind="rows", least=288),  # bytes and sentinels
            "head_dim": HEAD,
            "window": EXTENT,
            "spans": EXTENT,
        },
    ),
    "vit": _VIT,
    "resnet50": _RESNET_50,
    "resnet152": dataclasses.replace(_RESNET_50, config=RESNET_152),
    "moe": Published(
        config=MIXTRAL_8X7B,
        batch_size=1024,
        source="not published for Mixtral; Lepikhin et al. 2020 (GShard): 4M tokens",
        sizes={**_DECODER, "group": Size(kind="extent", share_of="sequence")},
    ),
    "unet": Published(
        config=DDPM_CIFAR10,
        batch_size=128,
        source="Ho et al. 2020, appendix B",
        sizes={
            "image": Size(kind="extent", multiple=8),  # three halvings; and the digits' own pixels
            "width": Size(kind="width", multiple=DDPM_CIFAR10.groups),
            "blocks": DEPTH,
            "attention": Size(kind="extent", share_of="image"),
        },
    ),
    "state_space": Published(
        config=MAMBA_130M,
        batch_size=256,
        source="Gu & Dao 2023, appendix E.2, its smallest model: 0.5M tokens",
        sizes={
            "vocab_size": BYTES,
            "d_model": WIDTH,
            "state": WIDTH,
            "step_rank": WIDTH,
            "layers": DEPTH,
            "sequence": Size(kind="extent", least=MAMBA_130M.convolution),
        },
    ),
    "recurrent": _ZAREMBA,
    "recommender": Published(
        config=CRITEO_KAGGLE,
        batch_size=128,
        source="the authors' bench/dlrm_s_criteo_kaggle.sh",
        sizes={
            "table_rows": Size(kind="rows"),
            "dim": WIDTH,
            "bottom": WIDTH,
            "top": WIDTH,
        },
    ),
    "graph_network": Published(
        # An example is a graph. All graphs of a batch are one array of nodes, a quarter of
        # `largest` for each: 128, where those of ogbg-code2 have 125 on average (ibid., table 1).
        config=GIN_CODE2,
        batch_size=128,
        source="Open Graph Benchmark, examples/graphproppred/code2/main_pyg.py",
        sizes={"width": WIDTH, "layers": DEPTH, "largest": Size(kind="extent", multiple=4)},
    ),
    "clip": Published(
        config=CLIP_VIT_B32,
        batch_size=32_768,
        source="Radford et al. 2021, section 2.5",
        sizes={
            **{f"image.{field}": size for field, size in _VIT.sizes.items()},
            "image.image": Size(kind="extent", multiple=CLIP_VIT_B32.image.patch),
            **{f"text.{field}": size for field, size in _TRANSFORMER.items()},
            "text.d_model": Size(kind="width", multiple=CLIP_VIT_B32.text.heads),
            "text.vocab_size": BYTES,
            "text.context": Size(kind="extent", least=CAPTION),
            "shared": WIDTH,
        },
    ),
    "linen_vit": _VIT,
    "linen_resnet": _RESNET_50,
    "linen_recurrent": _ZAREMBA,
    "plain_gpt": Published(
        config=GPT3_6_7B,
        batch_size=1024,
        source="Brown et al. 2020, table 2.1: 2M tokens",
        sizes={
            "vocab_size": BYTES,
            "d_model": Size(kind="width", multiple=GPT3_6_7B.heads),
            "layers": DEPTH,
            "sequence": EXTENT,
        },
    ),
}
