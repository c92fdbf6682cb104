"""The model sizes of the experiments, stated before the first search on them.

Chosen so that a data-parallel step on 8 fake CPU devices of a 2-core machine takes 0.1 to 0.5 s.
"""

import dataclasses

from models.decoder import DecoderConfig
from models.mlp import MLPConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSize:
    """A decoder and how it is trained."""

    model: DecoderConfig
    batch_size: int = 16  # documents in the global batch
    learning_rate: float = 1e-3  # of adamw


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLPSize:
    """An equal-width MLP and how it is trained."""

    model: MLPConfig
    batch_size: int = 512  # examples in the global batch
    learning_rate: float = 1e-3  # of adamw


DECODER = DecoderSize(
    model=DecoderConfig(
        vocab_size=256,
        d_model=192,
        heads=8,
        kv_heads=4,
        head_dim=24,
        mlp_dim=512,
        layers=4,
        sequence=128,
    )
)
MLP = MLPSize(model=MLPConfig(width=768, layers=8))
