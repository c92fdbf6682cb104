"""Does rung 1 rank layouts as the target's own compiler does?

Question: of layouts that fit by rung 2, how well do rung 1's times and peaks agree with rung 2's;
  how much slower than the best by rung 2 is the best of rung 1's first eight (the regret); does
  rung 1 reject what fits?
Command: python -m experiments.rung_agreement                    every stored case, rung 1 anew
         python -m experiments.rung_agreement --case=resnet50-h100-1x8
         python -m experiments.rung_agreement --add=resnet50 --target=h100:1x8   (extra cuda or tpu)
Cost: 20 to 60 s a stored case. Adding one compiles --layouts programs by two workers: a compile of
  ResNet-50 for 8 H100 takes about 3 minutes of a core.
Expected: regret at most 0.5 points above the stored rung 1's, nothing that fits rejected.

results/rung_agreement.jsonl.xz has a line for each case: rung 2's times and peaks, and beside them
those of the rung 1 of that day. Added layouts are baselines, at most half, then draws from the
space with seed 0.
"""

import dataclasses
import json
import lzma
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from autoshard import Workload
from autoshard.lowering.lower import lower_step
from autoshard.lowering.problem import SearchProblem, make_problem
from autoshard.program.program import trace
from autoshard.records.layout import Candidate
from autoshard.records.trial import Estimate
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.rungs.propagate import Propagator
from autoshard.rungs.propagate.constraints import minimal_constraints
from autoshard.space.baselines import baselines
from autoshard.target.target import Target, find_target
from autoshard.tuner.promotion import DEFAULT_LOWER_BOUND
from experiments import pod_tasks, rung2_now
from experiments.pod_sizes import POD_SIZES
from experiments.zoo.cases import CASES, case

STORED = pathlib.Path(__file__).parents[1] / "results/rung_agreement.jsonl.xz"
FIRST = 8

_CASE = flags.DEFINE_list("case", [], "Stored cases, such as mixtral-h100-8x8; all if empty.")
_ADD = flags.DEFINE_enum("add", None, [*POD_SIZES, *CASES], "A model to compile and to store.")
_TARGET = flags.DEFINE_string("target", "h100:1x8", "Hardware of --add.")
_LAYOUTS = flags.DEFINE_integer("layouts", 48, "Layouts of --add.")


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What one case shows; ratios are rung 1's over rung 2's, (least, median, most)."""

    case: str
    compared: int
    tau: float
    regret: float
    rejected: int
    times: tuple[float, float, float]
    peaks: tuple[float, float, float]

    def __str__(self) -> str:
        times, peaks = (
            " ".join(f"{ratio:6.2f}" for ratio in ratios) for ratios in (self.times, self.peaks)
        )
        return (
            f"{self.case:26} {self.compared:5} {self.tau:7.3f} {self.regret:8.2%}"
            f" {self.rejected:9}   {times}   {peaks}"
        )


def stored(names: list[str]) -> list[dict[str, Any]]:
    """The stored cases of these names, all where there are none."""
    with lzma.open(STORED, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    known = {one["case"] for one in found}
    if unknown := set(names) - known:
        raise app.UsageError(f"no stored case {sorted(unknown)}: expected some of {sorted(known)}")
    return [one for one in found if not names or one["case"] in names]


def model_of(name: str, batch_size: int | None) -> Callable[..., Workload]:
    """model_fn of a pod's model or of a published model of the zoo."""
    if name in POD_SIZES:
        return pod_tasks.task(name, **({"batch_size": batch_size} if batch_size else {}))[0]
    return case(name, "published").workload


class Rung1:
    """Rung 1 of the programs of one case."""

    def __init__(self, model_fn: Callable[..., Workload], target: Target):
        self.target, self.cost = target, cost_model(target)
        self._model_fn = model_fn
        self._opened: dict[tuple[tuple[str, object], ...], tuple[SearchProblem, Propagator]] = {}

    def subject(self, knobs: tuple[tuple[str, Any], ...]) -> tuple[SearchProblem, Propagator]:
        """The program of one choice of knobs, traced once."""
        if knobs not in self._opened:
            program = trace(self._model_fn(**dict(knobs)), knobs, False)
            subject = make_problem(program, self.target, "free", None)
            self._opened[knobs] = subject, Propagator(subject.analysis)
        return self._opened[knobs]

    def judge(self, candidate: Candidate) -> Estimate | None:
        """The estimate of a stored layout; None if it names an axis that the step no longer has."""
        subject, propagator = self.subject(candidate.knobs)
        known = {axis.name for axis in subject.analysis.axes.axes}
        layout = candidate.layout
        if any(axis not in known for axis, _ in (*layout.activation_rules, *layout.state_rules)):
            return None  # some names are source lines
        said = propagator.judge(subject.space, candidate.layout, self.cost)
        if not isinstance(said, Estimate):
            raise ValueError(f"rung 1 refuses a layout that compiled: {said.message}")
        return said


def agreement(one: dict[str, Any], rung1: Rung1 | None) -> Agreement:
    """Compares rung 1 with the stored rung 2 over the layouts that fit.

    Args:
      rung1: today's; None for the one that was stored beside rung 2.
    """
    fitting = [p for p in one["points"] if p["fits"] and p["rung2"]]
    if rung1 is None:
        said = [p["rung1"] for p in fitting]
    else:
        judged = [(p, rung1.judge(Candidate.from_json(p["candidate"]))) for p in fitting]
        fitting = [p for p, estimate in judged if estimate]
        said = [_figures(estimate) for _, estimate in judged if estimate]
    time_s = [p["rung2"]["time_s"] for p in fitting]
    predicted_s = [e["time_s"] for e in said]
    first = sorted(range(len(said)), key=predicted_s.__getitem__)[:FIRST]
    peaks = [
        e["peak_memory_bytes"] / p["rung2"]["peak_memory_bytes"]
        for e, p in zip(said, fitting, strict=True)
    ]
    return Agreement(
        case=one["case"],
        compared=len(fitting),
        tau=float(kendalltau(predicted_s, time_s).statistic),
        regret=min(time_s[i] for i in first) / min(time_s) - 1,
        rejected=sum(_rejected(e, one["limit_bytes"]) for e in said),
        times=_spread([a / b for a, b in zip(predicted_s, time_s, strict=True)]),
        peaks=_spread(peaks),
    )


def _rejected(said: dict[str, float], limit_bytes: int) -> bool:
    """Whether rung 1 alone rejects (`tuner.promotion.surely_too_large`)."""
    return max(said["state_bytes"], said["peak_memory_bytes"] * DEFAULT_LOWER_BOUND) > limit_bytes


def _spread(ratios: list[float]) -> tuple[float, float, float]:
    return min(ratios), statistics.median(ratios), max(ratios)


def drawn(subject: SearchProblem, count: int) -> Iterator[Candidate]:
    """Baselines in their order, at most half of `count`, then draws from the space; each once."""
    rng = random.Random(0)
    seen = set()
    for baseline in baselines(subject.space)[: count // 2]:
        seen.add(baseline.candidate)
        yield baseline.candidate
    while len(seen) < count:
        draw = subject.space.sample(rng)
        if draw is not None and draw not in seen:
            seen.add(draw)
            yield draw


def compiled(name: str, target_name: str, count: int) -> dict[str, Any]:
    """A new case: what both rungs say of drawn layouts."""
    target = find_target(target_name)
    rung1 = Rung1(model_of(name, None), target)
    subject, propagator = rung1.subject(())
    usable = target.memory_bytes
    limit = int(usable * 0.95)
    asked, modules = [], []
    for candidate in drawn(subject, count):
        said = propagator.judge(subject.space, candidate.layout, rung1.cost)
        if not isinstance(said, Estimate) or said.state_bytes > limit:
            continue
        analysis = subject.analysis_for(candidate.layout)
        specs = minimal_constraints(analysis, subject.space.specs(candidate.layout))
        asked.append((candidate, said))
        modules.append(lower_step(analysis, specs, target))
    points = []
    outcomes = rung2_now.estimates(modules, target, rung1.cost, 900.0, log=print)
    for (candidate, said), outcome in zip(asked, outcomes, strict=True):
        rung2 = _figures(outcome) if isinstance(outcome, Estimate) else None
        points.append(
            {
                "candidate": candidate.to_json(),
                "fits": rung2 is not None and rung2["peak_memory_bytes"] <= limit,
                "rung1": _figures(said),
                "rung2": rung2,
            }
        )
    label = f"{name}-{target_name.replace(':', '-')}"
    return {
        "case": label,
        "model": name,
        "target": target_name,
        "batch_size": None,
        "limit_bytes": limit,
        "date": time.strftime("%Y-%m-%d"),
        "points": points,
    }


def _figures(said: Estimate) -> dict[str, float]:
    names = "time_s compute_s communication_s peak_memory_bytes state_bytes flops"
    return {name: getattr(said, name) for name in names.split()}


def store(new: dict[str, Any]) -> None:
    """Adds a case, or replaces the one of its name."""
    kept = [one for one in stored([]) if one["case"] != new["case"]] if STORED.exists() else []
    with lzma.open(STORED, "wt", encoding="utf-8") as file:
        for one in sorted([*kept, new], key=lambda one: str(one["case"])):
            file.write(json.dumps(one, separators=(",", ":")) + "\n")


def main(argv: list[str]) -> None:
    del argv
    names = _CASE.value
    if _ADD.value:
        new = compiled(_ADD.value, _TARGET.value, _LAYOUTS.value)
        store(new)
        names = [new["case"]]
    print(
        f"{'case':26} fit     tau   regret  rejected   time 1/2: least, median, most"
        "   peak 1/2: least, median, most"
    )
    for one in stored(names):
        print(agreement(one, None), "  (as stored)")
        rung1 = Rung1(model_of(one["model"], one["batch_size"]), find_target(one["target"]))
        start = time.monotonic()
        print(agreement(one, rung1), f"  ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    app.run(main)
