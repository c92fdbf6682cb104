"""GPT in plain JAX, no module system: a dict of arrays, layers stacked and scanned, SGD.

Learnt positions, LayerNorm before attention and before the MLP, biases everywhere, GELU, the head
is the embedding transposed: GPT-2 (Radford et al. 2019), whose architecture GPT-3 kept.

Dimensions in array names: B batch, S = T + 1 tokens of a text, T positions, U key positions (T of
them), D d_model, H heads, K = D / H, 3 query, key and value, M = 4 D, V vocab_size, L layers.

In bfloat16 the parameters stay float32 and are cast in the step; norms, softmax and cross-entropy
are float32. A layer is computed anew in its backward pass.

Not modelled: dropout, the banded sparse attention in every other layer of GPT-3.
"""

import dataclasses
import math
from typing import Any  # a nested dict of arrays

import jax
import jax.numpy as jnp

from models import next_byte
from models.constrain import Constrain, unconstrained
from models.precision import Dtype

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainGPTConfig:
    """Sizes and choices of the model; two equal configs build two equal models."""

    layers: int = 2  # L
    d_model: int = 64  # width of the residual stream
    heads: int = 4  # a head is d_model / heads wide
    vocab_size: int = 256  # one token for each byte
    sequence: int = 32  # positions T that a step predicts
    dtype: Dtype = "float32"  # of matmuls and activations; parameters are float32 in any case
    norm_epsilon: float = 1e-5  # added to LayerNorm's variance
    learning_rate: float = 0.1  # of SGD
    seed: int = 0  # of the initial parameters

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of heads={self.heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


GPT3_6_7B = PlainGPTConfig(
    # "Language Models are Few-Shot Learners" (Brown et al. 2020), table 2.1, GPT-3 6.7B; of our
    # choosing: GPT-2's vocabulary of 50,257 padded to a multiple of 128, so that devices can share
    # it.
    layers=32,
    d_model=4096,
    heads=32,
    vocab_size=50_304,
    sequence=2048,
    dtype="bfloat16",
)


def shapes(config: PlainGPTConfig) -> Params:
    """The shape of each parameter; those of the layers are stacked."""
    L, D, H, K, M = config.layers, config.d_model, config.heads, config.head_dim, 4 * config.d_model
    return {
        "embedding_VD": (config.vocab_size, D),
        "positions_TD": (config.sequence, D),
        "layers": {
            "attention_norm_scale_LD": (L, D),
            "attention_norm_bias_LD": (L, D),
            "qkv_LD3HK": (L, D, 3, H, K),
            "qkv_bias_L3HK": (L, 3, H, K),
            "out_LHKD": (L, H, K, D),
            "out_bias_LD": (L, D),
            "mlp_norm_scale_LD": (L, D),
            "mlp_norm_bias_LD": (L, D),
            "up_LDM": (L, D, M),
            "up_bias_LM": (L, M),
            "down_LMD": (L, M, D),
            "down_bias_LD": (L, D),
        },
        "norm_scale_D": (D,),
        "norm_bias_D": (D,),
    }


def init(config: PlainGPTConfig) -> Params:
    """GPT-2's: normal weights of scale 0.02, less where they add to the residual stream."""
    named, structure = jax.tree_util.tree_flatten_with_path(
        shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(jax.random.key(config.seed), len(named))

    def draw(name: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if "_scale_" in name:
            return jnp.ones(shape)
        if "_bias_" in name:
            return jnp.zeros(shape)
        added = name.startswith(("out_", "down_"))
        return 0.02 / math.sqrt(2 * config.layers if added else 1) * jax.random.normal(key, shape)

    drawn = [draw(path[-1].key, key, shape) for key, (path, shape) in zip(keys, named, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def loss(
    config: PlainGPTConfig,
    params: Params,
    tokens_BS: jax.Array,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
      tokens_BS: int32 tokens, T + 1 of them in a row; row t predicts row t + 1.
    """
    logits_BTV = logits(config, params, tokens_BS[:, :-1], constrain)
    return next_byte.cross_entropy(logits_BTV, tokens_BS)[0]


def logits(
    config: PlainGPTConfig,
    params: Params,
    tokens_BT: jax.Array,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """tokens_BT -> logits_BTV of the token behind each, float32."""
    # Looked up in float32: the gradient of a row adds up thousands of tokens.
    x_BTD = (params["embedding_VD"][tokens_BT] + params["positions_TD"]).astype(config.dtype)
    x_BTD = constrain(x_BTD, ("batch", None, "embed"))

    def layer(x_BTD: jax.Array, layer_params: Params) -> tuple[jax.Array, None]:
        w = {name: x.astype(config.dtype) for name, x in layer_params.items()}
        normed_BTD = norm(config, x_BTD, w["attention_norm_scale_LD"], w["attention_norm_bias_LD"])
        x_BTD = x_BTD + attention(normed_BTD, w, constrain)
        x_BTD = constrain(x_BTD, ("batch", None, "embed"))
        normed_BTD = norm(config, x_BTD, w["mlp_norm_scale_LD"], w["mlp_norm_bias_LD"])
        hidden_BTM = jax.nn.gelu(normed_BTD @ w["up_LDM"] + w["up_bias_LM"])
        hidden_BTM = constrain(hidden_BTM, ("batch", None, "mlp"))
        x_BTD = x_BTD + hidden_BTM @ w["down_LMD"] + w["down_bias_LD"]
        return constrain(x_BTD, ("batch", None, "embed")), None

    # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
    x_BTD, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x_BTD, params["layers"])
    x_BTD = norm(config, x_BTD, params["norm_scale_D"], params["norm_bias_D"])
    head_DV = params["embedding_VD"].T.astype(config.dtype)
    return constrain((x_BTD @ head_DV).astype(jnp.float32), ("batch", None, "vocab"))


def attention(x_BTD: jax.Array, w: Params, constrain: Constrain) -> jax.Array:
    """Causal softmax attention.

    Args:
      w: the parameters of one layer, of the names in `shapes` but without their dimension L.
    """
    qkv_3BTHK = jnp.einsum("BTD,DCHK->CBTHK", x_BTD, w["qkv_LD3HK"])
    qkv_3BTHK = qkv_3BTHK + w["qkv_bias_L3HK"][:, None, None]
    q_BTHK, k_BUHK, v_BUHK = (constrain(x, ("batch", None, "heads", None)) for x in qkv_3BTHK)
    scores_BHTU = jnp.einsum("BTHK,BUHK->BHTU", q_BTHK, k_BUHK).astype(jnp.float32)
    visible_TU = jnp.tril(jnp.ones(scores_BHTU.shape[-2:], dtype=bool))
    masked_BHTU = jnp.where(visible_TU, scores_BHTU / math.sqrt(q_BTHK.shape[-1]), -1e9)
    weights_BHTU = jax.nn.softmax(masked_BHTU, axis=-1).astype(x_BTD.dtype)
    mixed_BTHK = jnp.einsum("BHTU,BUHK->BTHK", weights_BHTU, v_BUHK)
    mixed_BTHK = constrain(mixed_BTHK, ("batch", None, "heads", None))
    return jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, w["out_LHKD"]) + w["out_bias_LD"]


def norm(
    config: PlainGPTConfig, x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> jax.Array:
    """LayerNorm (Ba et al. 2016) over the last dimension, in float32."""
    wide_BTD = x_BTD.astype(jnp.float32)
    centred_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred_BTD), axis=-1, keepdims=True)
    unit_BTD = centred_BTD * jax.lax.rsqrt(variance + config.norm_epsilon)
    return (unit_BTD * scale_D + bias_D).astype(x_BTD.dtype)


def step(
    config: PlainGPTConfig, params: Params, tokens_BS: jax.Array
) -> tuple[Params, dict[str, jax.Array]]:
    """One SGD step."""
    value, grads = jax.value_and_grad(lambda p: loss(config, p, tokens_BS))(params)
    new = jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads)
    return new, {"loss": value}
