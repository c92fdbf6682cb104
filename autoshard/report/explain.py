"""Why the winner wins, in one sentence, and the state of the numerics check."""

from autoshard.records.evidence import PlanSummary
from autoshard.records.trial import Estimate, Failure, Measurement, Trial, paired_ratio
from autoshard.records.words import mebibytes, power, seconds


def explain(plan: PlanSummary) -> str:
    """One sentence: what the winner saves over the best other way, and where."""
    evidence = plan.evidence
    winner = plan.trial
    if winner is None or not isinstance(winner.estimate, Estimate):
        return "The plan was made without a search."
    constraints = winner.candidate.layout.constraints
    others = [
        t
        for t in evidence.trials
        if t.baseline
        and t.candidate.with_constraints(constraints) != winner.candidate
        and t.failure is None
        and isinstance(judged := t.compiled if winner.compiled else t.propagated, Estimate)
        and judged.peak_memory_bytes <= evidence.memory_limit_bytes
    ]
    named = f" (it is the baseline {winner.baseline!r})" if winner.baseline else ""
    if not plan.layout.mesh:
        return "There is one device: nothing is sharded."
    if isinstance(winner.profiled, Measurement):
        mine = winner.profiled
        paired = [
            (ratio, t)
            for t in others
            if isinstance(t.profiled, Measurement)
            and (ratio := paired_ratio(mine, t.profiled)) is not None
        ]
        if paired:
            ratio, rival = min(paired, key=lambda x: x[0])
            return (
                f"The winner{named} takes {seconds(mine.median_s)} a step;"
                f" {_compared(ratio, rival.baseline)}, the best other baseline, in the same rounds:"
                f" {_difference(winner, rival)}."
            )
    failed = [t.profiled for t in evidence.trials if isinstance(t.profiled, Failure)]
    if failed and not isinstance(winner.profiled, Measurement):
        return (
            f"The winner{named} was not measured, and is the first by prediction: {len(failed)}"
            f" others were run and failed, the first of a {failed[0].kind}."
        )
    if not others:
        seen = "compiled" if winner.compiled else "estimated"
        return f"The winner{named} was compared with no baseline: no other that fits was {seen}."
    rival = min(others, key=lambda t: t.estimate.time_s if t.estimate else 0.0)
    assert rival.estimate is not None
    return (
        f"The winner{named} is predicted to take {seconds(winner.estimate.time_s)} a step,"
        f" {rival.baseline} {seconds(rival.estimate.time_s)}: {_difference(winner, rival)}."
    )


def _compared(ratio: float, name: str) -> str:
    if abs(ratio - 1) < 0.01:
        return f"as long as {name}"
    return (
        f"{ratio:.2f} x as fast as {name}" if ratio > 1 else f"{1 / ratio:.2f} x as long as {name}"
    )


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
        for kind in sorted(
            set(mine) | set(theirs), key=lambda k: mine.get(k, 0) - theirs.get(k, 0)
        ):
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
    if a.communication_s < 0.95 * b.communication_s:
        return (
            f"communication takes {seconds(a.communication_s)} instead of"
            f" {seconds(b.communication_s)}"
        )
    measured = isinstance(winner.profiled, Measurement)
    return "by what the model predicts they are alike" + (
        ", and the measurement decides" if measured else ""
    )


def numerics(plan: PlanSummary) -> str:
    """The state of the numerics check, in one sentence."""
    winner = plan.trial
    measured = winner.profiled if winner else None
    if not isinstance(measured, Measurement) or measured.numerics == "unchecked":
        where = "" if plan.is_here else " where the devices are"
        return f"Numerics: unchecked; plan.check() compares with the unsharded step{where}."
    if measured.numerics == "unsharded":
        return "Numerics: it is the unsharded step, on one device, and stays finite in 2 steps."
    against = {
        "exact": "the unsharded step",
        "relative": "another layout that fits",
    }[measured.numerics]
    error = f"largest error {power(measured.numerics_error or 0.0)}"
    if measured.numerics_allowed is not None:
        error += f", allowed {power(measured.numerics_allowed)}"
    where = f", at {measured.numerics_where}" if measured.numerics_where else ""
    return f"Numerics: agrees with {against} after 2 steps ({error}{where})."
