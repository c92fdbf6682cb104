"""Is what is predicted for a GPU that is not here what a GPU that is here takes?

Question: the step time that rung 2 predicts without the device, over the time measured on it, for
  programs of one GPU; and how far the catalogue's figures are from what the device does.
Command: scripts/gpu_check   (on a machine with an NVIDIA GPU of the catalogue)
Cost: about 25 s for most programs, 95 s for the largest; the larger part is compiling.
Expected: predicted / measured between 0.5 and 1.2 for each program (a roofline at nominal peaks
  does not model the losses of kernels); the catalogue's rates above the measured ones.

Writes results/gpu_check/<chip>.json, and in the run folder hardware.toml: the catalogue's entry
with the measured rates in it, for `autoshard.search(..., hardware=...)`.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard.compat.xla.compilers import compiler_version
from autoshard.records.atomic_files import write_atomically
from autoshard.records.trial import Estimate, Measurement
from autoshard.records.words import mebibytes, seconds
from autoshard.rungs.compile.job import CompileRequest
from autoshard.rungs.profile.calibration_files import calibrated
from autoshard.target.catalogue import Chip
from autoshard.target.cost import Constants
from autoshard.target.live_chips import chip_of_kind
from autoshard.target.target import find_target
from experiments import sizes, tasks
from experiments.zoo.cases import of_size
from experiments.zoo.published import PUBLISHED

_RUN = flags.DEFINE_string("run", "runs/gpu_check", "Run folder.")
_PROGRAMS = flags.DEFINE_list("programs", [], "Which programs; default all.")
_OUT = flags.DEFINE_string("out", "results/gpu_check", "Folder of the figures.")

_DECODERS: dict[str, dict[str, Any]] = {
    # Widths at which a single GPU has work; the shapes are otherwise those of scripts/tune.
    "decoder d=1024": {"batch": 16, "d_model": 1024, "heads": 16, "head_dim": 64},
    "decoder d=2048": {"batch": 8, "d_model": 2048, "heads": 16, "head_dim": 128},
}
_LAYERS, _KV_HEADS, _SEQUENCE = 8, 8, 1024

_PUBLISHED = {
    # Configurations as published, and their batch or what one GPU takes of it.
    "mlp": 512,
    "recurrent": 20,
    "graph_network": 128,
    "recommender": 128,
    "resnet50": 256,
    "unet": 128,
    "vit": 128,
    "clip": 256,
    "encoder_decoder": 32,
}
_ROUNDS = 20


def main(argv: list[str]) -> None:
    del argv
    console = Console()
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        sys.exit(f"no GPU here, nothing to compare with: {str(error).splitlines()[0]}")
    chip = chip_of(device.device_kind)
    chosen = programs()
    asked = _PROGRAMS.value or list(chosen)
    if unknown := sorted(set(asked) - set(chosen)):
        sys.exit(f"--programs: got {unknown}, expected some of {list(chosen)}")
    run = pathlib.Path(_RUN.value)
    run.mkdir(parents=True, exist_ok=True)
    measured = measured_rates(calibrated(find_target([device]), run))
    (run / "hardware.toml").write_text(corrected(chip, measured), encoding="utf-8")
    seen_with = {
        "device": device.device_kind,
        "compiler": compiler_version("cuda"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    rates = {k: {"measured": v, "catalogue": _listed(chip, k)} for k, v in measured.items()}
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chip.name}.json"
    for name in asked:
        begin = time.perf_counter()
        try:
            rows = compared(name, chosen[name], device, chip, run)
        except autoshard.NoPlanError as error:
            rows = [{"program": name, "failed": str(error)}]
            console.print(f"{name}: {error}", markup=False)
        head = {"chip": chip.name, "rates": rates}
        keep_rows(path, head, [{**row, **seen_with} for row in rows])
        console.print(f"{name}: {time.perf_counter() - begin:.0f} s")
    console.print(_table([row for row in kept_rows(path) if "failed" not in row]))
    for name, value in measured.items():
        listed = _listed(chip, name)
        console.print(
            f"{name}: measured {value:.3g}, catalogue {listed:.3g} ({value / listed:.2f})"
        )
    console.print(
        f"Figures in {path}; the corrected catalogue entry in {run / 'hardware.toml'}.",
        markup=False,
    )


def compared(
    name: str,
    model_fn: Callable[..., autoshard.Workload],
    device: jax.Device,
    chip: Chip,
    run: pathlib.Path,
) -> list[dict[str, Any]]:
    """A program's rows: as predicted by the catalogue's figures, and by measured rates.

    Raises:
      NoPlanError: it does not fit, a compiler refuses it, or it cannot be measured.
    """
    budget = autoshard.Budget(candidates=4, compiles=1)
    predicted = {}
    with Once() as once:
        for source, hardware in (("catalogue", None), ("measured rates", run / "hardware.toml")):
            predicted[source] = autoshard.search(
                model_fn, f"{chip.name}:1x1", budget=budget, hardware=hardware, executor=once
            )
    here = autoshard.search(
        model_fn,
        [device],
        budget=dataclasses.replace(budget, profiles=1, rounds=_ROUNDS),
        calibration=run,
    )
    if here.trial is None or not isinstance(here.trial.profiled, Measurement):
        raise autoshard.NoPlanError(f"nothing was measured: {'; '.join(here.evidence.notes)}")
    return [_row(name, source, there, here) for source, there in predicted.items()]


class Once(concurrent.futures.ThreadPoolExecutor):
    """Compiles each module once; a second search prices the same program by other rates."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._answers: dict[bytes, concurrent.futures.Future[Any]] = {}

    def submit(  # type: ignore[override]  # of the functions it takes those of a compile request
        self, fn: Callable[[CompileRequest], Any], request: CompileRequest, /
    ) -> concurrent.futures.Future[Any]:
        key = request.module.stablehlo
        if key not in self._answers:
            self._answers[key] = super().submit(fn, request)
        return self._answers[key]


def keep_rows(path: pathlib.Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the rows of a program in place of its earlier rows; other programs' rows stay."""
    names = {row["program"] for row in rows}
    others = [row for row in kept_rows(path) if row["program"] not in names]
    figures = {**head, "programs": [*others, *rows]}
    text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
    write_atomically(path, text.encode(), sync=True)


def kept_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """All rows of a file; [] where there is none."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["programs"]
    return rows


def chip_of(device_kind: str) -> Chip:
    """The catalogue's entry of a live device.

    Raises:
      SystemExit: there is none.
    """
    chip = chip_of_kind(device_kind)
    if chip is None:
        sys.exit(f"{device_kind!r} is not in the catalogue; docs/targets.md says how to add it")
    return chip


def programs() -> dict[str, Callable[..., autoshard.Workload]]:
    """Train steps of one device: name -> model_fn."""
    found: dict[str, Callable[..., autoshard.Workload]] = {}
    for name, shape in _DECODERS.items():
        widths = {field: n for field, n in shape.items() if field != "batch"}
        model = dataclasses.replace(
            sizes.DECODER.model,
            **widths,
            kv_heads=_KV_HEADS,
            mlp_dim=4 * widths["d_model"],
            layers=_LAYERS,
            sequence=_SEQUENCE,
        )
        size = dataclasses.replace(sizes.DECODER, model=model, batch_size=shape["batch"])
        found[name] = tasks.decoder_task(size).model_fn
    for name, batch in _PUBLISHED.items():
        found[name] = of_size(name, PUBLISHED[name].config, batch).workload
    return found


def measured_rates(constants: Constants) -> dict[str, float]:
    """What a calibration measured, by the names of the catalogue's fields."""
    by_dtype = dict(constants.contract_by_dtype)
    return {
        "flops.bf16": by_dtype["bf16"],
        "flops.f32": by_dtype["f32"],
        "element_flops": constants.element_flops_per_s,
        "memory_bandwidth": constants.bandwidth_bytes_per_s,
        "launch_s": constants.launch_s,
    }


def corrected(chip: Chip, measured: dict[str, float]) -> str:
    """A catalogue file with the measured rates in place of the listed ones.

    But for `element_flops`, measured over transcendental functions: products of f32 without TF32
    are priced by the listed figure too.
    """
    today = time.strftime("%Y-%m-%d")
    source = f'source = "measured by scripts/gpu_check", date = "{today}"'
    lines = {
        name: f"{name.removeprefix('flops.')} = {{ value = {value:.4g}, {source} }}"
        for name, value in measured.items()
        if name != "element_flops"
    }
    flops = [line for name, line in lines.items() if name.startswith("flops.")]
    others = [line for name, line in lines.items() if not name.startswith("flops.")]
    head, table = f"[chip.{chip.name}]", f"[chip.{chip.name}.flops]"
    return "\n".join([head, *others, "", table, *flops, ""])


def _listed(chip: Chip, name: str) -> float:
    if name.startswith("flops."):
        return chip.flops[name.removeprefix("flops.")].value
    return {
        "element_flops": chip.element_flops,
        "memory_bandwidth": chip.memory_bandwidth,
        "launch_s": chip.launch_s,
    }[name].value


def _row(name: str, source: str, there: autoshard.Plan, here: autoshard.Plan) -> dict[str, Any]:
    assert there.trial is not None and isinstance(there.trial.compiled, Estimate)
    assert here.trial is not None and isinstance(here.trial.profiled, Measurement)
    assert isinstance(here.trial.compiled, Estimate)
    predicted, compiled, seen = there.trial.compiled, here.trial.compiled, here.trial.profiled
    measured_s = statistics.median(seen.samples_s)
    return {
        "program": name,
        "rates": source,
        "predicted_s": predicted.time_s,
        "predicted_here_s": compiled.time_s,  # of what the live compiler made, by measured rates
        "measured_s": measured_s,
        "ratio": predicted.time_s / measured_s,
        "samples_s": list(seen.samples_s),
        "computing_s": seen.devices[0].compute_s if seen.devices else None,
        "peak_bytes": predicted.peak_memory_bytes,
        "peak_bytes_here": compiled.peak_memory_bytes,
        "unmodelled": list(predicted.unmodelled),
        "elapsed_s": here.evidence.elapsed_s,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="predicted without the device, over measured on it")
    for head in ("program", "rates", "predicted", "measured", "ratio", "memory", "memory here"):
        table.add_column(head)
    for row in rows:
        table.add_row(
            row["program"],
            row["rates"],
            seconds(row["predicted_s"]),
            seconds(row["measured_s"]),
            f"{row['ratio']:.2f}",
            mebibytes(row["peak_bytes"]),
            mebibytes(row["peak_bytes_here"]),
        )
    return table


if __name__ == "__main__":
    app.run(main)
