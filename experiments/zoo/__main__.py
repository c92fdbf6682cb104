"""What does the shrink rule make of each published model?

Question: the sizes, factor, batch, FLOP and parameters of each case at the scale "shrunk".
Command: python -m experiments.zoo [case ...]
Cost: about two minutes, tracing alone.
Expected: "as recorded" in every row; else `SHRUNK` in `experiments/zoo/cases.py` is out of date.
"""

import functools
import math
import operator
import sys

import jax
from rich.console import Console
from rich.table import Table

from experiments.zoo.cases import CASES, SHRUNK, of_size
from experiments.zoo.published import PUBLISHED
from experiments.zoo.shrink import choose, shrunk, step_flop


def main() -> None:
    table = Table("case", "published -> shrunk", "k", "batch", "GFLOP", "parameters", "recorded")
    for name in sys.argv[1:] or CASES:
        published = PUBLISHED[name]
        flop = functools.cache(
            lambda config, examples, name=name: step_flop(
                of_size(name, config, examples).workload()
            )
        )
        factor, batch_size = choose(published, flop)
        config = shrunk(published, factor)
        pairs = [
            (field, *(operator.attrgetter(field)(c) for c in (published.config, config)))
            for field in published.sizes
        ]
        sizes = ", ".join(f"{field} {old} -> {new}" for field, old, new in pairs)
        kept = SHRUNK.get(name) == (factor, batch_size)
        table.add_row(
            name,
            sizes,
            str(factor),
            f"{published.batch_size} -> {batch_size}",
            f"{flop(config, batch_size) / 1e9:.2f}",
            f"{parameters(name, config, batch_size):,}",
            "as recorded" if kept else f"now {(factor, batch_size)}",
        )
        print(f"{name}: {(factor, batch_size)}", file=sys.stderr)
    Console(width=160).print(table)


def parameters(name: str, config: object, batch_size: int) -> int:
    """Numbers that are trained."""
    state = jax.eval_shape(of_size(name, config, batch_size).workload().init)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(getattr(state, "params", state)))


if __name__ == "__main__":
    main()
