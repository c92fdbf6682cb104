"""A GPT train step in plain JAX: no module system, layers stacked and scanned, SGD.

Shapes: B batch, S sequence, D model, H heads, K head, F mlp, V vocabulary, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainGPTConfig:
    """Dimensions of the model."""

    layers: int = 24  # L
    d_model: int = 4096  # D
    heads: int = 32  # H; a head is D / H wide
    vocab_size: int = 50304  # V
    sequence: int = 2048  # S
    batch: int = 64  # B
    dtype: str = "bfloat16"
    learning_rate: float = 0.1

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def shapes(config: PlainGPTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter; those of the layers are stacked."""
    L, D, H, K = config.layers, config.d_model, config.heads, config.head_dim
    return {
        "embed_VD": (config.vocab_size, D),
        "head_DV": (D, config.vocab_size),
        "query_LDHK": (L, D, H, K),
        "key_LDHK": (L, D, H, K),
        "value_LDHK": (L, D, H, K),
        "out_LHKD": (L, H, K, D),
        "up_LDF": (L, D, 4 * D),
        "down_LFD": (L, 4 * D, D),
    }


def init(config: PlainGPTConfig) -> Params:
    """Normal weights of scale 0.02, from a fixed seed."""
    named = shapes(config)
    keys = jax.random.split(jax.random.key(0), len(named))
    return {
        name: (0.02 * jax.random.normal(key, shape)).astype(config.dtype)
        for key, (name, shape) in zip(keys, named.items(), strict=True)
    }


def loss(config: PlainGPTConfig, params: Params, tokens_BS: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token given itself and the ones before, nats."""
    x_BSD = params["embed_VD"][tokens_BS]

    def layer(x_BSD: jax.Array, w: Params) -> tuple[jax.Array, None]:
        q_BSHK, k_BSHK, v_BSHK = (
            jnp.einsum("bsd,dhk->bshk", x_BSD, w[name])
            for name in ("query_LDHK", "key_LDHK", "value_LDHK")
        )
        scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) / config.head_dim**0.5
        mixed_BSHK = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores_BHST, -1), v_BSHK)
        x_BSD = x_BSD + jnp.einsum("bshk,hkd->bsd", mixed_BSHK, w["out_LHKD"])
        return x_BSD + jax.nn.gelu(x_BSD @ w["up_LDF"]) @ w["down_LFD"], None

    layers = {name: w for name, w in params.items() if "_L" in name}
    x_BSD, _ = jax.lax.scan(jax.checkpoint(layer), x_BSD, layers)
    logp_BSV = jax.nn.log_softmax((x_BSD @ params["head_DV"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp_BSV, tokens_BS[..., None], -1))


def step(
    config: PlainGPTConfig, params: Params, tokens_BS: jax.Array
) -> tuple[Params, dict[str, jax.Array]]:
    """One SGD step."""
    value, grads = jax.value_and_grad(lambda p: loss(config, p, tokens_BS))(params)
    new = jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads)
    return new, {"loss": value}
