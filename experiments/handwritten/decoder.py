"""The decoder transformer under every hand-written layout."""

import functools
import re

import jax
import optax

from experiments.handwritten import trainer
from experiments.handwritten.layouts import HandLayout, Names, Rules
from experiments.sizes import DecoderSize
from models import decoder, text

# Column-parallel into heads and mlp, row-parallel out of them (Megatron, Shoeybi et al. 2019).
PARAMS: dict[str, Names] = {
    "embedding": ("vocab", "embed"),
    "query": ("embed", "heads", None),
    "key": ("embed", "kv_heads", None),
    "value": ("embed", "kv_heads", None),
    "out": ("heads", None, "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "scale": ("embed",),
    "head": ("embed", "vocab"),
}


def build(size: DecoderSize, layout: HandLayout, devices: list[jax.Device]) -> trainer.Built:
    """The train step under `layout`, its state and a batch, on `devices`."""
    rules = Rules.on(layout, devices)
    return trainer.build(
        rules,
        lambda: decoder.Decoder(size.model),
        functools.partial(decoder.loss, constrain=rules.constrain),
        _names_of,
        optax.adamw(size.learning_rate),
        next(text.batches(0, size.batch_size, size.model.sequence)),
    )


def _names_of(path: str, rank: int) -> Names:
    names = PARAMS[re.findall(r"'(\w+)'", path)[-1]]
    return (None,) * (rank - len(names)) + names  # scanned layers are stacked in front
