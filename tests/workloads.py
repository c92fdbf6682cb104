"""A tiny training step with a state of every kind, and budgets that keep its searches short."""

import json
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

import autoshard

WIDTH, HIDDEN, BATCH = 64, 128, 32
MEASURED = autoshard.Budget(candidates=24, compiles=6, profiles=5, rounds=4)
UNMEASURED = autoshard.Budget(candidates=24, compiles=2, profiles=0)


def mlp(
    rate: float = 0.1, width: int = WIDTH, batch: int = BATCH, dtype: str = "float32"
) -> autoshard.Workload:
    """Two matrices, momentum, dropout from a key in the state, a counter, an empty subtree."""

    def init():
        a, b = jax.random.split(jax.random.key(0))
        params = {
            "w1": jax.random.normal(a, (width, HIDDEN), dtype) * 0.1,
            "w2": jax.random.normal(b, (HIDDEN, width), dtype) * 0.1,
        }
        return {
            "params": params,
            "momentum": jax.tree.map(jnp.zeros_like, params),
            "count": jnp.int32(0),
            "key": jax.random.key(7),
            "nothing": {},
        }

    def step(state, batch):
        key, dropout = jax.random.split(state["key"])

        def loss(params):
            h = jnp.tanh(batch["x"] @ params["w1"])
            h = h * jax.random.bernoulli(dropout, 0.9, h.shape).astype(h.dtype)
            return jnp.mean((h @ params["w2"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - rate * m, state["params"], momentum)
        new = {
            "params": params,
            "momentum": momentum,
            "count": state["count"] + 1,
            "key": key,
            "nothing": {},
        }
        return new, {"loss": value, "count": state["count"]}

    x = jax.ShapeDtypeStruct((batch, width), dtype)

    def sample(key):
        return {n: jax.random.normal(k, x.shape, dtype) for n, k in _named(key)}

    return autoshard.Workload(step=step, init=init, batch={"x": x, "y": x}, sample=sample)


def _named(key: jax.Array) -> Iterable[tuple[str, jax.Array]]:
    return zip("xy", jax.random.split(key), strict=True)


def batch_of(seed: int = 0, batch: int = BATCH) -> dict[str, jax.Array]:
    return mlp(batch=batch).sample(jax.random.key(seed))


def stateless(step: Callable, **changes: object) -> Callable[[], autoshard.Workload]:
    """A model_fn with the state `{"w": [8, 16]}` and a batch [8, 8], for bad input."""
    fields: dict = {
        "step": step,
        "init": lambda: {"w": jnp.ones((8, 16))},
        "batch": jax.ShapeDtypeStruct((8, 8), jnp.float32),
    }
    return lambda: autoshard.Workload(**{**fields, **changes})


def lines(path: str | pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def write_lines(path: pathlib.Path, records: Iterable[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path
