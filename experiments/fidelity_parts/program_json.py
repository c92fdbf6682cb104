"""One program of a sample as results hold it: its layout, what the rungs say, what was measured."""

from collections.abc import Sequence
from typing import Any

from autoshard.records.trial import Estimate, Failure
from autoshard.rungs.profile.race import Runner
from autoshard.tuner.state import Row

_RUNG: tuple[str, ...] = (
    "time_s",
    "compute_s",
    "communication_s",
    "peak_memory_bytes",
    "state_bytes",
    "flops",
    "bytes_accessed",
    "op_count",
)


def program_to_json(
    name: str, groups: Sequence[str], row: Row, ran: Runner, place: int | None
) -> dict[str, Any]:
    """One program as results hold it.

    Args:
      place: in the ranking of the search, 0 for the plan; None if it was not there.
    """
    return {
        "name": name,
        "groups": list(groups),
        "baseline": row.baseline,
        "place": place,
        "candidate": row.candidate.to_json(),
        "module": None if row.module is None else row.module.digest,
        "rung1": rung_to_json(row.propagated),
        "rung2": rung_to_json(row.compiled),
        **samples_to_json(ran),
    }


def samples_to_json(ran: Runner) -> dict[str, Any]:
    failure = ran.failure
    return {
        "failure": None
        if failure is None
        else {"stage": failure.stage, "kind": failure.kind, "message": failure.message[:500]},
        "samples_s": list(ran.samples_s),
        "rounds": list(ran.rounds),
    }


def rung_to_json(outcome: Estimate | Failure | None) -> dict[str, Any] | None:
    """An estimate's figures with the bytes and executions of each kind of collective."""
    if outcome is None:
        return None
    if isinstance(outcome, Failure):
        return {"failure": outcome.kind, "message": outcome.message[:300]}
    counts: dict[str, int] = {}
    for one in outcome.collectives:
        counts[one.kind] = counts.get(one.kind, 0) + one.count
    return {
        **{name: getattr(outcome, name) for name in _RUNG},
        "bytes_by_kind": outcome.bytes_by_kind(),
        "count_by_kind": counts,
        "elapsed_s": outcome.elapsed_s,
    }
