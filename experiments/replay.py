"""How well does a model of cost rank and predict programs that were measured before?

Question: over 34 cases with 1,885 measured programs (`experiments.samples`): Kendall's tau with the
  measured times over its noise ceiling; how often the first 16 by the model hold a program within
  1 % of the fastest; the median error of predicted times with two fitted factors for each case
  (`experiments.ranks` defines all three).
Command: python -m experiments.replay --model=rung2 --model=roofline
         the current rung 1: python -m experiments.replay --model=rung1_now
         a part: python -m experiments.replay --model=rung1_now --case=vit-4,mlp-8 --layouts=12
         a check that must fall: python -m experiments.replay --model=rung1_now --zero_bytes
Cost: seconds for what is stored. For `rung1_now` 8 minutes of one core for all layouts (4 minutes
  on 2 quiet cores), 3 minutes of one core for 12 layouts of each case.
Expected: tau over its ceiling, median (least); the best among the first 16; the error:
  rung1 0.943 (0.83), 27 of 34, 4.6 %; rung2 0.965 (0.81), 27 of 34, 3.7 %;
  roofline 0.975 (0.80), 28 of 34, 3.7 %; without bytes 0.821 (0.38), 28 of 34, 8.1 %.
  The current rung 1: goal 0.90 in the median, least 0.85.

`rung1` and `rung2` are the predictions that the samples came with. `roofline` is one line of
arithmetic on the stored counts of rung 2. `rung1_now` traces the models of the zoo and asks the
rung 1 of this checkout about the stored layouts.
"""

import functools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence

from absl import app, flags

from experiments import samples
from experiments.ranks import FIRST, Figures, Parts, figures
from experiments.samples import Sample

_NOW = "rung1_now"
_MODELS = (*samples.STORED, _NOW)

_MODEL = flags.DEFINE_multi_enum("model", list(samples.STORED), _MODELS, "Models of cost.")
_CASE = flags.DEFINE_list("case", [], "Samples such as vit-8; all if empty.")
_LAYOUTS = flags.DEFINE_integer(
    "layouts", 0, "Layouts of each case, evenly spread over the measured ranking; 0 for all."
)
_ZERO_BYTES = flags.DEFINE_bool(
    "zero_bytes", False, "Bytes cost no time: memory, and collectives with rung1_now."
)
_EACH = flags.DEFINE_bool("each", False, "Print a row for each case, too.")
_PROCESSES = flags.DEFINE_integer("processes", 2, "Processes that ask the current rung 1.")


def predicted(model: str, chosen: Sequence[Sample]) -> Iterator[Sequence[Parts]]:
    """Predictions of a model, sample by sample."""
    if model == _NOW:
        from experiments import rung1_now  # imports the models of the zoo

        yield from rung1_now.in_processes(chosen, _ZERO_BYTES.value, _PROCESSES.value)
        return
    predict = samples.STORED[model]
    if _ZERO_BYTES.value:
        if model != "roofline":
            raise app.UsageError(f"--zero_bytes cannot change the stored predictions of {model}")
        predict = functools.partial(samples.roofline, zero_bytes=True)
    for sample in chosen:
        yield [predict(sample.constants, program) for program in sample.programs]


def row(head: str, share: str, first: str, error: float) -> str:
    return f"{head:28} {share:>18} {first:>12} {100 * error:8.1f} %"


def summary(model: str, found: Sequence[Figures], elapsed_s: float) -> str:
    """The figures over all cases; of the best of the first only where there are more programs."""
    shares = [one.share for one in found]
    ranked = [one for one in found if one.count > FIRST]
    figures_row = row(
        model,
        f"{statistics.median(shares):.3f} ({min(shares):.2f})",
        f"{sum(one.finds_best for one in ranked)} of {len(ranked)}",
        statistics.median(one.error for one in found),
    )
    return f"{figures_row} {elapsed_s:8.0f} s"


def each(chosen: Iterable[Sample], found: Iterable[Figures]) -> Iterator[str]:
    """One row for each case: tau / ceiling, whether the first 16 hold the best, the error."""
    for sample, one in zip(chosen, found, strict=True):
        share = f"{one.tau:.3f}/{one.ceiling:.3f}={one.share:.3f}"
        best = "-" if one.count <= FIRST else "yes" if one.finds_best else "no"
        yield row(f"  {sample.name} ({one.count})", share, best, one.error)


def main(argv: list[str]) -> None:
    del argv
    try:
        chosen = [sample.thinned(_LAYOUTS.value) for sample in samples.load(_CASE.value)]
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    logs = [sample.logs_PR() for sample in chosen]
    heads = ("model", "tau/ceiling (min)", f"first {FIRST}", "error", "time")
    print("{:28} {:>18} {:>12} {:>10} {:>10}".format(*heads))
    for model in _MODEL.value:
        start = time.monotonic()
        parts = list(predicted(model, chosen))
        elapsed_s = time.monotonic() - start
        found = [figures(one, logs_PR) for one, logs_PR in zip(parts, logs, strict=True)]
        for line in [
            summary(model, found, elapsed_s),
            *(each(chosen, found) if _EACH.value else ()),
        ]:
            print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
