"""Why the winner wins, in one sentence, and the state of the numerics check."""

from typing import TYPE_CHECKING

from autoshard.report.words import mebibytes, seconds
from autoshard.trial import Estimate, Measurement, Trial

if TYPE_CHECKING:
    from autoshard.plan import Plan


def explain(plan: "Plan") -> str:
    """One sentence: what the winner saves over the best other way, and where."""
    evidence = plan.evidence
    winner = plan.trial
    if winner is None or not isinstance(winner.estimate, Estimate):
        return "The plan was made without a search."
    others = [
        t
        for t in evidence.trials
        if t.baseline
        and t.candidate != winner.candidate
        and t.failure is None
        and isinstance(t.compiled if winner.compiled else t.propagated, Estimate)
    ]
    named = f" (it is the baseline {winner.baseline!r})" if winner.baseline else ""
    if not plan.layout.mesh:
        return "There is one device: nothing is sharded."
    measured = [t for t in others if isinstance(t.profiled, Measurement)]
    if isinstance(winner.profiled, Measurement) and measured:
        rival = min(measured, key=_measured_s)
        ratio = _measured_s(rival) / winner.profiled.median_s
        how = f"measured {seconds(winner.profiled.median_s)}, {ratio:.2f} x as fast as the best other baseline, {rival.baseline} ({seconds(_measured_s(rival))})"
    elif others:
        rival = min(others, key=lambda t: t.estimate.time_s if t.estimate else 0.0)
        assert rival.estimate is not None
        how = f"predicted {seconds(winner.estimate.time_s)} against {seconds(rival.estimate.time_s)} for {rival.baseline}"
    else:
        return f"The winner{named} is the only layout that could be judged."
    return f"The winner{named} is {how}: {_difference(winner, rival)}."


def _measured_s(trial: Trial) -> float:
    assert isinstance(trial.profiled, Measurement)
    return trial.profiled.median_s


def _difference(winner: Trial, rival: Trial) -> str:
    """The largest of the predicted differences: communication, computation, memory."""
    a, b = winner.estimate, rival.estimate
    assert a is not None and b is not None
    if a.flops < 0.9 * b.flops:
        return f"each device computes {a.flops / b.flops:.2f} of the operations"
    sent, other = sum(a.bytes_by_kind().values()), sum(b.bytes_by_kind().values())
    if sent < 0.95 * other:
        parts = []
        mine, theirs = a.bytes_by_kind(), b.bytes_by_kind()
        for kind in sorted(set(mine) | set(theirs), key=lambda k: mine.get(k, 0) - theirs.get(k, 0)):
            if mine.get(kind, 0) < theirs.get(kind, 0):
                parts.append(
                    f"{kind.replace('_', '-')} {mebibytes(mine.get(kind, 0))} instead of"
                    f" {mebibytes(theirs.get(kind, 0))}"
                )
        return f"it sends {mebibytes(sent)} a step instead of {mebibytes(other)} ({parts[0]})"
    if a.bytes_accessed < 0.95 * b.bytes_accessed:
        return (
            f"it moves {mebibytes(a.bytes_accessed)} through memory a step instead of"
            f" {mebibytes(b.bytes_accessed)}"
        )
    if len(a.collectives) < len(b.collectives):
        return f"it communicates {len(a.collectives)} times instead of {len(b.collectives)}"
    return "by what the model predicts they are alike, and the measurement decides"


def numerics(plan: "Plan") -> str:
    """The state of the numerics check, in one sentence."""
    winner = plan.trial
    measured = winner.profiled if winner else None
    if not isinstance(measured, Measurement) or measured.numerics == "unchecked":
        return "Numerics: unchecked."
    where = f" at {measured.numerics_where}" if measured.numerics_where else ""
    against = {
        "exact": "the unsharded step",
        "relative": "another layout that fits",
        "reduced": "the unsharded step on a smaller batch",
    }[measured.numerics]
    return (
        f"Numerics: {measured.numerics}; after 2 steps the change of every state leaf agrees with"
        f" {against} (largest relative error {measured.numerics_error or 0.0:.1e}{where})."
    )
