"""Does rung 1 rank layouts as the target's own compiler does?

Question: over a fixed-seed sample of layouts that fit, and rung 1's ten best, how far do rung 1 and
  rung 2 agree on predicted time (with and without the collective term both share) and on peak
  memory; what does rung 1 reject that fits; does it promote what is too large?
Command: python -m experiments.rung_agreement --model=llama3-8b --target=h100:8x8
         (needs pip install -e '.[train,cuda]', for TPUs '.[train,tpu]')
Cost: about 100 compiles by two workers: 15 minutes for GPUs on 2 cores; for TPUs 85 CPU-seconds
  each (Llama; Mixtral's take up to 300 s). What rung 2 says stands in <out>/<model>-<target>.jsonl,
  what was compiled in runs/rung_agreement: a run that was killed goes on, and after a change of the
  cost model the compiled programs are priced anew in minutes.
Expected: Kendall's tau at least 0.8 for time, at least 0.9 for memory; nothing wrongly rejected.

Up to half of the sample is drawn by Space.sample, a quarter by random walks of up to four decisions
from the baselines, the rest by such walks from the ten best, so that not all layouts are absurd.
Few of the first fit: after --most of a kind the next one fills up, the last to four times that.
None is left out for what rung 1 says of it, but for the bytes of its state alone. The ten best are
the fastest of those that fit, by rung 1's word, whether they do by rung 2's or not: what the
compiler refuses as too large is compared by the memory that it says it needs, and has no time.
"""

import functools
import itertools
import json
import pathlib
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

from autoshard import Budget
from autoshard.compat.compilers import compiler_version
from autoshard.compat.noise import start_jax
from autoshard.driver.compiling import Compiling
from autoshard.driver.ledger import Ledger
from autoshard.driver.propagating import propagate_all
from autoshard.host import machine
from autoshard.journal import Journal, opened
from autoshard.pricing import cost_model
from autoshard.subjects import make_subject, trace_all
from autoshard.target import find_target
from experiments import pod_sizes, pod_tasks
from experiments.agreement import MEASURES, Point, figures_of, summary, walk
from experiments.draws import Draws, fastest, uniform
from experiments.kept_compiles import KeptCompiles
from experiments.progress import progress_bar, show_on

_MODEL = flags.DEFINE_enum("model", "llama3-8b", sorted(pod_sizes.POD_SIZES), "The model.")
_TARGET = flags.DEFINE_string("target", "h100:8x8", "Hardware; autoshard.targets() lists chips.")
_BATCH = flags.DEFINE_integer("batch", 0, "Sequences in the global batch; 0 for the full size's.")
_REMAT = flags.DEFINE_list("remat", ["full", "dots"], "Remat policies to draw from.")
_FITTING = flags.DEFINE_integer("fitting", 40, "Fitting candidates to draw; even.")
_MOST = flags.DEFINE_integer("most", 48, "Most candidates of the first two kinds.")
_TOP = flags.DEFINE_integer("top", 10, "Rung 1's best, besides.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws and the search.")
_OUT = flags.DEFINE_string("out", "results/rung_agreement", "Folder of the results.")

_AT_ONCE = 8  # compiled between two looks at how many fit


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    start_jax()
    start = time.perf_counter()
    console = Console()
    folder = pathlib.Path(_OUT.value)
    target = find_target(_TARGET.value)
    full = pod_sizes.full_size(_MODEL.value, target.device_count)
    overrides = pod_sizes.differing(full, batch_size=_BATCH.value)
    name = pod_sizes.run_name(_MODEL.value, _TARGET.value, overrides)
    batch_size = full.replace(**overrides).batch_size
    model_fn, _ = pod_tasks.task(_MODEL.value, batch_size=batch_size)
    programs, _ = trace_all(model_fn, {"remat": tuple(_REMAT.value)}, False)
    run_folder = pathlib.Path("runs/rung_agreement").absolute() / name
    with opened(folder / f"{name}.jsonl") as journal, progress_bar(console) as progress:
        ledger = Ledger(
            subjects=[make_subject(p, target, "free", None) for p in programs],
            target=target,
            cost=cost_model(target),
            budget=Budget(
                candidates=250,
                compiles=2 * _MOST.value + _TOP.value,
                profiles=0,
                compile_seconds=1800.0,  # a slow machine says nothing of a layout
            ),
            journal=journal,
            callbacks=(show_on(progress),),
            seed=_SEED.value,
            limit_bytes=int(target.memory_bytes * 0.95),  # search's headroom
            folder=run_folder,
        )
        points, skipped = judged(ledger, run_folder / "compiled")
    if not any(p.fits for p in points):
        sys.exit(
            f"no layout of {_MODEL.value} that was drawn fits into a device of {_TARGET.value}:"
            f" {len(points)} were compiled, of {skipped} more the state alone is too large"
        )
    figures = {
        "model": _MODEL.value,
        "target": _TARGET.value,
        "batch_size": batch_size,
        "overrides": overrides,
        "limit_bytes": ledger.limit_bytes,
        **summary(points, ledger.limit_bytes, target.memory_bytes),
        "state_too_large": skipped,
        "seed": _SEED.value,
        "elapsed_s": time.perf_counter() - start,
        "compiler": compiler_version(target.lowering_platform),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "points": [figures_of(p) for p in points],
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    console.print(_table(figures))
    console.print(f"Figures in {path}.", highlight=False)


def judged(ledger: Ledger, folder: pathlib.Path) -> tuple[list[Point], int]:
    """Rung 1's best and the sample, compiled; and how many were left out for their state alone.

    Args:
      folder: what was compiled stays there, and is not compiled again.
    """
    compiled, ledger.journal = ledger.journal, Journal()  # rung 1 is asked anew every time
    propagate_all(ledger, None, 1.0)
    ledger.journal = compiled
    with KeptCompiles(folder) as compiles:
        compiling = Compiling(ledger, compiles)
        top = fastest(ledger, _TOP.value)
        compiling.compile(top, 1.0)
        points = _points("top", top, ledger)
        draws = Draws(ledger, {ledger.rows[i].program for i in top})
        best = [ledger.rows[i].candidate for i in top]
        fitting = 0
        for group, draw, wanted, most in (
            ("uniform", uniform, _FITTING.value // 2, _MOST.value),
            ("baselines", functools.partial(walk, ()), _FITTING.value * 3 // 4, _MOST.value),
            ("best", functools.partial(walk, best), _FITTING.value, 4 * _MOST.value),
        ):
            rows = draws.rows(draw)
            drawn: list[int] = []
            while len(drawn) < most and fitting + len(ledger.fitting(drawn)) < wanted:
                if not (some := list(itertools.islice(rows, _AT_ONCE))):
                    break  # the space has no others
                compiling.compile(some, 1.0)
                drawn += some
            fitting += len(ledger.fitting(drawn))
            points += _points(group, drawn, ledger)
    return points, draws.skipped


def _points(group: str, rows: Sequence[int], ledger: Ledger) -> list[Point]:
    fitting = set(ledger.fitting(rows))
    return [Point(group=group, row=ledger.rows[i], fits=i in fitting) for i in rows]


def _table(figures: dict[str, Any]) -> Table:
    table = Table(
        title=f"rung 1 against rung 2, {figures['model']} on {figures['target']}:"
        f" {figures['compared']} layouts"
    )
    for head in ("of", "Kendall's tau", "95 %", "rung 1 / rung 2: least", "median", "most"):
        table.add_column(head)
    for measure in MEASURES:
        found, ratios = figures[f"tau_{measure}"], figures["ratios"].get(measure)
        table.add_row(
            measure,
            f"{found['tau']:.3f}",
            f"{found['low']:.3f} to {found['high']:.3f}",
            *(f"{ratios[q]:.2f}" if ratios else "-" for q in ("least", "median", "most")),
        )
    table.caption = (
        f"{figures['compiled']} compiled, {figures['fitting']} of the sample fit,"
        f" {figures['failed']} failed; rung 1 wrongly rejected {figures['wrongly_rejected']} of"
        f" {figures['rejected']}; of its best {figures['top_too_large']} do not fit,"
        f" {figures['without_time']} have no time by rung 2,"
        f" {figures['without_memory']} of them no memory"
    )
    return table


if __name__ == "__main__":
    app.run(main)
