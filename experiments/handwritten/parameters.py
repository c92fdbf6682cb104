"""The axis names of the models' parameters, by the last words of their paths.

The names are MaxText's (see `maxtext`): "embed" is the width of the residual stream, "norm" is that
width in a norm, "mlp", "heads" and "vocab" are dimensions that Megatron splits. The dimension of
stacked layers comes first and has no name.
"""

import re
from collections.abc import Mapping

from experiments.handwritten.layouts import Names

PARAMETERS: Mapping[str, Mapping[str, Names]] = {
    "mlp": {
        # Every other map is one into the hidden dimension.
        r"\d*[02468]\.kernel": ("embed", "hidden"),
        r"\d*[02468]\.bias": ("hidden",),
        r"\d*[13579]\.kernel": ("hidden", "embed"),
        r"\d*[13579]\.bias": ("embed",),
    },
    "decoder": {
        "embedding": ("vocab", "embed_vocab"),
        "head": ("embed_vocab", "vocab"),
        "scale": ("norm",),
        "query": ("embed", "heads", None),
        "key|value": ("embed", "kv_heads", None),
        "out": ("heads", None, "embed"),
        r"mlp\.(gate|up)": ("embed", "mlp"),
        r"mlp\.down": ("mlp", "embed"),
        "router": ("embed", None),
        r"experts\.(gate|up)": ("exp", "embed_moe", "mlp_moe"),
        r"experts\.down": ("exp", "mlp_moe", "embed_moe"),
    },
}
"""For each family of models: pattern of the last words of a path, joined by dots -> names."""


def names_of(family: str, path: str) -> Names:
    """The names of the last dimensions of a parameter.

    Args:
      path: as `jax.tree_util.keystr` writes it.

    Raises:
      ValueError: the family's table has no pattern for it.

    >>> names_of("mlp", "['layers'][3]['kernel']")
    ('hidden', 'embed')
    """
    words = ".".join(re.findall(r"\w+", path))
    table = PARAMETERS[family]
    for pattern, names in table.items():
        if re.search(rf"(^|\.)({pattern})$", words):
            return names
    raise ValueError(f"{family}: no names for the parameter {path}; expected one of {list(table)}")
