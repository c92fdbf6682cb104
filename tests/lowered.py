"""Small programs for the tests of the rungs, lowered by jit into Modules."""

import io
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.records.layout import Spec
from autoshard.records.module import ArraySpec, Module

MeshShape = tuple[tuple[str, int], ...]
BATCH, WIDTH, HIDDEN, HEADS = 16, 16, 32, 2
optimizer = optax.adamw(1e-3)


def make_mesh(shape: MeshShape) -> Mesh:
    count = int(np.prod([size for _, size in shape]))
    grid = np.array(jax.devices()[:count]).reshape([size for _, size in shape])
    return Mesh(grid, [name for name, _ in shape])


def canonical(spec: P, ndim: int) -> Spec:
    parts = (*spec, *(None,) * (ndim - len(spec)))
    return tuple((p,) if isinstance(p, str) else tuple(p or ()) for p in parts)


def array_specs(prefix: str, tree: object, shardings: object) -> tuple[ArraySpec, ...]:
    """ArraySpecs of a pytree of shaped things with a matching pytree of NamedShardings."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = jax.tree.leaves(shardings)
    return tuple(
        ArraySpec(
            path=prefix + jax.tree_util.keystr(path),
            shape=tuple(leaf.shape),
            dtype=np.dtype(leaf.dtype).name,
            spec=canonical(sharding.spec, len(leaf.shape)),
        )
        for (path, leaf), sharding in zip(leaves, flat, strict=True)
    )


def lower(
    fn: Callable, args: Sequence, shardings: Sequence, mesh: MeshShape, state_count: int
) -> Module:
    """Lowers `fn(*args) -> (state, metrics)`; the state is args[0], donated; metrics replicate.

    `shardings` are NamedShardings: one for the state as a whole or its tree, and one for each
    further argument.
    """
    full = [
        jax.tree.map(lambda _, s=s: s, arg) if isinstance(s, NamedSharding) else s
        for arg, s in zip(args, shardings, strict=True)
    ]
    shapes = jax.eval_shape(fn, *args)
    replicated = jax.tree.map(lambda _: NamedSharding(make_mesh(mesh), P()), shapes[1])
    jitted = jax.jit(
        fn,
        in_shardings=tuple(full),
        out_shardings=(full[0], replicated),
        donate_argnums=0,
        keep_unused=True,
    )
    inputs = tuple(
        spec
        for name, arg, s in zip(("state", *"bcd"), args, full, strict=False)
        for spec in array_specs(name, arg, s)
    )
    outputs = inputs[:state_count] + array_specs("metrics", shapes[1], replicated)
    return Module(
        stablehlo=bytecode(jitted.lower(*args)),
        mesh=mesh,
        platform="cpu",
        inputs=inputs,
        outputs=outputs,
        state_count=state_count,
    )


def bytecode(lowered: jax.stages.Lowered) -> bytes:
    file = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(file)
    return file.getvalue()


def attention_loss(params: dict, x: jax.Array, y: jax.Array, dtype=jnp.float32) -> jax.Array:
    """One attention layer and an MLP; the key bias has no gradient but rounding."""
    p = jax.tree.map(lambda a: a.astype(dtype), params)
    x = x.astype(dtype)
    q, k, v = (x @ p[n] + p["b" + n] for n in "qkv")

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:2], HEADS, -1)

    scores = jnp.einsum("bshk,bthk->bhst", split(q), split(k)) / 3
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), split(v)).reshape(x.shape)
    h = x + mixed
    h = h + jax.nn.gelu(h @ p["w1"]) @ p["w2"]
    return jnp.mean((h.astype(jnp.float32) - y) ** 2)


def init_state(seed: int = 0) -> dict:
    """Host values of params, adamw's moments, a count, a key and a flag."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)

    params = {n: normal(WIDTH, WIDTH) for n in "qkv"}
    params |= {"b" + n: np.zeros(WIDTH, np.float32) for n in "qkv"}
    params |= {"w1": normal(WIDTH, HIDDEN), "w2": normal(HIDDEN, WIDTH)}
    state = {
        "params": params,
        "opt": optimizer.init(params),
        "key": np.array([1, 2], np.uint32),
        "flag": np.array(True),
    }
    return jax.tree.map(np.asarray, state)


def make_batches(count: int = 2) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    shape = (BATCH, 4, WIDTH)
    pairs = rng.normal(size=(count, 2, *shape)).astype(np.float32)
    return [(x, y) for x, y in pairs]


def make_step(grad_fn: Callable | None = None, dtype=jnp.float32) -> Callable:
    """(state, x, y) -> (state, metrics), with adamw. `grad_fn(params, x, y)` may be a mutant's."""
    if grad_fn is None:
        grad_fn = jax.value_and_grad(lambda p, x, y: attention_loss(p, x, y, dtype))

    def step(state, x, y):
        loss, grads = grad_fn(state["params"], x, y)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = state["key"] * jnp.uint32(3) + jnp.uint32(1)
        new = {"params": params, "opt": opt, "key": key, "flag": ~state["flag"]}
        return new, {"loss": loss}

    return step


def train_module(
    mesh: MeshShape = (("data", 4), ("model", 2)),
    step: Callable | None = None,
    spec: P | None = None,
) -> Module:
    """The train step: batch over the first mesh axis, matrices FSDP x TP where the mesh has two."""
    live = make_mesh(mesh)
    state, batch = init_state(), make_batches(1)[0]
    names = [name for name, size in mesh if size > 1]

    def sharding(leaf: np.ndarray) -> NamedSharding:
        if spec is not None or leaf.ndim < 2 or not names:
            return NamedSharding(live, P())
        return NamedSharding(live, P(*names[:2]))

    shardings = (
        jax.tree.map(sharding, state),
        *(NamedSharding(live, P(*names[:1])) for _ in batch),
    )
    args = (state, *batch)
    return lower(step or make_step(), args, shardings, mesh, len(jax.tree.leaves(state)))


def stuck_module(mesh: MeshShape) -> Module:
    """A step of the same state and batch that never ends."""

    def step(state, x, y):
        spun = jax.lax.while_loop(lambda v: v > -1, lambda v: jnp.abs(jnp.sin(v)), jnp.max(x**2))
        return {**state, "flag": spun > 0}, {"loss": spun}

    return train_module(mesh, step=step, spec=P())


ONE: MeshShape = (("data", 1),)


def init_module(seed: int = 0) -> Module:
    """A module without inputs that makes `init_state(seed)` on one device."""
    state = init_state(seed)
    shardings = jax.tree.map(lambda _: NamedSharding(make_mesh(ONE), P()), state)
    make = jax.jit(lambda: jax.tree.map(jnp.asarray, state), out_shardings=shardings)
    outputs = array_specs("state", state, shardings)
    return Module(
        stablehlo=bytecode(make.lower()),
        mesh=(),
        platform="cpu",
        inputs=(),
        outputs=outputs,
        state_count=len(outputs),
    )
