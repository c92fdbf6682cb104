"""The whole path on Flax modules: search, plan, train, evaluate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import autoshard
from autoshard.integrations.flax import linen_workload, nnx_model, nnx_workload
from autoshard.records.trial import Measurement
from models import decoder

CONFIG = decoder.DecoderConfig(
    vocab_size=64, d_model=32, heads=4, kv_heads=2, head_dim=8, mlp_dim=64, layers=2, sequence=16
)
BUDGET = autoshard.Budget(candidates=40, compiles=7, profiles=6, rounds=6)


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (16, 17), dtype=np.int32)


def decoder_fn(remat: str = "none", accumulate: int = 1) -> autoshard.Workload:
    import dataclasses

    config = dataclasses.replace(CONFIG, remat=remat)
    return nnx_workload(
        lambda: decoder.Decoder(config),
        decoder.loss,
        optax.adamw(3e-3),
        jax.ShapeDtypeStruct((16, 17), np.int32),
        sample=lambda key: tokens(int(jax.random.key_data(key)[-1])),
        accumulate=accumulate,
    )


@pytest.mark.slow
def test_nnx_search_with_knobs_trains(calibration):
    plan = autoshard.search(
        decoder_fn,
        jax.devices(),
        knobs={"remat": ("none", "full"), "accumulate": (1, 2)},
        budget=autoshard.Budget(candidates=24, compiles=4, profiles=3, rounds=4),
        calibration=calibration,
    )
    tried = {t.candidate.knobs for t in plan.evidence.trials}
    assert len(tried) == 4, "every combination of knobs is searched"
    assert isinstance(plan.trial.profiled, Measurement)
    assert plan.trial.profiled.numerics == "exact"
    state = plan.init()
    batch = plan.put(tokens(1))
    losses = []
    for _ in range(8):
        state, metrics = plan.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    held_out = plan.jit(
        lambda state, batch: decoder.loss(nnx_model(state, lambda: decoder.Decoder(CONFIG)), batch)[
            0
        ]
    )
    assert np.isfinite(float(held_out(state, tokens(2))))


class Linen(nn.Module):
    """Two Dense layers whose parameters carry logical axis names."""

    @nn.compact
    def __call__(self, x):
        def dense(width, names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(width, kernel_init=init, use_bias=False)

        return dense(32, ("mlp", "embed"))(nn.gelu(dense(128, ("embed", "mlp"))(x)))


def linen_fn() -> autoshard.Workload:
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    return linen_workload(
        Linen(),
        lambda apply, batch: (jnp.mean((apply(batch) - batch) ** 2), {}),
        optax.sgd(0.1, momentum=0.9),
        x,
        inputs=lambda batch: (batch,),
    )


def test_linen_search_speaks_the_models_own_axis_names(calibration):
    plan = autoshard.search(linen_fn, jax.devices(), budget=BUDGET, calibration=calibration)
    names = {name for name, _, _ in plan.evidence.axes}
    assert {"batch", "mlp", "embed"} <= names
    assert "mlp" in str(plan)
    state = plan.init()
    batch = plan.put(np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32))
    state, first = plan.step(state, batch)
    for _ in range(20):
        state, last = plan.step(state, batch)
    assert float(last["loss"]) < float(first["loss"])
