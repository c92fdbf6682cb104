"""The models that pods are planned for, at full size and in miniature, and how they are trained."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any  # the modules of two models have no narrower type

from models import decoder, moe
from models.decoder import LLAMA3_8B, DecoderConfig
from models.moe import MIXTRAL_8X7B, MixtureConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """A model and how it is trained, with adamw."""

    model: DecoderConfig  # or a MixtureConfig, which is one
    batch_size: int  # sequences in the global batch
    accumulate: int = 1  # parts of the batch, one after the other
    learning_rate: float = 3e-4  # of adamw; "The Llama 3 Herd of Models", table 3

    def __post_init__(self) -> None:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} must divide batch_size={self.batch_size}"
            )

    def replace(self, **overrides: object) -> "PodSize":
        """With other values for its own fields and for those of its model, by name.

        >>> LLAMA3_TINY.replace(layers=4, batch_size=8).model.layers
        4
        """
        own = {field.name for field in dataclasses.fields(self)} - {"model"}
        known = own | {field.name for field in dataclasses.fields(self.model)}
        if unknown := sorted(overrides.keys() - known):
            raise ValueError(f"unknown sizes {unknown}: expected some of {sorted(known)}")
        mine: dict[str, Any] = {k: v for k, v in overrides.items() if k in own}
        others: dict[str, Any] = {k: v for k, v in overrides.items() if k not in own}
        model = dataclasses.replace(self.model, **others)
        return dataclasses.replace(self, model=model, **mine)

    def build(self) -> tuple[Callable[[], Any], Callable[..., Any]]:
        """(() -> module, loss(module, tokens_BS, constrain=...) -> (scalar, metrics))."""
        if isinstance(self.model, MixtureConfig):
            return functools.partial(moe.Mixture, self.model), moe.loss
        return functools.partial(decoder.Decoder, self.model), decoder.loss


_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "mlp_dim": 128,
    "layers": 2,
    "sequence": 64,
    "query_block": 16,
    "loss_parts": 2,
}

# A million tokens a step (2^20): what models of this class are trained with, to within a factor of
# four, and two sequences for each of 64 devices, so that plain FSDP has work to hide its gathers
# behind. More devices than sequences get a sequence each: see full_size.
LLAMA3 = PodSize(model=LLAMA3_8B, batch_size=128)
MIXTRAL = PodSize(model=MIXTRAL_8X7B, batch_size=256)
LLAMA3_TINY = PodSize(model=dataclasses.replace(LLAMA3_8B, **_TINY), batch_size=16)
MIXTRAL_TINY = PodSize(
    model=dataclasses.replace(MIXTRAL_8X7B, **_TINY, experts=4, group=32), batch_size=16
)

POD_SIZES = {
    "llama3-8b": LLAMA3,
    "mixtral": MIXTRAL,
    "llama3-tiny": LLAMA3_TINY,
    "mixtral-tiny": MIXTRAL_TINY,
}


def full_size(name: str, devices: int) -> PodSize:
    """A model's own size on so many devices: a sequence is not split, and each has one at least."""
    size = POD_SIZES[name]
    return size.replace(batch_size=max(size.batch_size, devices))


def differing(full: PodSize, **sizes: int) -> dict[str, int]:
    """Those of `sizes` that are not the full one's, by name; 0 stands for the full one's.

    >>> differing(LLAMA3_TINY, batch_size=0, layers=2), differing(LLAMA3_TINY, layers=4)
    ({}, {'layers': 4})
    """
    return {name: n for name, n in sizes.items() if n and full.replace(**{name: n}) != full}


def run_name(model: str, target: str, overrides: Mapping[str, int], scanned: bool = True) -> str:
    """What the files of a run are called; one of another size does not take the full model's.

    >>> run_name("llama3-8b", "v5p:4x4x4*2", {"layers": 4})
    'llama3-8b-v5p-4x4x4-2-layers-4'
    """
    kind = "" if scanned else "-unrolled"
    others = "".join(f"-{name}-{n}" for name, n in overrides.items())
    return f"{model}-{target.replace(':', '-').replace('*', '-')}{kind}{others}"
