"""Compiling for CPU in a tenth of the time, for programs that a test runs once or twice."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,  # gone in jax 0.12
}


@functools.cache
def known_options() -> dict[str, bool | int]:
    """Those of `OPTIONS` that this jax has."""
    trivial, known = jax.jit(lambda: 0).lower(), {}
    for name, value in OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            trivial.compile(compiler_options={name: value})
            known[name] = value
    return known


def compiled(function: Callable, *args: Any) -> Any:
    """`function`, jitted already or not, for `args`; collectives are those of a plain compile."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*args).compile(compiler_options=known_options())


def split(module_type: Callable[[Any], nnx.Module], config: Any) -> tuple[Any, Any]:
    """(graphdef, parameters) of a new module; `nnx.split(module_type(config))`, but sooner."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: module_type(config)))
    return graphdef, compiled(lambda: nnx.state(module_type(config)))()
