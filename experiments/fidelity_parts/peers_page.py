"""The table of search baselines: how many candidates the beam needs for what a peer finds."""

import collections
from collections.abc import Mapping
from typing import Any

from autoshard.records.words import seconds
from experiments.pages import Cell, Table

SHARE = 0.1
"""Goal: the beam needs at most so many times a peer's candidates for the peer's best."""

_PEERS = {"tpe": "TPE", "random": "random"}


def peers_table(found: Mapping[str, Any], count: int) -> Table:
    """One row for each case; candidates are those beside the baselines, which all begin with.

    Args:
      found: what `experiments.search_peers` wrote.
      count: how many cases there are: the goal is met when all of them have been run and meet it.
    """
    cases = found["cases"]
    run = _models_run(cases)
    rows: list[tuple[Cell, ...]] = []
    for case, one in cases.items():
        cells = [Cell(case), Cell(str(one["budget"])), _best(one["beam"], one["budget"])]
        for who in _PEERS:
            cells += [_best(one[who], one["budget"]), _against(one[who])]
        rows.append(tuple(cells))
    last = [Cell(f"goal: at most {SHARE}"), Cell(""), Cell("")]
    for who in _PEERS:
        telling = [one[who] for one in cases.values() if one[who]["candidates"]]
        met = sum(map(meets, telling))
        said = f"met: {met} of {len(telling)} with something to find, {run} of {count} run"
        last += [Cell(""), Cell(said, red=met < len(telling) or run < count or not telling)]
    rows.append(tuple(last))
    heads = [
        head
        for name in _PEERS.values()
        for head in (f"{name}'s best", f"{name}'s candidates, the beam's for as good (share)")
    ]
    return Table(
        title="Search baselines: candidates until the best predicted step",
        heads=("case", "budget", "the beam's best", *heads),
        rows=tuple(rows),
    )


def _models_run(cases: Mapping[str, Any]) -> int:
    """How many models were run for one target with one budget, where that is most."""
    kinds = ((name.partition(" on ")[2], one["budget"]) for name, one in cases.items())
    return max(collections.Counter(kinds).values(), default=0)


def meets(peer: Mapping[str, Any]) -> bool:
    """Whether the beam was as good with a tenth of the peer's candidates.

    Where the peer found nothing better than the baselines, there was nothing to be quick at.
    """
    beam = peer["beam_candidates"]
    return beam is not None and beam <= SHARE * peer["candidates"]


def _best(strategy: Mapping[str, Any], budget: int) -> Cell:
    """A strategy's best, and how many candidates it judged where it ended before the budget did."""
    judged = strategy["judged"]
    said = f", {judged} judged" if judged < budget else ""
    return Cell(f"{seconds(strategy['best_s'])}{said}")


def _against(peer: Mapping[str, Any]) -> Cell:
    own, beam = peer["candidates"], peer["beam_candidates"]
    share = f" ({beam / own:.2f})" if own and beam is not None else ""
    said = f"{own}, {'never' if beam is None else beam}{share}" if own else "nothing to find"
    return Cell(said, red=bool(own) and not meets(peer))
