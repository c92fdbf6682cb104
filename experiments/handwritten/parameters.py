"""The axis names of every model's parameters, by the last words of their paths.

The names are MaxText's (see `experiments.handwritten_pod.maxtext`) where it has one: "embed" is the
width of the residual stream, "norm" is that width in a norm, "mlp", "heads" and "vocab" are what
Megatron splits. Stacked layers stand in front and have no name.
"""

import re
from collections.abc import Mapping

from experiments.handwritten.layouts import Names

_STREAM: dict[str, Names] = {
    "embedding": ("vocab", "embed_vocab"),
    "head": ("embed_vocab", "vocab"),
    "scale": ("norm",),
}
_ATTENTION: dict[str, Names] = {
    "query": ("embed", "heads", None),
    "key|value": ("embed", "kv_heads", None),
    "out": ("heads", None, "embed"),
}
_GATED: dict[str, Names] = {
    r"mlp\.(gate|up)": ("embed", "mlp"),
    r"mlp\.down": ("mlp", "embed"),
}
# Blocks of `models.transformer`, whose maps have biases.
_BLOCKS: dict[str, Names] = {
    r"(query|key|value)\.kernel": ("embed", "heads", None),
    r"(query|key|value)\.bias": ("heads", None),
    r"out\.kernel": ("heads", None, "embed"),
    r"up\.kernel": ("embed", "mlp"),
    r"up\.bias": ("mlp",),
    r"down\.kernel": ("mlp", "embed"),
    r"(out|down)\.bias": ("embed",),
    r"(\w+_)?norm\.(scale|bias)": ("norm",),
    r"patches\.kernel": (None, None, None, "embed"),
    r"patches\.bias|class_token": ("embed",),
    "positions": (None, "embed"),
}
_VIT = _BLOCKS | {r"head\.kernel": ("embed", None), r"head\.bias": (None,)}

PARAMETERS: dict[str, dict[str, Names]] = {
    "mlp": {
        # Every other map is one into the hidden dimension.
        r"\d*[02468]\.kernel": ("embed", "hidden"),
        r"\d*[02468]\.bias": ("hidden",),
        r"\d*[13579]\.kernel": ("hidden", "embed"),
        r"\d*[13579]\.bias": ("embed",),
    },
    "decoder": _STREAM | _ATTENTION | _GATED,
    "moe": _STREAM
    | _ATTENTION
    | {
        "router": ("embed", None),
        r"experts\.(gate|up)": ("exp", "embed_moe", "mlp_moe"),
        r"experts\.down": ("exp", "mlp_moe", "embed_moe"),
    },
    "encoder_decoder": _STREAM | _ATTENTION | _GATED | {r"bias\.table": (None, "heads")},
    "vit": _VIT,
    "linen_vit": _VIT,
    "clip": _BLOCKS
    | {
        "embedding": ("vocab", "embed_vocab"),
        r"(image|text)_out\.kernel": ("embed", None),
        "log_scale": (),
    },
    "state_space": _STREAM
    | {
        "signal|gate": ("embed", "mlp"),
        "convolution|step": (None, "mlp"),
        "convolution_bias|step_bias|skip": ("mlp",),
        "narrow|enter|leave|log_rate": ("mlp", None),
        "out": ("mlp", "embed"),
    },
    "recurrent": {
        "embedding": ("vocab", "embed_vocab"),
        # All three gates are split alike, so that a device has whole units.
        "input|recurrent": ("embed", None, "hidden"),
        "input_bias": (None, "hidden"),
        "candidate_bias": ("hidden",),
        r"head\.kernel": ("embed_vocab", "vocab"),
        r"head\.bias": ("vocab",),
    },
    "linen_recurrent": {
        r"embedding\.embedding": ("vocab", "embed_vocab"),
        r"[ih][rzn]\.kernel": ("embed", "hidden"),
        r"[ih][rzn]\.bias": ("hidden",),
        r"head\.kernel": ("embed_vocab", "vocab"),
        r"head\.bias": ("vocab",),
    },
    "plain_gpt": {
        "embedding_VD": ("vocab", "embed_vocab"),
        "positions_TD": (None, "embed"),
        r"(\w+_)?norm_(scale|bias)_L?D": ("norm",),
        "qkv_LD3HK": ("embed", None, "heads", None),
        "qkv_bias_L3HK": (None, "heads", None),
        "out_LHKD": ("heads", None, "embed"),
        "up_LDM": ("embed", "mlp"),
        "up_bias_LM": ("mlp",),
        "down_LMD": ("mlp", "embed"),
        "(out|down)_bias_LD": ("embed",),
    },
    "recommender": {r"tables\.\d+": ("rows", "columns")},
    "graph_network": {},
    "resnet50": {},
    "resnet152": {},
    "unet": {},
    "linen_resnet": {},
}
"""For each model: pattern of the last words of a path, joined by dots -> names."""

UNNAMED = frozenset(
    {"recommender", "graph_network", "resnet50", "resnet152", "unet", "linen_resnet"}
)
"""No layout names the other dimensions of these models' parameters; none of them is stacked."""


def names_of(model: str, path: str, rank: int) -> Names:
    """The names of the last dimensions of a parameter.

    Args:
      path: as `jax.tree_util.keystr` writes it.

    Raises:
      ValueError: the model's table has no pattern for it.

    >>> names_of("mlp", "['layers'][3]['kernel']", 2)
    ('hidden', 'embed')
    """
    words = ".".join(re.findall(r"\w+", path))
    table: Mapping[str, Names] = PARAMETERS[model]
    for pattern, names in table.items():
        if re.search(rf"(^|\.)({pattern})$", words):
            return names
    if model in UNNAMED:
        return (None,) * rank
    raise ValueError(f"{model}: no names for the parameter {path}; expected one of {list(table)}")
