"""The measured programs of `results/fidelity.jsonl.xz`, and models of cost on their features.

The file has one case a line as JSON: a model of the zoo at its shrunk scale on 4 or 8 fake CPU
devices. xz keeps it at 0.5 MB with every digit of every sample, since the layouts of a case repeat
each other over long distances; gzip's window of 32 kB makes 0.7 MB of the same lines. A line of its
own for each case lets a reader take one case alone.

A case holds name, family, devices, scale, seed, machine, cores, versions, date and commit of the
samples, and
- `constants`: of the model of cost that rung 1 and rung 2 used. They are those of revision
  `predicted.model_revision` (`model_revision` where that is absent) and include constants that the
  library no longer has. `borrowed` names the constants that another machine measured.
- `programs`: of each its name, the groups it was drawn for, its baseline, its place in the search's
  ranking (0 for the plan), `candidate` (the layout and the knobs), `failure`, `samples_s` in
  seconds with the round of each in `rounds`, and `rung1` and `rung2`: the features that the rungs
  of that revision gave. Bytes, FLOPs and operation counts are those of one device.

The times are real measurements. The features are old: they do not follow the code. Commit c6546d8
has the raw files (results/fidelity/*/sample.json) and the script that packed them.
"""

import dataclasses
import json
import lzma
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from autoshard.target.cost import FRESH_FROM_BYTES
from experiments.ranks import Parts, log_times, times

PATH = pathlib.Path(__file__).parents[1] / "results" / "fidelity.jsonl.xz"

Predict = Callable[[Mapping[str, Any], Mapping[str, Any]], Parts]
"""(constants of a case, a program) -> predicted seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The programs of one case that ran in every round.

    Attributes:
      case: a name of the zoo.
      devices: fake CPU devices.
      constants: of the model of cost, see the module's docstring.
      programs: as the file has them.
    """

    case: str
    family: str
    devices: int
    constants: Mapping[str, Any]
    programs: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.case}-{self.devices}"

    def logs_PR(self) -> np.ndarray:
        """See `ranks.log_times`."""
        return log_times((p["samples_s"], p["rounds"]) for p in self.programs)

    def thinned(self, count: int) -> "Sample":
        """At most `count` programs, evenly spread over the measured ranking; 0 for all."""
        if not 0 < count < len(self.programs):
            return self
        ranking = np.argsort(times(self.logs_PR()))
        chosen = ranking[np.linspace(0, len(ranking) - 1, count).round().astype(int)]
        return dataclasses.replace(self, programs=tuple(self.programs[i] for i in chosen))


def load(names: Collection[str] = (), path: pathlib.Path = PATH) -> list[Sample]:
    """Reads samples.

    Args:
      names: such as "vit-8"; all if empty.

    Raises:
      ValueError: the file has no sample of a name.
    """
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        found = [_sample(json.loads(line)) for line in lines]
    known = [sample.name for sample in found]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{path.name} has no samples {unknown}, expected some of {known}")
    return [sample for sample in found if not names or sample.name in names]


def _sample(data: Mapping[str, Any]) -> Sample:
    return Sample(
        **{key: data[key] for key in ("case", "family", "devices", "constants")},
        programs=tuple(p for p in data["programs"] if p["failure"] is None),
    )


def rung1(constants: Mapping[str, Any], program: Mapping[str, Any]) -> Parts:
    """The stored prediction of rung 1."""
    del constants
    return Parts(program["rung1"]["compute_s"], program["rung1"]["communication_s"])


def rung2(constants: Mapping[str, Any], program: Mapping[str, Any]) -> Parts:
    """The stored prediction of rung 2."""
    del constants
    return Parts(program["rung2"]["compute_s"], program["rung2"]["communication_s"])


def roofline(
    constants: Mapping[str, Any], program: Mapping[str, Any], zero_bytes: bool = False
) -> Parts:
    """Roofline on rung 2's counts, with one constant for fresh pages.

    Compute time is FLOPs / rate + bytes / bandwidth + operations * launch time + temporaries *
    seconds for a byte of fresh pages, times the number of devices, since fake devices share the
    host. Arithmetic and traffic add up: on such a host a product waits for its operands before it
    computes. Temporaries count from `FRESH_FROM_BYTES` on. They are the peak less the state, as the
    file does not have the bytes of the batch. Communication time is the stored one.

    Args:
      zero_bytes: memory traffic and fresh pages cost no time. Communication time remains.
    """
    counts = program["rung2"]
    each_s = counts["flops"] / constants["contract_flops_per_s"]
    each_s += counts["op_count"] * constants["launch_s"]
    if not zero_bytes:
        each_s += counts["bytes_accessed"] / constants["bandwidth_bytes_per_s"]
        temporaries = counts["peak_memory_bytes"] - counts["state_bytes"]
        if temporaries >= FRESH_FROM_BYTES:
            each_s += temporaries * constants["fresh_s_per_byte"]
    return Parts(constants["device_count"] * each_s, counts["communication_s"])


STORED: dict[str, Predict] = {"rung1": rung1, "rung2": rung2, "roofline": roofline}
