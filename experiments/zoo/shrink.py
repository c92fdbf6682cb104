"""The one rule by which published configurations become small enough to measure, for every model.

With a factor k, of each configuration

- every width and every extent is divided by k,
- every depth too, but a stack of layers keeps at least two, so that it remains a stack,
- the rows of every table are divided by k^2, as the pairs of two widths are,

rounded up: widths and extents to a multiple of what 8 devices can share of the published size (the
greatest common divisor of it and 8), the rows of a table to a multiple of 8 where they are 8 or
more (vocabularies and tables are padded anyway), and all to what the model itself demands. What is
a share of another size stays that share. Everything else is structure and stays, but arithmetic is
float32, as a CPU has no other: the published dtype is of the published hardware.

k is the smallest power of two, 4 or more, for which a train step of the fewest examples, 8, costs
at most 16 GFLOP. The batch is then the largest power of two, at most the published batch, for
which a step does. An example is what the data count: an image, a text, a click, a graph (whose
nodes are its extent).

A step's cost is that of its matmuls and convolutions in its jaxpr, loops by their length. What
else it does is not counted, and is more than that in some models: lookups of tables, the sums over
edges, the associative scan, norms.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax

from autoshard import Workload
from experiments.zoo.published import Published, Size

LIMIT_FLOP = 16e9  # of a step
LEAST_FACTOR = 4
LEAST_BATCH = 8  # an example for each of 8 devices
DEVICES = 8  # that may share a size


def shrunk(published: Published, factor: int) -> Any:
    """The published configuration, `factor` times smaller; the rule above, but for the batch."""
    config = published.config
    if getattr(config, "dtype", "float32") != "float32":
        config = dataclasses.replace(config, dtype="float32")
    changed = {}
    for field, size in published.sizes.items():
        value = operator.attrgetter(field)(config)
        if not size.share_of:
            changed[field] = (
                tuple(smaller(v, size, factor) for v in value)
                if isinstance(value, tuple)
                else smaller(value, size, factor)
            )
    for field, size in published.sizes.items():
        if size.share_of:
            whole = operator.attrgetter(size.share_of)(config)
            value = operator.attrgetter(field)(config)
            changed[field], rest = divmod(value * changed[size.share_of], whole)
            if rest:
                raise ValueError(f"{field}={value} is no whole share of {size.share_of}={whole}")
    return _replaced(config, changed)


def smaller(value: int, size: Size, factor: int) -> int:
    """One number, by the rule.

    >>> smaller(1500, Size(kind="width"), 4), smaller(36, Size(kind="depth"), 4)
    (376, 9)
    """
    if size.kind == "depth":
        return max(-(-value // factor), min(value, 2))
    divisor = factor**2 if size.kind == "rows" else factor
    few = max(-(-value // divisor), size.least)
    shared = math.gcd(value, DEVICES)
    if size.kind == "rows":
        shared = DEVICES if few >= DEVICES else 1
    multiple = math.lcm(shared, size.multiple)
    return -(-few // multiple) * multiple


def _replaced(config: Any, changed: dict[str, Any]) -> Any:
    """`config` with other values for some fields; `a.b` is field b of what field a holds."""
    own = {field: value for field, value in changed.items() if "." not in field}
    for name in {field.split(".")[0] for field in changed} - set(own):
        inner = {
            field.removeprefix(name + "."): value
            for field, value in changed.items()
            if field.startswith(name + ".")
        }
        own[name] = _replaced(getattr(config, name), inner)
    return dataclasses.replace(config, **own)


def choose(published: Published, flop: Callable[[Any, int], float]) -> tuple[int, int]:
    """The factor and the batch size.

    Args:
      flop: (configuration, examples) -> FLOP of a train step; grows with both.

    Raises:
      ValueError: a step of the smallest model possible costs too much.
    """
    flop = functools.cache(flop)
    factor = LEAST_FACTOR
    while flop(config := shrunk(published, factor), LEAST_BATCH) > LIMIT_FLOP:
        factor *= 2
        if shrunk(published, factor) == config:
            raise ValueError(
                f"{config} costs more than {LIMIT_FLOP:.0f} FLOP at {LEAST_BATCH} examples, and "
                f"gets no smaller with a factor of {factor}"
            )
    batch_size = LEAST_BATCH
    while 2 * batch_size <= published.batch_size and flop(config, 2 * batch_size) <= LIMIT_FLOP:
        batch_size *= 2
    return factor, batch_size


def step_flop(workload: Workload) -> float:
    """FLOP of the matmuls and convolutions of a train step; allocates nothing."""
    state = jax.eval_shape(workload.init)
    return jaxpr_flop(jax.make_jaxpr(workload.step)(state, workload.batch).jaxpr)


def jaxpr_flop(jaxpr: Any) -> float:
    """FLOP of the matmuls and convolutions, two for each product that is added.

    A loop of unknown length counts once, the costliest branch of a choice alone. The zeros that a
    strided convolution's gradient puts between its inputs do not count, those at its edges do.
    """
    return sum(_equation_flop(equation) for equation in jaxpr.eqns)


def _equation_flop(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        zeros = math.prod(params["lhs_dilation"])
        return 2 * equation.outvars[0].aval.size * kernel.size / outputs / zeros
    inner = [jaxpr_flop(jaxpr) for value in params.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs in a parameter of an equation, without their constants."""
    if isinstance(value, tuple | list):
        return [jaxpr for each in value for jaxpr in _jaxprs(each)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
