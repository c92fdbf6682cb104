"""How many candidates does the search need, beside strategies that know nothing of layouts?

Question: of the beam search, Optuna's TPE and random search over one space, with one budget, each
  begun with the baselines: how many candidates does the beam need for the best predicted step that
  a peer finds, and how many did the peer need?
Command: python -m experiments.search_peers --cases=decoder,vit     (all the zoo without --cases)
         (needs pip install -e '.[train,peers,cuda]'; --target=v5e:2x4 tpu in its place)
Cost: rung 1 alone, one core, and Optuna's own time, which grows with the square of its trials:
  14 to 29 CPU-minutes a case on an AMD EPYC of family 23, with tests beside them.
Expected: the beam reaches a peer's best cost with at most a tenth of the peer's candidates.

Costs are rung 1's for --target, which needs no device: the calibration of a shared machine would
be another each time. Results are added to results/fidelity/peers.json, each with its machine,
versions, model revision and date; what is there is not run again.
`python -m experiments.fidelity --part=report` puts them on its page.
"""

import json
import pathlib
import platform
import time
from typing import Any

import jax
from absl import app, flags
from rich.console import Console

from autoshard.lowering.problem import make_problem
from autoshard.program.program import trace
from autoshard.rungs.profile.calibration_files import cost_model
from autoshard.target.cost import MODEL_REVISION
from autoshard.target.target import find_target
from autoshard.tuner.strategy import Beam, Strategy
from experiments.fidelity_parts.peers_page import peers_table
from experiments.fidelity_parts.store import commit, seen_on
from experiments.pages import as_rich
from experiments.peers import Tpe, Uniform
from experiments.rung1_search import Climb, Known, climb
from experiments.zoo import cases

_CASES = flags.DEFINE_list("cases", [], "Names of cases; all if empty.")
_TARGET = flags.DEFINE_string("target", "h100:1x8", "Whose figures rung 1 takes.")
_BUDGET = flags.DEFINE_integer("budget", 600, "Candidates of each, beside the baselines.")
_SEED = flags.DEFINE_integer("seed", 0, "Of every strategy.")
_OUT = flags.DEFINE_string("out", "results/fidelity/peers.json", "Where the figures go.")


def main(argv: list[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    path = pathlib.Path(_OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for name in _CASES.value or cases.CASES:
        key = f"{name} on {_TARGET.value}"
        asked = {"budget": _BUDGET.value, "seed": _SEED.value}
        if asked.items() <= data["cases"].get(key, {}).items():
            continue
        data["cases"][key] = {
            **compared(name),
            **seen_on(),
            "python": platform.python_version(),
            "model_revision": MODEL_REVISION,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
        }
        partial = path.with_suffix(".partial")  # whole or not at all
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        Console().print(as_rich(peers_table({"cases": {key: data["cases"][key]}}, 1)))
    Console().print(as_rich(peers_table(data, len(cases.CASES))))


def compared(name: str) -> dict[str, Any]:
    """Every strategy on one case, and how many candidates the beam needs for a peer's best."""
    target = find_target(_TARGET.value)
    cost = cost_model(target)
    subject = make_problem(trace(cases.case(name, "shrunk").workload()), target, "free", None)
    known: Known = {}
    room = target.memory_bytes
    strategies: dict[str, Strategy] = {"beam": Beam(room), "tpe": Tpe(room), "random": Uniform()}
    found = {
        who: climb(subject, cost, room, strategy, _BUDGET.value, _SEED.value, known)
        for who, strategy in strategies.items()
    }
    return {
        "budget": _BUDGET.value,
        "seed": _SEED.value,
        "space": subject.space.size(),
        "baselines": found["beam"].baselines,
        **{who: _row(climbed, found["beam"]) for who, climbed in found.items()},
    }


def _row(climbed: Climb, beam: Climb) -> dict[str, Any]:
    """One strategy: its best, when it had it, and when the beam was as good."""
    return {
        "judged": climbed.judged,
        "best_s": climbed.best_s,
        "candidates": climbed.candidates_until(climbed.best_s),
        "beam_candidates": beam.candidates_until(climbed.best_s),
        "cpu_s": climbed.cpu_s,
    }


if __name__ == "__main__":
    app.run(main)
