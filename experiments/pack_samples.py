"""Packs the samples of the fidelity benchmark into one file.

Command: python -m experiments.pack_samples
Cost: 10 seconds.
Expected: results/fidelity.jsonl.xz, about 0.5 MB, of 34 cases and 1,885 programs.

`experiments.samples` describes the file.
"""

import json
import lzma
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from experiments.samples import PATH

_FROM = flags.DEFINE_string("from", "results/fidelity", "Folder with <case>-<devices>/sample.json.")
_OUT = flags.DEFINE_string("out", str(PATH), "The file to write.")

_CASE = (
    *("case", "family", "devices", "scale", "seed", "date", "commit", "versions", "python"),
    *("machine", "cores", "memory_bytes", "threads", "memory_limit_bytes"),
    *("model_revision", "calibration_revision", "predicted"),
)
_PROGRAM = ("name", "groups", "baseline", "place", "candidate", "failure", "samples_s", "rounds")
_RUNG = (
    *("time_s", "compute_s", "communication_s", "peak_memory_bytes", "state_bytes", "flops"),
    *("bytes_accessed", "op_count", "bytes_by_kind", "count_by_kind"),
)


def packed(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the file, from the content of a sample.json."""
    borrowed = sample.get("borrowed", {})
    constants = {**sample["constants"], **borrowed.get("constants", {})}
    if "combines_sums" in constants:  # the name of this constant until 0.1
        constants.setdefault("one_by_one", constants.pop("combines_sums"))
    return {
        **{key: sample[key] for key in _CASE if key in sample},
        "constants": constants,
        "borrowed": borrowed.get("machines", {}),
        "programs": [
            {
                **{key: program[key] for key in _PROGRAM},
                **{rung: _rung(program[rung]) for rung in ("rung1", "rung2")},
            }
            for program in sample["programs"]
        ],
    }


def _rung(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The features of a rung, or why it has none."""
    if said is None or "failure" in said:
        return None if said is None else dict(said)
    return {key: said[key] for key in _RUNG}


def main(argv: list[str]) -> None:
    del argv
    paths = sorted(pathlib.Path(_FROM.value).glob("*/sample.json"))
    lines = [
        json.dumps(packed(json.loads(path.read_text("utf-8"))), separators=(",", ":")) + "\n"
        for path in paths
    ]
    out = pathlib.Path(_OUT.value)
    out.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{out}: {len(paths)} cases, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    app.run(main)
