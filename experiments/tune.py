"""Tune the sharding of a transformer on real text, then train it with the plan.

Question: what layout does the search find for a byte-level decoder on fake CPU devices, and does
  training with it work?
Command: scripts/tune   (or python -m experiments.tune --devices=8 --steps=150)
Cost: four to five minutes on 2 cores, --seconds=180 of them search.
Expected: a ranked table of finalists and baselines; a validation loss that falls below 2.5 nats a
  byte; plan.json, the journal and the profiler trace in the run folder. A second run in the same
  folder writes its plan, its figures and its checkpoint beside those of the first.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import time

import jax
from absl import app, flags
from rich.console import Console

import autoshard
from experiments import sizes, tasks, training
from models.decoder import DecoderConfig

_RUN = flags.DEFINE_string("run", "", "Run folder; by default runs/tune-<date>-<time>.")
_DEVICES = flags.DEFINE_integer("devices", 8, "Fake CPU devices.")
_MODEL = flags.DEFINE_enum("model", "decoder", ["decoder", "mlp"], "What to tune; see sizes.py.")
_SIZE = sizes.DECODER.model
_D_MODEL = flags.DEFINE_integer("d_model", _SIZE.d_model, "Width of the decoder's residual stream.")
_HEADS = flags.DEFINE_integer("heads", _SIZE.heads, "Query heads; a head is d_model / heads wide.")
_KV_HEADS = flags.DEFINE_integer("kv_heads", _SIZE.kv_heads, "Key-value heads.")
_MLP_DIM = flags.DEFINE_integer("mlp_dim", _SIZE.mlp_dim, "Hidden width of the decoder's MLP.")
_LAYERS = flags.DEFINE_integer("layers", _SIZE.layers, "Blocks.")
_SEQUENCE = flags.DEFINE_integer("sequence", _SIZE.sequence, "Bytes a document predicts.")
_BATCH = flags.DEFINE_integer("batch", sizes.DECODER.batch_size, "Documents in a batch.")
_SECONDS = flags.DEFINE_float("seconds", 180.0, "Budget of the search, seconds.")
_CANDIDATES = flags.DEFINE_integer("candidates", 300, "Budget of the search, layouts propagated.")
_COMPILES = flags.DEFINE_integer("compiles", 12, "Budget of the search, programs compiled.")
_PROFILES = flags.DEFINE_integer("profiles", 10, "Budget of the search, programs measured.")
_STEPS = flags.DEFINE_integer("steps", 150, "Training steps after the search; 0 for none.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the search and of the training batches.")
_CHECKPOINT = flags.DEFINE_bool("checkpoint", False, "Save the trained state with orbax.")

HELD_OUT_BATCHES = 4


def main(argv: list[str]) -> None:
    del argv
    # Before anything asks JAX for a device.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    # With no more threads than devices some layouts never end (docs/decisions/0035).
    os.environ.setdefault("PJRT_NPROC", str(_DEVICES.value + _DEVICES.value // 2))

    console = Console()
    run = pathlib.Path(_RUN.value or time.strftime("runs/tune-%Y%m%d-%H%M%S"))
    run.mkdir(parents=True, exist_ok=True)
    if _MODEL.value == "decoder":
        task = tasks.decoder_task(_decoder_size())
    else:
        task = tasks.mlp_task(sizes.MLP)

    plan = autoshard.search(
        task.model_fn,
        jax.devices(),
        knobs=task.knobs,
        budget=autoshard.Budget(
            candidates=_CANDIDATES.value,
            compiles=_COMPILES.value,
            profiles=_PROFILES.value,
            seconds=_SECONDS.value,
            rounds=12,
        ),
        journal=run / "journal.jsonl",
        seed=_SEED.value,
    )
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    plan.save(str(training.vacant(run / "plan.json")))

    if _STEPS.value:
        held_out = itertools.islice(task.batches("validation", 0), HELD_OUT_BATCHES)
        training.train(
            plan,
            task.batches("train", _SEED.value),
            _STEPS.value,
            units_per_step=task.units_per_step,
            unit=task.unit,
            evaluation=training.Evaluation(
                metrics=task.evaluate, batches=tuple(held_out), every=max(1, _STEPS.value // 4)
            ),
            log=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            figures=run / "training.jsonl",
            checkpoint_folder=run / "checkpoints" if _CHECKPOINT.value else None,
        )

    plain = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    plain(f"\nEverything is in {run.resolve()}:")
    for path in sorted(run.iterdir()):
        plain(f"  {path.name}{'/' if path.is_dir() else ''}")


def _decoder_size() -> sizes.DecoderSize:
    model = DecoderConfig(
        d_model=_D_MODEL.value,
        heads=_HEADS.value,
        kv_heads=_KV_HEADS.value,
        head_dim=_D_MODEL.value // _HEADS.value,
        mlp_dim=_MLP_DIM.value,
        layers=_LAYERS.value,
        sequence=_SEQUENCE.value,
    )
    return dataclasses.replace(sizes.DECODER, model=model, batch_size=_BATCH.value)


if __name__ == "__main__":
    app.run(main)
