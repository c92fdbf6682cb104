"""Small workloads of every kind the analysis must read: shared by the tests of the core.

Sizes of one workload are distinct where that helps to tell its axes apart. States are real values
from fixed seeds, so that the same workloads serve the numerics checks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.workload import Workload

LAYERS, BATCH, SEQUENCE, VOCAB, EMBED, HEADS, HEAD_DIM, MLP = 3, 16, 24, 64, 32, 8, 4, 48


def shaped(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(seed: int, *shape: int) -> jax.Array:
    fan_in = shape[-2] if len(shape) > 1 else 1
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32) * fan_in**-0.5


def sgd(params: object, grads: object, rate: float = 0.1) -> object:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def train(
    loss: Callable, init: Callable[[], object], batch: object, sample: Callable | None = None
) -> Workload:
    """A workload that takes one SGD step on `loss(params, batch)`."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return sgd(params, grads), {"loss": value}

    return Workload(step=step, init=init, batch=batch, sample=sample)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], -1))


def block_params(seed: int, *lead: int, kv_heads: int = HEADS) -> dict:
    e, h, k, m = EMBED, HEADS, HEAD_DIM, MLP
    return {
        "q": normal(seed, *lead, e, h * k).reshape(*lead, e, h, k),
        "k": normal(seed + 1, *lead, e, kv_heads * k).reshape(*lead, e, kv_heads, k),
        "v": normal(seed + 2, *lead, e, kv_heads * k).reshape(*lead, e, kv_heads, k),
        "o": normal(seed + 3, *lead, h * k, e).reshape(*lead, h, k, e),
        "up": normal(seed + 4, *lead, e, m),
        "down": normal(seed + 5, *lead, m, e),
    }


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / 2.0)
    return jnp.einsum("bhst,bthk->bshk", scores, v)


def block(x: jax.Array, w: dict) -> jax.Array:
    """One pre-activation transformer block without norms."""
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "qkv")
    x = x + jnp.einsum("bshk,hkd->bsd", attention(q, k, v), w["o"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def gpt_params(layers: object) -> dict:
    return {"emb": normal(90, VOCAB, EMBED), "out": normal(91, EMBED, VOCAB), "layers": layers}


def token_batch(batch: int = BATCH, sequence: int = SEQUENCE) -> jax.ShapeDtypeStruct:
    return shaped(batch, sequence, dtype=jnp.int32)


def sample_tokens(batch: int = BATCH, sequence: int = SEQUENCE) -> Callable:
    return lambda key: jax.random.randint(key, (batch, sequence), 0, VOCAB)


def gpt_loss(params: dict, tokens: jax.Array, remat: bool = True, unroll: int = 1) -> jax.Array:
    def layer(x, w):
        return block(x, w), None

    body = jax.checkpoint(layer) if remat else layer
    x, _ = jax.lax.scan(body, params["emb"][tokens], params["layers"], unroll=unroll)
    return cross_entropy(x @ params["out"], tokens)


def scanned_gpt(remat: bool = True, layers: int = LAYERS, unroll: int = 1) -> Workload:
    return train(
        lambda p, b: gpt_loss(p, b, remat, unroll),
        lambda: gpt_params(block_params(0, layers)),
        token_batch(),
        sample_tokens(),
    )


def unrolled_gpt(layers: int = LAYERS) -> Workload:
    def loss(params, tokens):
        x = params["emb"][tokens]
        for w in params["layers"]:
            x = block(x, w)
        return cross_entropy(x @ params["out"], tokens)

    def init():
        return gpt_params([block_params(10 * i) for i in range(layers)])

    return train(loss, init, token_batch(), sample_tokens())


def gradient_accumulation(parts: int = 2) -> Workload:
    def step(params, tokens):
        micro = tokens.reshape(parts, -1, tokens.shape[-1])

        def add(total, one):
            value, grads = jax.value_and_grad(gpt_loss)(params, one)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = jax.lax.scan(add, zero, micro)
        return sgd(params, grads, 0.1 / parts), {"loss": value / parts}

    def init():
        return gpt_params(block_params(0, LAYERS))

    return Workload(step=step, init=init, batch=token_batch(), sample=sample_tokens())


def fused_qkv() -> Workload:
    def loss(params, x):
        b, s, _ = x.shape
        q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(b, s, HEADS, HEAD_DIM) for a in (q, k, v))
        y = attention(q, k, v).reshape(b, s, HEADS * HEAD_DIM)
        return jnp.mean((x + y @ params["out"]) ** 2)

    def init():
        inner = HEADS * HEAD_DIM
        return {"qkv": normal(0, EMBED + 8, 3 * inner), "out": normal(1, inner, EMBED + 8)}

    return train(loss, init, shaped(BATCH, SEQUENCE, EMBED + 8))


def grouped_query(kv_heads: int = 2) -> Workload:
    def loss(params, x):
        b, s, _ = x.shape
        q = jnp.einsum("bsd,dhk->bshk", x, params["q"])
        k, v = (jnp.einsum("bsd,dgk->bsgk", x, params[n]) for n in "kv")
        q = q.reshape(b, s, kv_heads, HEADS // kv_heads, HEAD_DIM)
        scores = jax.nn.softmax(jnp.einsum("bsgrk,btgk->bgrst", q, k) / 2.0)
        y = jnp.einsum("bgrst,btgk->bsgrk", scores, v).reshape(b, s, HEADS, HEAD_DIM)
        return jnp.mean((x + jnp.einsum("bshk,hkd->bsd", y, params["o"])) ** 2)

    def init():
        p = block_params(0, kv_heads=kv_heads)
        return {n: p[n] for n in "qkvo"}

    return train(loss, init, shaped(BATCH, SEQUENCE, EMBED))


def clip() -> Workload:
    """Two towers, joined by the scores of every image with every text."""

    def loss(params, batch):
        image = jnp.tanh(batch["image"].reshape(batch["image"].shape[0], -1) @ params["image"])
        text = jnp.tanh(jnp.mean(params["embed"][batch["text"]], axis=1) @ params["text"])
        scores = image @ text.T
        labels = jnp.arange(scores.shape[0])[:, None]
        one = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores, 1), labels, 1))
        two = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores.T, 1), labels, 1))
        return one + two

    def init():
        return {
            "image": normal(0, 48, 40),
            "embed": normal(1, VOCAB, EMBED),
            "text": normal(2, EMBED, 40),
        }

    batch = {"image": shaped(BATCH, 4, 12), "text": token_batch()}

    def sample(key):
        return {
            "image": jax.random.normal(key, (BATCH, 4, 12)),
            "text": jax.random.randint(key, (BATCH, SEQUENCE), 0, VOCAB),
        }

    return train(loss, init, batch, sample)


def one_more_token() -> Workload:
    """A batch of S+1 tokens: inputs are all but the last, labels all but the first."""

    def loss(params, tokens):
        x = params["emb"][tokens[:, :-1]]
        return cross_entropy(block(x, params["layer"]) @ params["out"], tokens[:, 1:])

    def init():
        return {"emb": normal(90, VOCAB, EMBED), "out": normal(91, EMBED, VOCAB)} | {
            "layer": block_params(0)
        }

    return train(loss, init, token_batch(sequence=SEQUENCE + 1), sample_tokens(16, SEQUENCE + 1))


def equal_width_mlp(layers: int = 4, width: int = 32) -> Workload:
    def loss(params, batch):
        x, y = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    def init():
        return [normal(i, width, width) for i in range(layers)]

    return train(loss, init, (shaped(BATCH, width), shaped(BATCH, width)))


def scanned_mlp(layers: int = LAYERS, unroll: int = 1) -> Workload:
    """Layers of two matrices, stacked: no residual stream, no attention."""

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(jax.nn.relu(x @ w["a"]) @ w["b"]), None

        return jnp.mean(jax.lax.scan(layer, x, params, unroll=unroll)[0] ** 2)

    def init():
        return {"a": normal(0, layers, EMBED, MLP), "b": normal(1, layers, MLP, EMBED)}

    return train(loss, init, shaped(BATCH, EMBED))


def scan_unrolled_by_four() -> Workload:
    return scanned_mlp(layers=8, unroll=4)


def rnn() -> Workload:
    """A recurrent cell scanned over time; its square weight holds one axis twice."""

    def loss(params, batch):
        x, y = batch

        def cell(h, x_t):
            h = jnp.tanh(x_t @ params["in"] + h @ params["recurrent"])
            return h, h

        h0 = jnp.zeros((x.shape[0], params["recurrent"].shape[0]))
        _, hs = jax.lax.scan(cell, h0, x.transpose(1, 0, 2))
        return jnp.mean((hs.transpose(1, 0, 2) @ params["out"] - y) ** 2)

    def init():
        return {"in": normal(0, 8, 64), "recurrent": normal(1, 64, 64), "out": normal(2, 64, 8)}

    return train(loss, init, (shaped(BATCH, 12, 8), shaped(BATCH, 12, 8)))


def associative_scan() -> Workload:
    def loss(params, x):
        gate = jax.nn.sigmoid(x @ params["gate"])
        value = x @ params["value"]

        def combine(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, h = jax.lax.associative_scan(combine, (gate, value), axis=1)
        return jnp.mean((h @ params["out"] - x) ** 2)

    def init():
        return {n: normal(i, EMBED, EMBED) for i, n in enumerate(("gate", "value", "out"))}

    return train(loss, init, shaped(BATCH, SEQUENCE, EMBED))


def biased_pair() -> Workload:
    """A layer of hidden units, whose bias is small, and the layer after it."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["in"] + params["bias"])
        return jnp.mean((hidden @ params["out"] - x) ** 2)

    def init():
        shapes = {"in": (2 * EMBED, 256), "bias": (256,), "out": (256, 2 * EMBED)}
        return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    return train(loss, init, shaped(BATCH, 2 * EMBED))


def _expert_params(experts: int, width: int = MLP) -> dict:
    return {
        "router": normal(0, EMBED, experts),
        "up": normal(1, experts, EMBED, width),
        "down": normal(2, experts, width, EMBED),
    }


def _routed(tokens: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Top-1 routing with a capacity: one-hot (..., token, expert, slot); the same with weights."""
    experts = router.shape[1]
    capacity = 2 * tokens.shape[-2] // experts
    probabilities = jax.nn.softmax(tokens @ router)
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts)
    position = (jnp.cumsum(chosen, axis=-2) - 1) * chosen
    slot = jax.nn.one_hot(position.astype(jnp.int32), capacity) * chosen[..., None]
    return slot, slot * probabilities[..., None]


def mixture_of_experts(experts: int = 8) -> Workload:
    """Tokens of the whole batch routed together, as one-hot dispatch and combine."""

    def loss(params, x):
        tokens = x.reshape(-1, x.shape[-1])
        slot, weight = _routed(tokens, params["router"])
        routed = jnp.einsum("nec,nd->ecd", slot, tokens)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", routed, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        mixed = jnp.einsum("nec,ecd->nd", weight, out)
        return jnp.mean((tokens + mixed) ** 2)

    return train(loss, lambda: _expert_params(experts), shaped(BATCH, SEQUENCE, EMBED))


def grouped_experts(experts: int = 8, width: int = MLP) -> Workload:
    """Routed within each sequence, so that slots of experts keep the batch dimension."""

    def loss(params, x_BSD):
        slot, weight = _routed(x_BSD, params["router"])
        routed = jnp.einsum("bsec,bsd->ebcd", slot, x_BSD)
        hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", routed, params["up"]))
        out = jnp.einsum("ebcf,efd->ebcd", hidden, params["down"])
        mixed = jnp.einsum("bsec,ebcd->bsd", weight, out)
        return jnp.mean((x_BSD + mixed) ** 2)

    return train(loss, lambda: _expert_params(experts, width), shaped(BATCH, SEQUENCE, EMBED))


def conv_net() -> Workload:
    """Two convolutions with batch-norm statistics kept in the state."""

    def apply(params, stats, x):
        new = []
        for w, (mean, var) in zip(params["conv"], stats, strict=True):
            x = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            m, v = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
            new.append((0.9 * mean + 0.1 * m, 0.9 * var + 0.1 * v))
            x = jax.nn.relu((x - m) * jax.lax.rsqrt(v + 1e-3))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(x, (1, 2)) @ params["head"], new

    def step(state, batch):
        def loss(params):
            logits, stats = apply(params, state["stats"], batch["image"])
            return cross_entropy(logits, batch["label"]), stats

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": sgd(state["params"], grads), "stats": stats}, {"loss": value}

    def init():
        conv = [normal(i, 3, 3, a, b) * 0.3 for i, (a, b) in enumerate([(3, 16), (16, 32)])]
        stats = [(jnp.zeros(n), jnp.ones(n)) for n in (16, 32)]
        return {"params": {"conv": conv, "head": normal(9, 32, 10)}, "stats": stats}

    batch = {"image": shaped(BATCH, 8, 8, 3), "label": shaped(BATCH, dtype=jnp.int32)}
    return Workload(step=step, init=init, batch=batch)


def tied_embedding() -> Workload:
    def loss(params, tokens):
        x = block(params["emb"][tokens], params["layer"])
        return cross_entropy(x @ params["emb"].T, tokens)

    def init():
        return {"emb": normal(90, VOCAB, EMBED), "layer": block_params(0)}

    return train(loss, init, token_batch(), sample_tokens())


def loops() -> Workload:
    """fori_loop with a known count (as a scan and as a while), and a while with an unknown one."""

    def loss(params, x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["w"]), x)
        return jnp.mean(x**2)

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        halved, count = jax.lax.while_loop(
            lambda c: jnp.max(jnp.abs(c[0])) > 1e-2, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)
        )
        averaged = jax.lax.fori_loop(
            0, count, lambda i, w: 0.9 * w + 0.1 * state["params"]["w"], state["averaged"]
        )
        params = sgd(state["params"], grads)
        metrics = {"loss": value, "count": count, "halved": jnp.sum(halved)}
        return {"params": params, "averaged": averaged}, metrics

    def init():
        return {"params": {"w": normal(0, EMBED, EMBED)}, "averaged": normal(1, EMBED, EMBED)}

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


def conditional() -> Workload:
    """A cond inside the loss, and one around the optimizer (skip a step that is not finite)."""

    def loss(params, x):
        wide = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]  # noqa: E731
        narrow = lambda p, x: x @ p["c"]  # noqa: E731
        y = jax.lax.cond(jnp.mean(x) > 0, wide, narrow, params, x)
        return jnp.mean((y - x) ** 2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        new = jax.lax.cond(
            jnp.isfinite(value), lambda p, g: sgd(p, g), lambda p, g: p, params, grads
        )
        return new, {"loss": value}

    def init():
        return {
            "a": normal(0, EMBED, MLP),
            "b": normal(1, MLP, EMBED),
            "c": normal(2, EMBED, EMBED),
        }

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))


@jax.custom_jvp
def _softplus(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    return _softplus(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])


def custom_derivatives() -> Workload:
    def loss(params, x):
        return jnp.mean((_softplus(_clipped(x @ params["a"])) @ params["b"] - x) ** 2)

    def init():
        return {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)}

    return train(loss, init, shaped(BATCH, EMBED))


@jax.jit
def _shared_layer(x: jax.Array, w: dict) -> jax.Array:
    return jnp.tanh(jax.nn.relu(x @ w["a"]) @ w["b"])


def jit_called_six_times() -> Workload:
    def loss(params, x):
        for w in params:
            x = _shared_layer(x, w)
        return jnp.mean(x**2)

    def init():
        return [{"a": normal(i, EMBED, MLP), "b": normal(9 + i, MLP, EMBED)} for i in range(6)]

    return train(loss, init, shaped(BATCH, EMBED))


def key_in_state() -> Workload:
    """Dropout from a PRNG key in the state; integer, bool and raw key leaves; empty subtrees."""

    def step(state, x):
        key, use = jax.random.split(state["key"])

        def loss(params):
            h = jax.nn.relu(x @ params["a"])
            h = jnp.where(jax.random.bernoulli(use, 0.9, h.shape), h / 0.9, 0.0)
            return jnp.mean((h @ params["b"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = {
            **state,
            "params": sgd(state["params"], grads),
            "key": key,
            "raw": jax.random.key_data(key),
            "count": state["count"] + 1,
            "odd": ~state["odd"],
            "seen": state["seen"].at[state["count"] % 8].add(x.shape[0]),
            "mask": state["mask"] ^ True,
        }
        return new, {"loss": value, "nothing": None}

    def init():
        return {
            "params": {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)},
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(4), 8),
            "raw": jax.random.key_data(jax.random.key(3)),
            "count": jnp.zeros((), jnp.int32),
            "odd": jnp.zeros((), bool),
            "seen": jnp.zeros((8,), jnp.int32),
            "mask": jnp.zeros((MLP,), bool),
            "empty": {},
            "none": None,
            "unit": (),
            "zero": jnp.zeros((0, 4)),
        }

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


def optax_state(optimizer: optax.GradientTransformation) -> Workload:
    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["a"] + params["bias"]) @ params["b"] - x) ** 2)

    def step(state, x):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": value}

    def init():
        params = {"a": normal(0, 160, 136), "bias": jnp.zeros(136), "b": normal(1, 136, 160)}
        return params, optimizer.init(params)

    return Workload(step=step, init=init, batch=shaped(BATCH, 160))


def adamw() -> Workload:
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return optax_state(chain)


def momentum_layers() -> Workload:
    """Stacked layers computed in bfloat16 and made anew backwards; SGD with momentum."""
    shapes = {"a": (4, 64, 128), "b": (4, 128, 64)}

    def loss(params, x):
        @jax.checkpoint
        def layer(x, w):
            return x + jnp.tanh(x @ w["a"]) @ w["b"], None

        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        y, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), low)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def init():
        params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        params = jax.tree.map(lambda p, m: 0.99 * p - 0.1 * m, state["params"], moments)
        return {"params": params, "moments": moments}, {"loss": value}

    return Workload(step=step, init=init, batch=shaped(512, 64))


def adafactor() -> Workload:
    return optax_state(optax.adafactor(1e-2))


def accumulated_adamw() -> Workload:
    return optax_state(optax.MultiSteps(optax.adamw(1e-2), 2))


def bfloat16() -> Workload:
    """Master weights in float32, products in bfloat16."""

    def loss(params, x):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        y = jax.nn.gelu(x.astype(jnp.bfloat16) @ low["a"]) @ low["b"]
        return jnp.mean((y.astype(jnp.float32) - x) ** 2)

    def init():
        return {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)}

    return train(loss, init, shaped(BATCH, EMBED))


def with_constraints() -> Workload:
    """The author's own data x tensor parallelism, written as constraints on a (4, 2) mesh."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def pinned(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params, x):
        x = pinned(x, "data", None)
        a, b = pinned(params["a"], None, "model"), pinned(params["b"], "model", None)
        h = pinned(jax.nn.relu(x @ a), "data", "model")
        return jnp.mean((pinned(h @ b, "data", None) - x) ** 2)

    def init():
        return {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)}

    return train(loss, init, shaped(BATCH, EMBED))


def manual_region() -> Workload:
    """The author's own shard_map inside the loss, on an (8,) mesh."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params, x):
        local = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            check_vma=False,
        )
        return jnp.mean((local(x, params["a"]) @ params["b"] - x) ** 2)

    def init():
        return {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)}

    return train(loss, init, shaped(BATCH, EMBED))


def odd_sizes() -> Workload:
    """197 tokens, 257 words (a prime), 6 heads: only the batch and the width divide by 8."""

    def loss(params, batch):
        x = batch["image"] + params["position"]
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[n]) for n in "qkv")
        mixed = jnp.einsum("bshk,bhkj->bshj", q, jnp.einsum("bshk,bshj->bhkj", k, v)) / 197
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, params["o"])
        logits = jnp.mean(x, 1) @ params["head"]
        return cross_entropy(logits, batch["label"])

    def init():
        return {
            "position": normal(0, 197, EMBED),
            **{n: normal(i + 1, EMBED, 24).reshape(EMBED, 6, 4) for i, n in enumerate("qkv")},
            "o": normal(5, 24, EMBED).reshape(6, 4, EMBED),
            "head": normal(6, EMBED, 257),
        }

    batch = {"image": shaped(8, 197, EMBED), "label": shaped(8, dtype=jnp.int32)}
    return train(loss, init, batch)


def indivisible_batch() -> Workload:
    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["a"]) @ params["b"] - x) ** 2)

    def init():
        return {"a": normal(0, EMBED, MLP), "b": normal(1, MLP, EMBED)}

    return train(loss, init, shaped(7, EMBED))


def odds_and_ends() -> Workload:
    """Operations with unusual shapes: sort, top_k, cumsum, fft, cholesky, scatter, roll, vmap."""

    def step(state, x):
        w = state["w"]
        ordered = jnp.sort(x @ w, axis=-1)
        best, where = jax.lax.top_k(x, 4)
        spectrum = jnp.abs(jnp.fft.rfft(x, axis=-1))
        gram = x.T @ x + 10 * jnp.eye(x.shape[1])
        root = jnp.linalg.cholesky(gram)
        solved = jax.scipy.linalg.solve_triangular(root, w, lower=True)
        total = jnp.zeros(x.shape[1]).at[where].add(best)
        rolled = jnp.roll(x, 3, axis=0)[::2]
        outer = jax.vmap(lambda a: jnp.outer(a, a))(x[:, :4])
        picked = jax.vmap(lambda a, i: a[i])(x, where)
        sums = jax.ops.segment_sum(x, where[:, 0], num_segments=8)
        new = {"w": w + 1e-3 * solved + 1e-3 * total[:, None], "count": state["count"] + 1}
        parts = (ordered, spectrum, rolled, outer, picked, sums, jnp.cumsum(x, 0))
        return new, {"sums": jnp.stack([jnp.sum(p) for p in parts]), "ordered": ordered}

    def init():
        return {"w": normal(0, EMBED, EMBED), "count": jnp.zeros((), jnp.int32)}

    return Workload(step=step, init=init, batch=shaped(BATCH, EMBED))


def scalars_only() -> Workload:
    def step(state, x):
        return state + jnp.mean(x), state

    return Workload(step=step, init=lambda: jnp.zeros(()), batch=shaped(BATCH))


def nothing_used() -> Workload:
    """A step that keeps its state and never looks at half of its batch."""

    def step(state, batch):
        return state, {"loss": jnp.sum(batch["used"])}

    batch = {"used": shaped(BATCH, 4), "unused": shaped(BATCH, 5)}
    return Workload(step=step, init=lambda: {"w": normal(0, EMBED, MLP)}, batch=batch)


EVERY: dict[str, Callable[[], Workload]] = {
    f.__name__: f
    for f in (
        scanned_gpt,
        unrolled_gpt,
        gradient_accumulation,
        fused_qkv,
        grouped_query,
        clip,
        one_more_token,
        equal_width_mlp,
        scanned_mlp,
        scan_unrolled_by_four,
        rnn,
        associative_scan,
        mixture_of_experts,
        grouped_experts,
        conv_net,
        tied_embedding,
        loops,
        conditional,
        custom_derivatives,
        jit_called_six_times,
        key_in_state,
        adamw,
        momentum_layers,
        adafactor,
        accumulated_adamw,
        bfloat16,
        with_constraints,
        manual_region,
        odd_sizes,
        indivisible_batch,
        odds_and_ends,
        scalars_only,
        nothing_used,
    )
}


def flat_values(tree: object) -> list[np.ndarray]:
    """Leaves as plain arrays, PRNG keys as their words."""
    return [
        np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for x in jax.tree.leaves(tree)
    ]
