"""Train steps of kinds that the zoo has not, as people write them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from autoshard.workload import Workload
from tests.programs import normal, sgd, shaped, train


def spectral() -> Workload:
    """A filter of complex numbers, the best of scores, sorted, summed over segments."""

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        turned = jnp.fft.rfft(x, axis=1) * params["filter"] * (2 - 1j)
        scores = jnp.fft.irfft(turned, n=32, axis=1) @ params["out"]
        _, best = jax.lax.top_k(scores.mean(-1), 8)
        picked = jnp.take_along_axis(scores, best[..., None], 1)
        ranked = jnp.cumsum(jnp.sort(picked, axis=1), axis=1)
        sums = jax.ops.segment_sum(ranked.reshape(-1, 24), batch["segments"], num_segments=16)
        return jnp.mean(sums**2)

    def init():
        table, out = normal(0, 64, 24), normal(1, 24, 24)
        return {"table": table, "filter": normal(2, 17, 24) + 0j, "out": out}

    def sample(key):
        tokens, segments = jax.random.split(key)
        return {
            "tokens": jax.random.randint(tokens, (16, 32), 0, 64),
            "segments": jnp.sort(jax.random.randint(segments, (128,), 0, 16)),
        }

    return train(loss, init, jax.eval_shape(sample, jax.random.key(0)), sample)


def second_order() -> Workload:
    """L-BFGS with a line search, on directions from conjugate gradients of the Hessian."""
    optimizer = optax.lbfgs(memory_size=3)

    def step(state, x):
        params, memory = state

        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)

        def damped(v):
            return jax.tree.map(jnp.add, v, jax.jvp(jax.grad(loss), (params,), (v,))[1])

        value, grads = jax.value_and_grad(loss)(params)
        towards, _ = jax.scipy.sparse.linalg.cg(damped, grads, maxiter=3)
        updates, memory = optimizer.update(
            towards, memory, params, value=value, grad=grads, value_fn=loss
        )
        return (optax.apply_updates(params, updates), memory), value

    def init():
        params = {"up": normal(0, 16, 48), "down": normal(1, 48, 16)}
        return params, optimizer.init(params)

    return Workload(step=step, init=init, batch=shaped(64, 16))


def whitened() -> Workload:
    """Statistics of gradients, their eigenvectors, Cholesky and QR; Newton and Schulz in a loop."""

    def orthogonal(g):
        def turn(_, x):
            a = x @ x.T
            return 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x

        return jax.lax.fori_loop(0, 5, turn, g / (jnp.linalg.norm(g) + 1e-6))

    def step(state, x):
        def loss(up, down):
            return jnp.mean((jax.nn.silu(x @ up) @ down - x) ** 2)

        value, (g_up, g_down) = jax.value_and_grad(loss, argnums=(0, 1))(state["up"], state["down"])
        seen = 0.95 * state["seen"] + g_up @ g_up.T
        sizes, vectors = jnp.linalg.eigh(seen + 1e-2 * jnp.diag(jnp.arange(16.0)))
        root = (vectors * jnp.abs(sizes + 0.1) ** -0.25) @ vectors.T
        basis, _ = jnp.linalg.qr(state["basis"] + 0.1 * seen)
        solved = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(seen + jnp.eye(16)), g_up)
        new = {
            "up": state["up"] - 0.01 * (root @ g_up + 0.1 * solved),
            "down": state["down"] - 0.01 * orthogonal(g_down),
            "seen": seen,
            "basis": basis,
        }
        return new, value

    def init():
        eyes = {"seen": jnp.eye(16), "basis": jnp.eye(16)}
        return {"up": normal(0, 16, 48), "down": normal(1, 48, 16), **eyes}

    return Workload(step=step, init=init, batch=shaped(64, 16))


def two_players() -> Workload:
    """A generator and what tells it apart take turns, each with an optimizer of its own."""
    optimizer = optax.adam(1e-3, b1=0.5)

    def network(params, x):
        return jax.nn.leaky_relu(x @ params[0]) @ params[1]

    def step(state, x):
        made, told, made_opt, told_opt, key, count = state
        key, drawn = jax.random.split(key)
        noise = jax.random.normal(drawn, (x.shape[0], 8))

        def told_loss(told):
            real, fake = network(told, x), network(told, network(made, noise))
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

        def made_loss(made):
            return jnp.mean(jax.nn.softplus(-network(told, network(made, noise))))

        def tell():
            value, grads = jax.value_and_grad(told_loss)(told)
            updates, opt = optimizer.update(grads, told_opt)
            return made, optax.apply_updates(told, updates), made_opt, opt, value

        def make():
            value, grads = jax.value_and_grad(made_loss)(made)
            updates, opt = optimizer.update(grads, made_opt)
            return optax.apply_updates(made, updates), told, opt, told_opt, value

        *new, value = jax.lax.cond(count % 2 == 0, tell, make)
        return (*new, key, count + 1), value

    def init():
        made = [normal(0, 8, 48), normal(1, 48, 16)]
        told = [normal(2, 16, 48), normal(3, 48, 1)]
        parts = made, told, optimizer.init(made), optimizer.init(told)
        return *parts, jax.random.key(0), jnp.zeros((), jnp.int32)

    return Workload(step=step, init=init, batch=shaped(64, 16))


def acting() -> Workload:
    """Acts in a world for some turns, sums what comes backwards, learns in minibatches."""
    turns, worlds = 8, 32

    def network(params, seen):
        hidden = jnp.tanh(seen @ params["in"])
        return jax.nn.log_softmax(hidden @ params["act"]), (hidden @ params["value"])[..., 0]

    def step(state, goal):
        params, world, key = state
        key, mixing, *keys = jax.random.split(key, turns + 2)

        def act(world, key):
            logits, value = network(params, world)
            action = jax.random.categorical(key, logits)
            reward = -jnp.mean((world - goal) ** 2, -1)
            said = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
            moved = 0.9 * world + jax.nn.one_hot(action, world.shape[1])
            return moved, (world, action, reward, value, said)

        def back(after, now):
            gain = now[0] + 0.95 * after - now[1]
            return gain + now[1], gain

        world, (seen, action, reward, value, said) = jax.lax.scan(act, world, jnp.stack(keys))
        _, gain = jax.lax.scan(back, network(params, world)[1], (reward, value), reverse=True)
        order = jax.random.permutation(mixing, turns * worlds)
        parts = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(4, -1, *x.shape[2:]),
            (seen, action, gain, gain + value, said),
        )

        def learn(params, part):
            def loss(params):
                seen, action, gain, wanted, before = part
                logits, value = network(params, seen)
                now = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
                ratio = jnp.exp(now - before)
                clipped = jnp.clip(ratio, 0.8, 1.2)
                gained = jnp.minimum(ratio * gain, clipped * gain)
                return jnp.mean((value - wanted) ** 2) - jnp.mean(gained)

            value, grads = jax.value_and_grad(loss)(params)
            return sgd(params, grads, 0.01), value

        params, losses = jax.lax.scan(learn, params, parts)
        return (params, world, key), losses.mean()

    def init():
        params = {"in": normal(0, 16, 48), "act": normal(1, 48, 16), "value": normal(2, 48, 1)}
        return params, jnp.zeros((worlds, 16)), jax.random.key(0)

    return Workload(step=step, init=init, batch=shaped(16))


def quantised() -> Workload:
    """Frozen layers of eight bits, integers with scales and floats; small factors are trained."""
    optimizer = optax.lion(1e-4)

    def step(state, x):
        def layer(h, arrays):
            whole, scales, eighth, first, second = arrays
            exact = jax.lax.dot(
                h.astype(jnp.bfloat16),
                whole.astype(jnp.bfloat16),
                preferred_element_type=jnp.float32,
            )
            coarse = h @ eighth.astype(jnp.float32)
            return h + jnp.tanh(exact * scales + coarse + (h @ first) @ second), None

        def loss(trained):
            frozen = (state["whole"], state["scales"], state["eighth"])
            h, _ = jax.lax.scan(layer, x, (*frozen, *trained))
            return jnp.mean((h - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state["trained"])
        updates, opt = optimizer.update(grads, state["opt"], state["trained"])
        trained = optax.apply_updates(state["trained"], updates)
        return {**state, "trained": trained, "opt": opt}, value

    def init():
        weights = normal(0, 3, 32, 32)
        scales = jnp.abs(weights).max(1, keepdims=True) / 127
        trained = normal(1, 3, 32, 4), normal(2, 3, 4, 32)
        return {
            "whole": jnp.round(weights / scales).astype(jnp.int8),
            "scales": scales,
            "eighth": (weights / 4).astype(jnp.float8_e4m3fn),
            "trained": trained,
            "opt": optimizer.init(trained),
        }

    return Workload(step=step, init=init, batch=shaped(64, 32))


def laplacian() -> Workload:
    """A differential equation: the Hessian of a network for each point, and its edge."""

    def loss(params, points):
        def value(point):
            return (jnp.sin(jnp.sin(point @ params["in"]) @ params["mid"]) @ params["out"])[0]

        bent = jax.vmap(lambda point: jnp.trace(jax.hessian(value)(point)))(points["inner"])
        wrong = bent + jnp.sin(points["inner"]).sum(-1)
        return jnp.mean(wrong**2) + jnp.mean(jax.vmap(value)(points["edge"]) ** 2)

    return train(
        loss,
        lambda: {"in": normal(0, 2, 32), "mid": normal(1, 32, 32), "out": normal(2, 32, 1)},
        {"inner": shaped(64, 2), "edge": shaped(32, 2)},
    )


def codebook() -> Workload:
    """Images of bytes, the nearest code of each patch straight through, codes by their means."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def step(state, images):
        x = images.astype(jnp.float32) / 255
        codes = state["codes"]

        def loss(params):
            z = jax.lax.conv_general_dilated(
                x, params["in"], (2, 2), "SAME", dimension_numbers=numbers
            )
            flat = z.reshape(-1, 16)
            apart = jnp.sum(flat**2, 1, keepdims=True) - 2 * flat @ codes.T + jnp.sum(codes**2, 1)
            nearest = jnp.argmin(apart, 1)
            chosen = codes[nearest].reshape(z.shape)
            through = z + jax.lax.stop_gradient(chosen - z)
            y = jax.lax.conv_transpose(
                through, params["out"], (2, 2), "SAME", dimension_numbers=numbers
            )
            kept = jnp.mean((z - jax.lax.stop_gradient(chosen)) ** 2)
            return jnp.mean((y - x) ** 2) + 0.25 * kept, (nearest, flat)

        (value, (nearest, flat)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        counts = jnp.zeros(24).at[nearest].add(1.0)
        sums = jnp.zeros((24, 16)).at[nearest].add(flat)
        means = sums / jnp.maximum(counts, 1)[:, None]
        new = {"params": sgd(state["params"], grads), "codes": 0.99 * codes + 0.01 * means}
        return new, {"loss": value, "used": jnp.sum(counts > 0)}

    def init():
        params = {"in": normal(0, 4, 4, 3, 16), "out": normal(1, 4, 4, 16, 3)}
        return {"params": params, "codes": normal(2, 24, 16)}

    def sample(key):
        return jax.random.randint(key, (16, 8, 8, 3), 0, 255).astype(jnp.uint8)

    batch = shaped(16, 8, 8, 3, dtype=jnp.uint8)
    return Workload(step=step, init=init, batch=batch, sample=sample)


OTHERS: dict[str, Callable[[], Workload]] = {
    f.__name__: f
    for f in (
        spectral,
        second_order,
        whitened,
        two_players,
        acting,
        quantised,
        laplacian,
        codebook,
    )
}
