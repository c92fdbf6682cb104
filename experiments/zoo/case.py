"""Case: a model with its data and its optimizer, whatever it is written in."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.integrations.flax import linen_workload, nnx_workload

Kind = Literal["nnx", "linen", "plain"]

PROBED = 8  # examples from which the shape of a batch is learnt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its data and its optimizer, ready to search, to train and to lay out by hand.

    Attributes:
      name: key of the table of cases, such as "vit".
      family: cases of one family are left out together when the model of cost is calibrated.
      kind: what the model is written in: Flax NNX, Flax Linen, or functions of a dict of arrays.
      config: the model's own dataclass, at the scale that was asked for.
      batch_size: examples of the global batch.
      make_model: () -> nnx.Module; (constrain=...) -> linen.Module; for "plain" () -> parameters.
      loss: nnx (model, batch, constrain=...) -> (scalar, metrics); linen (apply, batch) -> the
        same; plain (params, batch, constrain=...) -> scalar.
      optimizer: for "plain" what its `step` does itself.
      make_batch: (seed, examples) -> batch, a pytree of numpy arrays whose first dimensions are
        in proportion to the examples.
      inputs: linen alone: batch -> positional arguments of `init`.
      step: plain alone: (params, batch) -> (new params, metrics).
    """

    name: str
    family: str
    kind: Kind
    config: Any
    batch_size: int
    make_model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    make_batch: Callable[[int, int], Any]
    inputs: Callable[[Any], tuple[Any, ...]] | None = None
    step: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def sample(self, seed: int) -> Any:
        """A global batch of real values; same seed, same batch."""
        return self.make_batch(seed, self.batch_size)

    def batch(self) -> Any:
        """The global batch as `jax.ShapeDtypeStruct`s; only `PROBED` examples are made."""

        def scaled(x: np.ndarray) -> jax.ShapeDtypeStruct:
            rows, rest = divmod(len(x) * self.batch_size, PROBED)
            assert not rest, f"{len(x)} rows of {PROBED} examples"
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        return jax.tree.map(scaled, self.make_batch(0, PROBED))

    def workload(self) -> autoshard.Workload:
        """The train step for `autoshard.search`; says nothing about how to shard it."""
        if self.kind == "plain":
            assert self.step is not None
            return autoshard.Workload(
                step=self.step, init=self.make_model, batch=self.batch(), sample=self._of_key
            )
        if self.kind == "linen":
            assert self.inputs is not None
            return linen_workload(
                self.make_model(),
                self.loss,
                self.optimizer,
                self.batch(),
                inputs=self.inputs,
                sample=self._of_key,
            )
        return nnx_workload(
            self.make_model, self.loss, self.optimizer, self.batch(), sample=self._of_key
        )

    def _of_key(self, key: jax.Array) -> Any:
        return self.sample(seed_of(key))


def seed_of(key: jax.Array) -> int:
    """A seed for numpy from a JAX key, typed or raw, that a Workload's `sample` is given."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return int(np.asarray(jax.random.key_data(key) if typed else key).ravel()[-1])
