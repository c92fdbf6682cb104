"""What pods are planned for: the Workloads of the models in `experiments.pod_sizes`.

Nothing is allocated: a Workload's init is only traced until a plan runs it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autoshard import Workload
from autoshard.integrations.flax import nnx_workload
from experiments.pod_sizes import POD_SIZES, PodSize
from models.decoder import Remat

Knobs = dict[str, tuple[str | int, ...]]


def task(name: str, **overrides: object) -> tuple[Callable[..., Workload], Knobs]:
    """The model_fn and the knobs of a model, for `autoshard.search(model_fn, mesh, knobs=knobs)`.

    Args:
      name: a key of `POD_SIZES`.
      **overrides: other sizes, such as `layers=4`, `scanned=False`, `batch_size=256`.

    Returns:
      model_fn(remat=..., accumulate=...) -> Workload, and each knob's values, the default first.
    """
    if name not in POD_SIZES:
        raise ValueError(f"unknown model {name!r}: expected one of {sorted(POD_SIZES)}")
    size = POD_SIZES[name].replace(**overrides)

    def model_fn(remat: Remat = size.model.remat, accumulate: int = size.accumulate) -> Workload:
        return workload(size.replace(remat=remat, accumulate=accumulate))

    return model_fn, {
        "remat": _first(size.model.remat, ("full", "dots", "none")),
        "accumulate": _first(size.accumulate, (1, 2, 4)),
    }


def workload(size: PodSize) -> Workload:
    """The train step of one size; the state holds float32 parameters and adamw's moments."""
    B, T, V = size.batch_size, size.model.sequence, size.model.vocab_size
    make_model, loss = size.build()
    return nnx_workload(
        make_model,
        loss,
        optax.adamw(size.learning_rate),
        jax.ShapeDtypeStruct((B, T + 1), jnp.int32),
        sample=lambda key: jax.random.randint(key, (B, T + 1), 0, V),
        accumulate=size.accumulate,
    )


def _first(default: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (default, *(value for value in values if value != default))
