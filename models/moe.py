"""Decoder whose MLPs are experts: top-k routing with a capacity, dispatched by matmuls (GShard).

Tokens are routed in groups of neighbours (Lepikhin et al. 2020, section 3.2): within a group each
expert takes `capacity` tokens, and a one-hot [token, expert, place] array moves tokens to experts
and back as two einsums, so that the partitioner turns them into all-to-alls where the experts are
sharded. Embedding, attention, norms, head and cross-entropy are the dense decoder's.

Dimensions besides those of `models.decoder`: E experts, N groups in a sequence, S = T / N tokens
in a group, P places of an expert in a group.

Unlike GShard, tokens take their places in the order of the sequence whatever the rank of the
choice, so that a position depends on the past alone. Not modelled: dropless routing (a token whose
experts are full passes by on the residual stream), router noise, shared experts.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from models.constrain import Constrain, unconstrained
from models.decoder import Attention, DecoderConfig, RMSNorm, Stack, cross_entropy, normal
from models.precision import cast


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """A decoder's sizes with those of its experts; `mlp_dim` is the width of one expert."""

    experts: int = 8  # in each layer
    experts_per_token: int = 2  # experts that see a token
    capacity_factor: float = 1.25  # places for tokens, relative to a perfectly even routing
    group: int = 128  # tokens S routed together; the dispatch costs FLOPs in proportion
    balance_weight: float = 0.01  # of the load-balancing loss

    def __post_init__(self) -> None:
        # slots=True makes the class anew, and super() without arguments would name the old one.
        DecoderConfig.__post_init__(self)
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} exceeds experts={self.experts}"
            )
        if self.sequence % self.group:
            raise ValueError(f"group={self.group} must divide sequence={self.sequence}")

    @property
    def capacity(self) -> int:
        """Places P of an expert in a group; never more than tokens."""
        even = self.group * self.experts_per_token / self.experts
        return min(self.group, math.ceil(even * self.capacity_factor))


MIXTRAL_8X7B = MixtureConfig(
    # "Mixtral of Experts" (Jiang et al. 2024), table 1, but for what follows.
    vocab_size=32_000,
    d_model=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_dim=14_336,
    layers=32,
    experts=8,
    experts_per_token=2,
    # As released, not in the table: longest wavelength and norm.
    rotary_base=1_000_000.0,
    norm_epsilon=1e-5,
    # Of our choosing: the table's context is 32,768 tokens; capacity, groups and the weight of the
    # balancing loss are not published (the released model drops no token).
    sequence=4096,
    capacity_factor=1.25,
    group=1024,
    balance_weight=0.01,
    remat="full",
    attention="blockwise",
    query_block=512,
    loss_parts=4,
    dtype="bfloat16",
)


class Experts(nnx.Module):
    """Router and stacked SwiGLU experts."""

    def __init__(self, config: MixtureConfig, *, rngs: nnx.Rngs):
        D, M, E = config.d_model, config.mlp_dim, config.experts
        self.config = config
        self.router = normal(rngs, (D, E), fan_in=D)
        self.gate = normal(rngs, (E, D, M), fan_in=D)
        self.up = normal(rngs, (E, D, M), fan_in=D)
        self.down = normal(rngs, (E, M, D), fan_in=M)

    def __call__(
        self, x_BTD: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the experts' sum for each token, and `balance` and `dropped`, scalars."""
        B, T, D = x_BTD.shape
        S = self.config.group
        x_BNSD = x_BTD.reshape(B, T // S, S, D)
        # A router is small and its decisions are discrete: float32 (Fedus et al. 2021, 2.4).
        logits_BNSE = x_BNSD.astype(jnp.float32) @ self.router[...]
        combine_BNSEP, besides = route(
            logits_BNSE, self.config.experts_per_token, self.config.capacity
        )
        combine_BNSEP = combine_BNSEP.astype(x_BTD.dtype)
        combine_BNSEP = constrain(combine_BNSEP, ("batch", None, None, None, None))
        dispatch_BNSEP = (combine_BNSEP > 0).astype(x_BTD.dtype)

        # Both sides of each exchange are named, so that where experts are sharded it is one
        # all-to-all of what the experts take or give.
        at_tokens = (None, "batch", None, None)
        at_experts = ("expert", "expert_batch", None, None)
        x_EBNPD = jnp.einsum("BNSEP,BNSD->EBNPD", dispatch_BNSEP, x_BNSD)
        x_EBNPD = constrain(x_EBNPD, (*at_tokens, "embed"))
        x_EBNPD = constrain(x_EBNPD, (*at_experts, "embed"))
        gate_EBNPM = jnp.einsum("EBNPD,EDM->EBNPM", x_EBNPD, self.gate[...])
        up_EBNPM = jnp.einsum("EBNPD,EDM->EBNPM", x_EBNPD, self.up[...])
        hidden_EBNPM = constrain(jax.nn.silu(gate_EBNPM) * up_EBNPM, (*at_experts, "mlp"))
        y_EBNPD = jnp.einsum("EBNPM,EMD->EBNPD", hidden_EBNPM, self.down[...])
        y_EBNPD = constrain(y_EBNPD, (*at_experts, "embed"))
        y_EBNPD = constrain(y_EBNPD, (*at_tokens, "embed"))
        y_BNSD = jnp.einsum("BNSEP,EBNPD->BNSD", combine_BNSEP, y_EBNPD)
        return y_BNSD.reshape(B, T, D), besides


def route(
    logits_BNSE: jax.Array, experts_per_token: int, capacity: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Gives each token its places at its best experts.

    Args:
      logits_BNSE: of the router, float32.
      experts_per_token: choices of a token; their weights sum to one.
      capacity: places P of an expert in a group.

    Returns:
      combine_BNSEP, the weight of a token at its place, 0 elsewhere; and scalars: `balance`, the
      load-balancing loss of Switch (Fedus et al. 2021, equation 4) over all choices, 1 where
      experts are used evenly, and `dropped`, the share of choices that found no place.
    """
    E = logits_BNSE.shape[-1]
    probability_BNSE = jax.nn.softmax(logits_BNSE, axis=-1)
    chosen_BNSE = jnp.zeros_like(probability_BNSE)
    # As many rounds as choices: unlike a sort, an argmax is partitioned like any reduction.
    for _ in range(experts_per_token):
        best_BNS = jnp.argmax(jnp.where(chosen_BNSE > 0, -1.0, probability_BNSE), axis=-1)
        chosen_BNSE += jax.nn.one_hot(best_BNS, E, dtype=chosen_BNSE.dtype)
    weight_BNSE = probability_BNSE * chosen_BNSE
    weight_BNSE /= jnp.sum(weight_BNSE, axis=-1, keepdims=True)

    place_BNSE = jnp.cumsum(chosen_BNSE, axis=2) - chosen_BNSE
    kept_BNSE = chosen_BNSE * (place_BNSE < capacity)
    at_place_BNSEP = jax.nn.one_hot(place_BNSE.astype(jnp.int32), capacity, dtype=jnp.float32)
    combine_BNSEP = (weight_BNSE * kept_BNSE)[..., None] * at_place_BNSEP

    share_BNE = jnp.mean(chosen_BNSE, axis=2) / experts_per_token
    balance = E * jnp.mean(jnp.sum(share_BNE * jnp.mean(probability_BNSE, axis=2), axis=-1))
    dropped = 1 - jnp.sum(kept_BNSE) / jnp.sum(chosen_BNSE)
    return combine_BNSEP, {"balance": balance, "dropped": dropped}


class MixtureBlock(nnx.Module):
    """Pre-norm attention and experts, each added to the residual stream."""

    def __init__(self, config: MixtureConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.experts_norm = RMSNorm(config)
        self.experts = Experts(config, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, constrain: Constrain
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns x_BTD, and what the router says besides."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), constrain)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        y_BTD, besides = self.experts(self.experts_norm(x_BTD), constrain)
        return constrain(x_BTD + y_BTD, ("batch", None, "embed")), besides


class Mixture(Stack):
    """Tokens in, next-token logits out; every block has experts."""

    config: MixtureConfig

    def __init__(self, config: MixtureConfig):
        super().__init__(config, lambda rngs: MixtureBlock(config, rngs=rngs))


def loss(
    model: Mixture, tokens_BS: jax.Array, constrain: Constrain = unconstrained
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next token, nats, and the weighted load-balancing loss.

    Args:
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    model = cast(model, model.config.dtype)
    x_BTD, besides = model.features(tokens_BS[:, :-1], constrain)
    entropy = cross_entropy(model, x_BTD, tokens_BS, constrain)
    balance, dropped = jnp.mean(besides["balance"]), jnp.mean(besides["dropped"])
    total = entropy + model.config.balance_weight * balance
    return total, {"cross_entropy": entropy, "balance": balance, "dropped": dropped}
