"""Work to be timed: on the shared cores of a fake mesh, and on an accelerator.

What an accelerator does in microseconds drowns in the dispatch of the program. There each probe
grows until it takes a millisecond; products are of a size at which chips come near their peak, and
copies far larger than any cache.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Run = Callable[[], object]
"""One execution of a program, waited for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A program, and what one device does in it: operations, or bytes read and written."""

    run: Run
    amount: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How large the probes of an accelerator are.

    Attributes:
      floor_s: what a program must take beyond an empty one, seconds.
      side: of the square matrices that are multiplied.
      elements: of the array that elementwise operations go over.
      copy_bytes: the least that is copied.
      repeats: at most so many products, or rounds of elementwise operations, in one program.
    """

    floor_s: float = 1e-3
    side: int = 8192
    elements: int = 1 << 24
    copy_bytes: int = 256 << 20
    repeats: int = 128


def program(
    function: Callable[[jax.Array], jax.Array],
    mesh: Mesh,
    *shape: int,
    dtype: str = "float32",
    scale: float | None = None,
    in_place: bool = False,
) -> Run:
    """A program on an array of this shape on each device; the array has the devices in front.

    Args:
      scale: of random normal numbers, which switch as many transistors as real data do; None fills
        the array with 0.5.
      in_place: each run overwrites the array and leaves it to the next run. No run waits for the
        pages of a new array.
    """
    over = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    whole = (mesh.size, *shape)

    def filled() -> jax.Array:
        if scale is None:
            return jnp.full(whole, 0.5, dtype)
        return (jax.random.normal(jax.random.key(0), whole, jnp.float32) * scale).astype(dtype)

    array = jax.jit(filled, out_shardings=over)()
    donated = (0,) if in_place else ()
    compiled = jax.jit(function, out_shardings=over, donate_argnums=donated).lower(array).compile()

    def run() -> object:
        nonlocal array
        result = jax.block_until_ready(compiled(array))
        if in_place:
            array = result
        return result

    return run


def on_host(mesh: Mesh) -> dict[str, Probe]:
    """Probes of the cores that the devices of a fake mesh share: "product" and "elements"."""
    side, width = 384, 1 << 18
    return {
        "product": Probe(run=program(_products(1), mesh, side, side), amount=2.0 * side**3),
        "elements": Probe(run=program(_elements(1), mesh, width), amount=7.0 * width),
    }


def on_accelerator(
    mesh: Mesh, memory_bytes: int, idle_s: float, effort: Effort | None = None
) -> dict[str, Probe]:
    """Probes of one accelerator of a mesh, all of which work at once.

    Args:
      memory_bytes: of one device; no probe takes more than about a quarter of it.
      idle_s: seconds of an empty program.

    Returns:
      Products "product bf16" and "product f32", "elements" and "copy".
    """
    effort = effort or Effort()
    floor_s = idle_s + effort.floor_s
    found = {}
    for name, dtype, itemsize in (("bf16", "bfloat16", 2), ("f32", "float32", 4)):
        side = effort.side
        while 4 * itemsize * side**2 > memory_bytes // 4:
            side //= 2

        def multiply(times: int, side: int = side, dtype: str = dtype) -> Run:
            # So scaled, each product has numbers of the size of the last one's.
            return program(_products(times), mesh, side, side, dtype=dtype, scale=side**-0.5)

        times, run = grown(multiply, 1, effort.repeats, floor_s)
        found[f"product {name}"] = Probe(run=run, amount=times * 2.0 * side**3)
    count = fitting(effort.elements, 8, memory_bytes // 4)
    times, run = grown(
        lambda times: program(_elements(times), mesh, count), 1, effort.repeats, floor_s
    )
    found["elements"] = Probe(run=run, amount=times * 7.0 * count)
    width = fitting(effort.copy_bytes // 4, 8, memory_bytes // 4)
    width, run = grown(
        lambda width: program(lambda x: x * 1.5, mesh, width), width, memory_bytes // 32, floor_s
    )
    found["copy"] = Probe(run=run, amount=8.0 * width)
    return found


def grown(
    make: Callable[[int], Run],
    start: int,
    most: int,
    floor_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, Run]:
    """The first of the sizes start, 2 start, 4 start... whose program takes `floor_s`, and it.

    Where none up to `most` does, the last of them; `start` at least.
    """
    size = start
    while True:
        run = make(size)
        run()
        seconds = []
        for _ in range(3):  # one that was held up would end the growth too soon
            begun = clock()
            run()
            seconds.append(clock() - begun)
        if min(seconds) >= floor_s or 2 * size > most:
            return size, run
        size *= 2


def fitting(count: int, bytes_each: int, limit_bytes: int) -> int:
    """`count`, halved until so many take no more than `limit_bytes`; 1 at least."""
    while count > 1 and count * bytes_each > limit_bytes:
        count //= 2
    return count


def _products(times: int) -> Callable[[jax.Array], jax.Array]:
    """A chain of products, each of the last with the first operand."""

    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(times):
            y = jnp.einsum("nij,njk->nik", y, x)
        return y

    return chain


def _elements(times: int) -> Callable[[jax.Array], jax.Array]:
    """Seven operations on each element, `times` over; two of them transcendental."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = jnp.tanh(x * 0.5 + 1.0) * x + jnp.exp(-x)
        return x

    return chain
